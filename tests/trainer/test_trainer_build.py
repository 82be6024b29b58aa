"""A trainer built from a recipe, with the real plan, blocks, drafter and objective; hidden states are made up by token id."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from slipstream.config.drafter_shape import DrafterShape
from slipstream.config.recipe import Recipe
from slipstream.drafter import build_drafter
from slipstream.errors import CheckpointError
from slipstream.observe import Account, RunFacts, open_metric_log
from slipstream.plan import CorpusIndex, Planner, make_schedule
from slipstream.records import Document, HiddenPack
from slipstream.trainer import (
    ColumnShare,
    MainRank,
    RunParts,
    build_trainer,
    complete_checkpoints,
    latest,
    read_cursor,
    read_drafter_state,
)

K, D, V, MASK = 2, 32, 64, 63
SHAPE = DrafterShape(
    num_layers=2,
    block_size=4,
    mask_token_id=MASK,
    tap_layers=(0, 2),
    hidden_size=D,
    intermediate_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=V,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    max_position_embeddings=256,
    layer_types=("full", "full"),
    sliding_window=None,
    num_target_layers=4,
    initializer_range=0.02,
)


def make_recipe(**sections: dict) -> Recipe:
    base = {
        "name": "built",
        "target": {"model": "made-up", "tap_layers": [0, 2], "dtype": "float32"},
        "corpus": {"path": "memory"},
        "plan": {"pack_tokens": 128, "pack_anchors": 32, "packs_per_step": 2, "epochs": 4, "replays": 1},
        "drafter": {"num_layers": 2, "block_size": 4, "mask_token_id": MASK, "dtype": "float32"},
        "objective": {"chunk_rows": 64},
        "optimizer": {"lr": 3e-3},
        "validation": {"every_steps": 6},
        "checkpoint": {"every_steps": 4, "keep": 2},
        "observe": {"sinks": ["jsonl"]},
    }
    return Recipe.model_validate({**base, **{key: {**base.get(key, {}), **value} for key, value in sections.items()}})


def document(number: int) -> Document:
    """Counts upwards from its number: what comes next follows from the last token."""
    length = 30 + number % 9
    tokens = (1 + (number + np.arange(length)) % 50).astype(np.int32)
    return Document(document_id=number, token_ids=tokens, loss_mask=np.arange(length) >= 5)


NUM_DOCUMENTS = 40
TABLE = torch.randn(V, K, D, generator=torch.Generator().manual_seed(3))


class Source:
    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        self.num_released = 0

    def take(self, pack_id: int) -> HiddenPack:
        tokens = torch.from_numpy(self.planner.pack(pack_id).token_ids.astype(np.int64))
        return HiddenPack(pack_id, 0, 0, TABLE[tokens], None, seal=0, target_fingerprint="made-up")

    def release(self, pack_id: int) -> None:
        self.num_released += 1


class Ends:
    embedding_VD = torch.randn(V, D, generator=torch.Generator().manual_seed(4))
    head_VD = torch.randn(V, D, generator=torch.Generator().manual_seed(5))


class Built:
    """One start of a run in a folder."""

    def __init__(self, folder: Path, recipe: Recipe, *, resume: bool = False) -> None:
        folder.mkdir(exist_ok=True)
        documents = [document(number) for number in range(NUM_DOCUMENTS)]
        index = CorpusIndex(
            num_tokens=np.array([len(d.token_ids) for d in documents], dtype=np.int32),
            num_anchors=np.array([(d.loss_mask[:-1] & d.loss_mask[1:]).sum() for d in documents], dtype=np.int32),
            fingerprint="memory",
        )
        self.schedule = make_schedule(index=index, plan=recipe.plan, block_size=SHAPE.block_size)
        planner = Planner(schedule=self.schedule, document=documents.__getitem__)
        self.source = Source(planner)
        dtype = recipe.drafter.dtype
        self.drafter = build_drafter(shape=SHAPE, dtype=dtype, device="cpu", seed=recipe.plan.seed, attention="sdpa")
        self.metrics, self.checkpoints = folder / "metrics.jsonl", folder / "checkpoints"
        facts = RunFacts(name="built", num_steps=self.schedule.num_steps, metrics_path=self.metrics, console_every_steps=1)
        self.log = open_metric_log(recipe.observe.sinks, facts=facts)
        self.validated: list[int] = []
        ends = Ends()
        ends.embedding_VD, ends.head_VD = (t.to(getattr(torch, dtype)) for t in (Ends.embedding_VD, Ends.head_VD))
        parts = RunParts(
            recipe=recipe,
            shape=SHAPE,
            schedule=self.schedule,
            planner=planner,
            source=self.source,
            drafter=self.drafter,
            ends=ends,
            target_fingerprint="made-up",
            share=ColumnShare(rank=0, ranks=1),
            group=None,
            account=Account("drafter-0"),
            device=torch.device("cpu"),
        )
        main = MainRank(log=self.log, checkpoints=self.checkpoints, validate=self.validate)
        self.trainer = build_trainer(parts=parts, main=main, resume=latest(self.checkpoints) if resume else None)

    def validate(self, step: int) -> dict[str, object]:
        self.validated.append(step)
        return {"acceptance_length": 1.0 + step / 100, "prompts": 3}

    def fit(self, *, steps: int | None = None):
        calls = iter(range(10_000))
        with self.log:
            return self.trainer.fit(stop=lambda: steps is not None and next(calls) >= steps - 1)

    def lines(self, kind: str) -> list[dict]:
        return [line for line in map(json.loads, self.metrics.read_text().splitlines()) if line["kind"] == kind]


def test_a_run_from_the_recipe(tmp_path: Path) -> None:
    run = Built(tmp_path, make_recipe(plan={"epochs": 12}, optimizer={"lr": 1e-2}))
    result = run.fit()
    num_steps = run.schedule.num_steps
    assert (result.step, result.status) == (num_steps, "finished")
    lines = run.lines("train")
    assert [line["step"] for line in lines] == list(range(num_steps))
    assert lines[-1]["loss"] < 0.5 * lines[0]["loss"]
    assert lines[-1]["acceptance_length"] > lines[0]["acceptance_length"] + 0.5
    assert len(lines[0]["accuracy_per_slot"]) == 3
    assert lines[-1]["total_unique_tokens"] == sum(line["unique_tokens"] for line in lines)
    assert run.validated == [0, *range(6, num_steps, 6), num_steps]
    assert [line["step"] for line in run.lines("validation")] == run.validated
    assert run.lines("end")[0]["status"] == "finished"
    assert run.source.num_released == run.schedule.num_packs
    newest = complete_checkpoints(tmp_path / "checkpoints")[-1]
    assert read_cursor(newest).step == num_steps
    assert read_cursor(newest).plan_digest == run.schedule.digest
    shape, state = read_drafter_state(newest)
    assert shape == json.loads(json.dumps(shape))
    assert (
        DrafterShape(**{**shape, "tap_layers": tuple(shape["tap_layers"]), "layer_types": tuple(shape["layer_types"])}) == SHAPE
    )
    assert state.keys() == run.drafter.state_dict().keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in run.drafter.state_dict().items())


@pytest.mark.parametrize(
    "sections",
    [
        {"plan": {"replays": 2, "replay_distance": 10, "epochs": 4}},
        {"objective": {"noise_std": 0.1, "noise_end_std": 0.0, "weight": "dpace", "chunk_rows": 64}},
        {"drafter": {"num_layers": 2, "block_size": 4, "mask_token_id": MASK, "dtype": "bfloat16"}},
    ],
    ids=["replays", "noise-dpace", "bf16"],
)
def test_exact_resume_of_a_built_run(tmp_path: Path, sections: dict) -> None:
    recipe = make_recipe(**sections)
    whole = Built(tmp_path / "whole", recipe)
    whole.fit()
    first = Built(tmp_path / "parts", recipe)
    assert first.fit(steps=5).status == "interrupted"
    second = Built(tmp_path / "parts", recipe, resume=True)
    assert second.trainer.start_step == 5
    second.fit()
    for name, tensor in whole.drafter.state_dict().items():
        assert torch.equal(tensor, second.drafter.state_dict()[name]), name
    one, two = whole.lines("train"), second.lines("train")
    assert [(line["step"], line["loss"]) for line in one] == [(line["step"], line["loss"]) for line in two]
    assert [line["step"] for line in second.lines("start")] == [0, 5]


def test_resume_with_another_recipe_names_the_key(tmp_path: Path) -> None:
    Built(tmp_path, make_recipe()).fit(steps=2)
    with pytest.raises(CheckpointError, match=r"optimizer\.lr 0\.003 there, 0\.001 here"):
        Built(tmp_path, make_recipe(optimizer={"lr": 1e-3}), resume=True)


def test_noise_changes_training_and_none_does_not(tmp_path: Path) -> None:
    losses = []
    for name, noise in (("a", 0.0), ("b", 0.5), ("c", 0.5)):
        run = Built(tmp_path / name, make_recipe(objective={"noise_std": noise}))
        run.fit(steps=3)
        losses.append([line["loss"] for line in run.lines("train")])
    assert losses[1] == losses[2]
    assert losses[0] != losses[1]
