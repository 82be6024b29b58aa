"""The whole chain told as one number: a drafter that learnt eight answers by heart is accepted whole, wherever it is asked.

Eight documents whose answers have exactly 1 + k * B tokens, the stop token last: after training through the real pipeline, the
simulated path, our decode loop and the `dflash` package's own loop on the exported folder give the same list, B at every step.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from dflash.model import DFlashDraftModel, dflash_generate
from launch_material import MASK_TOKEN, NUM_WORDS, SPECIALS, tiny_recipe, write_target
from transformers import PreTrainedModel

from slipstream.config import Recipe, read_target_info, resolve_drafter
from slipstream.corpus.chat import ChatEncoder
from slipstream.corpus.conversation import Message
from slipstream.corpus.prepare import prepare
from slipstream.drafter import DFlashDrafter, build_drafter
from slipstream.evaluate.decode import speculative_decode
from slipstream.evaluate.measure import simulate_set
from slipstream.evaluate.prompts import PromptSet
from slipstream.evaluate.session import TargetSession
from slipstream.export.dflash_format import export_dflash
from slipstream.export.verify import verify_export
from slipstream.launch.local import train_run
from slipstream.launch.preflight import preflight
from slipstream.records import Pack
from slipstream.target.ends import load_frozen_ends
from slipstream.target.generate import greedy_answers
from slipstream.target.huggingface import load_target
from slipstream.target.loading import load_full
from slipstream.trainer.checkpoint import read_drafter_state

BLOCK, BLOCKS = 4, 3
ANSWER = 1 + BLOCKS * BLOCK
DOCUMENTS = 8


def find_answers(model: PreTrainedModel, *, encoder: ChatEncoder) -> list[tuple[str, list[int], list[int]]]:
    """Prompts whose greedy answer meets its last token nowhere before: that token can serve as its stop token."""
    found: list[tuple[str, list[int], list[int]]] = []
    for number in range(400):
        text = f"w{number % NUM_WORDS} w{number * 7 % NUM_WORDS} w{number * 13 % NUM_WORDS}"
        prompt = encoder.encode_prompt([Message(role="user", content=text)])
        answer = greedy_answers(model=model, prompts=[prompt], max_new_tokens=ANSWER, stop_token_ids=[], batch_size=1)[0]
        special = any(token < len(SPECIALS) for token in answer)
        if answer[-1] not in answer[:-1] and not special and all(answer != other for _, _, other in found):
            found.append((text, prompt, answer))
        if len(found) == DOCUMENTS:
            return found
    raise AssertionError(f"only {len(found)} answers fit")


@pytest.fixture(scope="module")
def learnt(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recipe, list[tuple[str, list[int], list[int]]], Path]:
    """A recipe, eight prompts with their answers, and the export of a drafter that was trained on nothing else."""
    root = tmp_path_factory.mktemp("overfit")
    target = write_target(root / "target", seed=5, spread=0.3)
    info = read_target_info(str(target))
    answers = find_answers(load_full(info=info, dtype="float32"), encoder=ChatEncoder(target))
    rows = [{"messages": [{"role": "user", "content": text}], "answer_token_ids": answer} for text, _, answer in answers]
    (root / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepare([root / "train.jsonl"], target=target, out=root / "corpus")
    recipe = tiny_recipe(
        {"target": str(target), "corpus": str(root / "corpus")},
        root / "runs",
        name="overfit",
        plan__pack_tokens=256,
        plan__pack_anchors=128,
        plan__packs_per_step=1,
        plan__epochs=300,
        drafter__num_layers=2,
        drafter__block_size=BLOCK,
        optimizer__lr=4e-3,
        placement__mode="colocated",
    )
    result = train_run(flight=preflight(recipe))
    shape = resolve_drafter(recipe=recipe, info=info)
    _, state = read_drafter_state(result.checkpoint)
    ends = load_frozen_ends(info=info, dtype="float32")
    folder = export_dflash(
        drafter_state=state,
        shape=shape,
        info=info,
        out=root / "export",
        verify=lambda part: verify_export(part, embedding_VD=ends.embedding_VD, head_VD=ends.head_VD),
        dtype="float32",
    )
    return recipe, answers, folder


def ours(recipe: Recipe, folder: Path) -> DFlashDrafter:
    from slipstream.export.dflash_format import read_dflash

    shape, state = read_dflash(folder)
    drafter = build_drafter(shape=shape, dtype="float32", device="cpu", seed=0, attention="sdpa")
    drafter.load_state_dict(state)
    return drafter


def test_three_loops_accept_whole_blocks(learnt: tuple[Recipe, list[tuple[str, list[int], list[int]]], Path]) -> None:
    recipe, answers, folder = learnt
    info = read_target_info(recipe.target.model)
    drafter, whole = [BLOCK] * BLOCKS, load_full(info=info, dtype="float32")
    net = ours(recipe, folder)
    simulated = simulate(recipe, net, prompts=[p for _, p, _ in answers], answers=[a for _, _, a in answers])
    session = TargetSession(whole, tap_layers=net.shape.tap_layers)
    theirs = DFlashDraftModel.from_pretrained(folder, dtype=torch.float32).eval()
    for (_, prompt, answer), path in zip(answers, simulated, strict=True):
        decoded = speculative_decode(
            session,
            drafter=net,
            block_size=BLOCK,
            mask_token_id=MASK_TOKEN,
            prompt_ids=prompt,
            max_new_tokens=ANSWER + BLOCK,
            stop_token_ids=[answer[-1]],
        )
        reference = dflash_generate(
            theirs,
            target=whole,
            input_ids=torch.tensor([prompt]),
            max_new_tokens=ANSWER + BLOCK,
            stop_token_ids=[answer[-1]],
            return_stats=False,
        )
        assert list(decoded.token_ids) == answer
        assert reference[0, len(prompt) :].tolist() == answer
        assert list(decoded.path.lengths) == drafter
        assert list(path) == drafter
        assert reference_lengths(theirs, whole, prompt=prompt, answer=answer) == drafter


def reference_lengths(
    theirs: DFlashDraftModel, target: PreTrainedModel, *, prompt: Sequence[int], answer: Sequence[int]
) -> list[int]:
    """The package's own acceptance lengths; it times itself with CUDA, so its stats are asked for with that call replaced."""
    import time

    import dflash.model

    before = dflash.model._cuda_time
    dflash.model._cuda_time = time.perf_counter
    try:
        stats = dflash_generate(
            theirs,
            target=target,
            input_ids=torch.tensor([list(prompt)]),
            max_new_tokens=len(answer) + BLOCK,
            stop_token_ids=[answer[-1]],
            return_stats=True,
        )
    finally:
        dflash.model._cuda_time = before
    return list(stats.acceptance_lengths)


def simulate(
    recipe: Recipe, drafter: DFlashDrafter, *, prompts: list[list[int]], answers: list[list[int]]
) -> list[tuple[int, ...]]:
    info = read_target_info(recipe.target.model)
    target = load_target(info=info, dtype="float32", tap_layers=drafter.shape.tap_layers)

    def capture(pack: Pack) -> torch.Tensor:
        hidden_TKD = torch.empty(pack.capacity_tokens, drafter.shape.num_taps, info.hidden_size)
        target.capture(pack, hidden_TKD=hidden_TKD)
        return hidden_TKD

    paths = simulate_set(
        PromptSet(name="learnt", prompts=tuple(tuple(prompt) for prompt in prompts), skipped=0),
        answers=answers,
        max_new_tokens=ANSWER + BLOCK,
        capture=capture,
        drafter=drafter,
        ends=load_frozen_ends(info=info, dtype="float32"),
        shape=drafter.shape,
    )
    return [path.lengths for path in paths]
