"""A trainer built from a recipe, with the real plan, blocks, drafter and objective; hidden states are made up by token id."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from built_run import MASK, SHAPE, Built, make_recipe

from slipstream.config.drafter_shape import DrafterShape
from slipstream.errors import CheckpointError
from slipstream.trainer import complete_checkpoints, read_cursor, read_drafter_state


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


def test_the_time_of_a_fit_is_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Built(tmp_path, make_recipe(plan={"epochs": 1}))
    monkeypatch.setattr(run, "validated", _SlowList())
    began = time.perf_counter()
    seconds = run.fit().seconds
    wall = time.perf_counter() - began
    assert len(run.validated) == 2  # before the first step, and after the last
    assert 0.6 <= seconds.validate < 0.9
    assert seconds.warm_up < 0.3  # nothing compiles on a CPU; the first measurement is not counted
    assert seconds.warm_up + seconds.train + seconds.validate == pytest.approx(wall, abs=0.2)


class _SlowList(list):
    def append(self, step: int) -> None:
        time.sleep(0.3)
        super().append(step)
