"""Validation in the middle of training measures what `evaluate` measures on the same answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from launch_material import tiny_recipe
from torch import Tensor

from slipstream.config import Recipe, read_target_info, resolve_drafter
from slipstream.drafter import build_drafter
from slipstream.evaluate.measure import simulate_set
from slipstream.evaluate.prompts import PromptSet
from slipstream.evaluate.summary import summarise
from slipstream.launch.answers import ANSWERS_FILE, Answer, write_answers
from slipstream.launch.planning import open_run_plan, slot_layout, write_schedule
from slipstream.launch.training import OnDevice, Validation
from slipstream.records import Pack
from slipstream.runfolder import RunFolder
from slipstream.target.ends import FrozenEnds
from slipstream.target.fake import FakeTarget
from slipstream.transport.inline import InlineTransport
from slipstream.transport.slots import SlotPool

FEW = 9
"""Answers hold tokens 4 to 8 and drafts are among the first nine, so that they stand now and then."""


@pytest.fixture
def recipe(material: dict[str, str], tmp_path: Path) -> Recipe:
    changes: dict[str, Any] = {"validation__prompts": material["prompts"], "validation__max_new_tokens": 40}
    return tiny_recipe(material, tmp_path, name="measured", drafter__initializer_range=0.3, **changes)


@pytest.fixture
def answered(recipe: Recipe) -> list[Answer]:
    """Answers of all lengths, one of a single token, one as long as allowed."""
    rng = np.random.default_rng(8)
    lengths = [(5, 40), (12, 33), (30, 1), (9, 21), (40, 40)]
    found = [
        Answer(prompt_ids=tuple(rng.integers(4, 200, p).tolist()), answer_ids=tuple(rng.integers(4, FEW, a).tolist()))
        for p, a in lengths
    ]
    write_answers(path=RunFolder(Path(recipe.runs) / recipe.name).validation / ANSWERS_FILE, answers=found)
    return found


def test_acceptance_during_training_is_that_of_evaluate(recipe: Recipe, answered: list[Answer]) -> None:
    info = read_target_info(recipe.target.model)
    shape = resolve_drafter(recipe=recipe, info=info)
    folder = RunFolder(Path(recipe.runs) / recipe.name)
    write_schedule(recipe=recipe, folder=folder)
    plan = open_run_plan(recipe=recipe, folder=folder, ranks=1, start_step=0)
    target = FakeTarget(seed=2, num_taps=shape.num_taps, hidden_size=shape.hidden_size, vocab_size=shape.vocab_size)
    head_VD = target.ends().head_VD.clone()
    head_VD[FEW:] = 0
    ends = FrozenEnds(embedding_VD=target.ends().embedding_VD, head_VD=head_VD)
    drafter = build_drafter(shape=shape, dtype="float32", device="cpu", seed=1, attention="sdpa")
    pool = SlotPool.private(layout=slot_layout(recipe=recipe, shape=shape, info=info), num_slots=plan.num_slots(0))
    source = InlineTransport(
        order=plan.orders(),
        pool=pool,
        produce=lambda given: target.capture(plan.pack(given.pack_id), hidden_TKD=pool.hidden(given.slot)),
        fingerprint=target.fingerprint,
    )
    device = torch.device("cpu")
    validation = Validation(plan=plan, source=OnDevice(source, device=device), drafter=drafter, ends=ends, shape=shape)
    assert validation.num_packs > 1

    def capture(pack: Pack) -> Tensor:
        hidden_TKD = torch.empty(pack.capacity_tokens, shape.num_taps, shape.hidden_size)
        target.capture(pack, hidden_TKD=hidden_TKD)
        return hidden_TKD

    prompts = PromptSet(name="same", prompts=tuple(answer.prompt_ids for answer in answered), skipped=0)
    paths = simulate_set(
        prompts,
        answers=[answer.answer_ids for answer in answered],
        max_new_tokens=recipe.validation.max_new_tokens,
        capture=capture,
        drafter=drafter,
        ends=ends,
        shape=shape,
    )
    expected = summarise(paths, block_size=shape.block_size)
    assert expected.tau_steps is not None
    assert 1.05 < expected.tau_steps < shape.block_size, "some drafts stand, or nothing is compared"
    for step in (0, 7):  # the slots are kept, so that later measurements find the same states
        found = validation.measure(step)
        assert found["acceptance_length"] == expected.tau_steps
        assert found["acceptance_length_by_request"] == expected.tau_requests
        assert found["slot_acceptance"] == list(expected.slot_acceptance)
        assert found["histogram"] == list(expected.histogram)
        assert found["answers"] == len(answered) == expected.requests
