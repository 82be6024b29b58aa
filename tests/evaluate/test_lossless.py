"""Equal, near tie or different: what is what."""

from __future__ import annotations

import pytest
import torch

from slipstream.evaluate.lossless import compare_answers, first_difference, teacher_forced_agreement, top_gap_of


def test_first_difference():
    assert first_difference(expected=[1, 2, 3], found=[1, 2, 3]) is None
    assert first_difference(expected=[1, 2, 3], found=[1, 5, 3]) == 1
    assert first_difference(expected=[1, 2], found=[1, 2, 3]) == 2


def test_counts_by_the_gap_at_the_first_difference():
    asked = []

    def gap(tokens):
        asked.append(list(tokens))
        return {2: 5e-4, 3: 0.5}[len(tokens)]

    found = compare_answers(
        prompts=[[9], [9], [9], [9]],
        expected=[[1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2]],
        found=[[1, 2, 3], [1, 7, 7], [1, 2, 7], [1, 2, 3]],
        top_gap=gap,
    )
    assert (found.equal, found.near_ties, found.different) == (1, 1, 2)
    assert asked == [[9, 1], [9, 1, 2]]
    assert [d.position for d in found.differences] == [1, 2, 2]
    assert found.differences[2].gap is None, "an answer that only goes on longer is no near tie"


def test_gap_and_agreement_of_a_real_target(tiny_target, prompts):
    target = tiny_target("llama")
    prompt = prompts[2]
    with torch.no_grad():
        logits = target(torch.tensor([prompt]), use_cache=False).logits[0]
    best = logits[-1].topk(2).values
    assert top_gap_of(target)(prompt) == pytest.approx(float(best[0] - best[1]))
    own = int(logits[-1].argmax())
    assert teacher_forced_agreement(target, prompt=prompt, answer=[own]) == 1
    assert teacher_forced_agreement(target, prompt=prompt, answer=[(own + 1) % 8]) == 0
