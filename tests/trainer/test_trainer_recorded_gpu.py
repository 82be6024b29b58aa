"""On CUDA: steps replayed from graphs are launched steps bit for bit, in numbers, in what they skip and in what they leave."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from built_run import Built
from test_trainer_gpu import assert_equal_weights, gpu_run

from slipstream.device.graph_choice import GraphReport
from slipstream.trainer.hooks import Hook

pytestmark = pytest.mark.gpu


def assert_equal_training(one: Built, two: Built) -> None:
    assert_equal_weights(one, two)
    for part in ("master", "exp_avg", "exp_avg_sq"):
        states = [getattr(run.trainer.optimizer.state(), part) for run in (one, two)]
        assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items()), part
    lines = [run.lines("train") for run in (one, two)]
    keys = [key for key in lines[0][0] if not any(word in key for word in ("second", "bytes", "mfu"))]
    for before, after in zip(*lines, strict=True):
        assert str({key: before[key] for key in keys}) == str({key: after[key] for key in keys})  # NaN is NaN here


def both(folder: Path, **sections: dict) -> tuple[Built, Built]:
    """The same run launched and replayed, neither started."""
    return (
        gpu_run(folder / "launched", **sections),
        gpu_run(folder / "replayed", placement={"cuda_graphs": "on"}, **sections),
    )


CASES = {
    "bf16, two packs": {"drafter": {"dtype": "bfloat16"}},
    "bf16, one pack, dpace": {
        "drafter": {"dtype": "bfloat16"}, "plan": {"packs_per_step": 1, "epochs": 3}, "objective": {"weight": "dpace"},
    },
    "fp32, noise, decay": {
        "drafter": {"dtype": "float32"}, "objective": {"noise_std": 0.1}, "optimizer": {"weight_decay": 0.1},
    },
    "bf16, rows of an embedding in host memory": {"drafter": {"dtype": "bfloat16"}, "embedding": "cpu"},
}  # fmt: skip


@pytest.mark.parametrize("sections", CASES.values(), ids=CASES.keys())
def test_replayed_steps_are_launched_ones(tmp_path: Path, sections: dict) -> None:
    launched, replayed = both(tmp_path, **sections)
    assert launched.fit() == replayed.fit()
    assert_equal_training(launched, replayed)
    (line,) = replayed.lines("warm_up")
    assert line["cuda_graphs"]["used"]
    assert line["cuda_graphs"]["nbytes"] > 0
    assert replayed.lines("late_work") == []
    took = line["cuda_graphs"]
    assert took["recorded"]["launch_seconds"] < took["plain"]["launch_seconds"] / 2, took


def test_a_run_resumes_with_and_without(tmp_path: Path) -> None:
    whole = gpu_run(tmp_path / "whole", drafter={"dtype": "bfloat16"})
    whole.fit()
    first = gpu_run(tmp_path / "parts", drafter={"dtype": "bfloat16"}, placement={"cuda_graphs": "on"})
    assert first.fit(steps=11).status == "interrupted"
    second = gpu_run(tmp_path / "parts", resume=True, drafter={"dtype": "bfloat16"})
    assert second.fit(steps=9).status == "interrupted"
    third = gpu_run(tmp_path / "parts", resume=True, drafter={"dtype": "bfloat16"}, placement={"cuda_graphs": "on"})
    assert third.trainer.start_step == 20
    assert third.fit().counters == whole.trainer.counters
    assert_equal_weights(whole, third)


class Spoiled(Hook):
    """A value of the head that is not a number for one step: rows are sound, the loss is not."""

    def __init__(self, run: Built, *, step: int, value: float) -> None:
        self._head_VD, self._step, self._value = run.ends.head_VD, step, value

    def before_step(self, step: int) -> None:
        if step == self._step:
            self._kept = self._head_VD[5, 7].clone()
            self._head_VD[5, 7] = self._value

    def after_step(self, step: int, records) -> None:
        if step == self._step + 1:
            self._head_VD[5, 7] = self._kept


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("what", ["row", "loss"])
def test_a_step_that_is_not_finite_changes_nothing(tmp_path: Path, what: str, value: float) -> None:
    runs = both(tmp_path, drafter={"dtype": "bfloat16"}, plan={"epochs": 1})
    for run in runs:
        if what == "row":
            run.source.slots[run.planner.step(3).uses[1].pack_id][10, 1, 3] = value
        else:
            run.trainer.hooks = (*run.trainer.hooks, Spoiled(run, step=3, value=value))
        run.fit()
        lines = run.lines("train")
        assert [line["step"] for line in lines if line["skipped"]] == [3]
        assert lines[3]["bad_rows"] == (what == "row")
    assert_equal_training(*runs)


def test_a_small_step_is_replayed_by_itself(tmp_path: Path) -> None:
    run = gpu_run(tmp_path, plan={"epochs": 1}, placement={"cuda_graphs": "auto"}, drafter={"dtype": "bfloat16"})
    run.fit()
    (line,) = run.lines("warm_up")
    report = GraphReport(**line["cuda_graphs"])
    assert report.used, report
