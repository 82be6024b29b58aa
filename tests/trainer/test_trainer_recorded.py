"""Steps replayed from recordings: the same bits as launched ones, on a CPU model that keeps a CUDA graph's rules."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from built_run import Built, make_recipe
from model_lanes import CountedWork, ModelLanes
from tape_recorder import RecordingLanes

from slipstream.device.graph_choice import StepTimes, should_record, time_steps
from slipstream.drafter.dflash import PASSES
from slipstream.errors import PreflightError
from slipstream.trainer.build import Gpu
from slipstream.trainer.optim import FlatAdamW


def run_of(folder: Path, lanes: ModelLanes, *, graphs: str, resume: bool = False, **sections: dict) -> Built:
    recipe = make_recipe(**{"placement": {"cuda_graphs": graphs}, **sections})
    return Built(folder, recipe, resume=resume, gpu=Gpu(lanes=lanes, work=CountedWork()))


def assert_same_training(one: Built, two: Built) -> None:
    for name, weight in one.drafter.state_dict().items():
        assert torch.equal(weight, two.drafter.state_dict()[name]), name
    lines = [run.lines("train") for run in (one, two)]
    keys = [key for key in lines[0][0] if not any(word in key for word in ("second", "memory", "mfu"))]
    assert "loss" in keys
    assert [[line[key] for key in keys] for line in lines[0]] == [[line[key] for key in keys] for line in lines[1]]


@pytest.fixture(params=["adds", "overwrites"])
def sums(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How gradients come to their sums: on CUDA the first one of a step overwrites."""
    if request.param == "overwrites":
        init = FlatAdamW.__init__

        def as_on_cuda(optimizer, *arguments, **keys):
            init(optimizer, *arguments, **keys)
            optimizer._stale = set()

        monkeypatch.setattr(FlatAdamW, "__init__", as_on_cuda)
    return request.param


CASES = {
    "two packs": {"plan": {"epochs": 2}},
    "one pack": {"plan": {"packs_per_step": 1, "epochs": 1}},
    "bf16": {"plan": {"epochs": 2}, "drafter": {"dtype": "bfloat16"}, "objective": {"weight": "dpace"}},
    "noise": {"plan": {"epochs": 1}, "objective": {"noise_std": 0.1}},
    "replays": {"plan": {"replays": 2, "replay_distance": 10, "epochs": 3}},
}


@pytest.mark.parametrize("fused", [False, True], ids=["modules", "fused"])
@pytest.mark.parametrize("sections", CASES.values(), ids=CASES.keys())
def test_replayed_steps_are_launched_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sums: str, sections: dict, fused: bool
) -> None:
    if fused:
        monkeypatch.setitem(PASSES, "cpu", PASSES["cuda"])
    lanes = RecordingLanes()
    plain = run_of(tmp_path / "plain", ModelLanes(), graphs="off", **sections)
    ours = run_of(tmp_path / "ours", lanes, graphs="on", **sections)
    assert plain.fit() == ours.fit()
    assert_same_training(plain, ours)
    assert ours.validated == plain.validated
    assert lanes.num_waits == 0
    *passes, end = lanes.made.tapes
    columns, steps = ours.schedule.num_columns, ours.schedule.num_steps
    rehearsed = 2 + 3  # the second round of warm-up, and three that are timed
    assert end.num_replays == steps + rehearsed
    assert len(passes) == (4 if sums == "overwrites" and columns > 1 else 2)
    forwards, backwards = ([tape.num_replays for tape in passes[part::2]] for part in (0, 1))
    assert forwards == backwards
    assert sum(forwards) == columns * end.num_replays
    assert len(set(forwards)) == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_may_change_its_mind_when_it_resumes(tmp_path: Path, dtype: str) -> None:
    drafter = {"dtype": dtype}
    whole = run_of(tmp_path / "whole", ModelLanes(), graphs="off", drafter=drafter)
    whole.fit()
    first = run_of(tmp_path / "parts", RecordingLanes(), graphs="on", drafter=drafter)
    assert first.fit(steps=6).status == "interrupted"
    second = run_of(tmp_path / "parts", ModelLanes(), graphs="off", resume=True, drafter=drafter)
    assert second.fit(steps=5).status == "interrupted"
    third = run_of(tmp_path / "parts", RecordingLanes(), graphs="on", resume=True, drafter=drafter)
    assert third.trainer.start_step == 11
    assert third.fit().counters == whole.trainer.counters
    assert_same_training(whole, third)


def test_recording_and_rehearsing_change_nothing(tmp_path: Path, sums: str) -> None:
    run = run_of(tmp_path, RecordingLanes(), graphs="on")
    trainer = run.trainer
    before, totals = trainer.optimizer.state(), trainer.metrics.totals.clone()
    trainer._warm_up(trainer)
    after = trainer.optimizer.state()
    for part in ("master", "exp_avg", "exp_avg_sq"):
        for name, tensor in getattr(before, part).items():
            assert torch.equal(tensor, getattr(after, part)[name]), (part, name)
    assert torch.equal(before.good_steps, after.good_steps)
    assert torch.equal(totals, trainer.metrics.totals)
    assert trainer.metrics.drain(all_of_it=True) == []


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_step_that_is_not_finite_changes_nothing(tmp_path: Path, sums: str, value: float) -> None:
    runs = []
    for graphs, lanes in (("off", ModelLanes()), ("on", RecordingLanes())):
        run = run_of(tmp_path / graphs, lanes, graphs=graphs)
        run.source.take(run.planner.step(3).uses[1].pack_id).hidden_TKD[10, 1, 3] = value
        run.fit()
        lines = run.lines("train")
        assert [line["step"] for line in lines if line["skipped"]] == [3]
        assert lines[3]["bad_rows"] == 1
        assert all(torch.isfinite(weight).all() for weight in run.drafter.state_dict().values())
        runs.append(run)
    assert_same_training(*runs)


def test_a_parameter_without_a_gradient_has_none_in_the_sums(tmp_path: Path, sums: str) -> None:
    """Its sum must not keep what lay there before, nor what an earlier column of the step found there."""
    runs = []
    for graphs, lanes in (("off", ModelLanes()), ("on", RecordingLanes())):
        run = run_of(tmp_path / graphs, lanes, graphs=graphs, plan={"epochs": 1})
        unused = run.drafter.layers[1].mlp.up_proj.weight
        keep = unused.detach().clone()
        unused.requires_grad_(False)
        run.trainer.optimizer.gradient.fill_(1.0)
        run.fit()
        assert torch.equal(unused, keep)
        runs.append(run)
    assert_same_training(*runs)


def test_what_was_decided_stands_in_the_metrics(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="slipstream")
    found = {}
    for graphs, lanes in (("on", RecordingLanes()), ("off", RecordingLanes()), ("auto", ModelLanes())):
        run = run_of(tmp_path / graphs, lanes, graphs=graphs, plan={"epochs": 1})
        run.fit()
        (line,) = run.lines("warm_up")
        found[graphs] = line["cuda_graphs"]
    assert found["on"]["used"]
    assert found["on"]["nbytes"] == 4711
    for times in (found["on"]["plain"], found["on"]["recorded"]):
        assert 0 < times["launch_seconds"] <= times["step_seconds"]
    assert found["on"]["why"].startswith('placement.cuda_graphs = "on"; launching takes ')
    assert found["off"] == {
        "used": False, "why": 'placement.cuda_graphs = "off"', "plain": None, "recorded": None, "nbytes": 0
    }  # fmt: skip
    assert (found["auto"]["used"], found["auto"]["why"]) == (False, "this device cannot record launches")
    assert "CUDA graphs are used: placement.cuda_graphs" in caplog.text


def test_auto_records_where_launching_takes_over_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for launch, used in ((0.6, True), (0.4, False)):
        monkeypatch.setattr("slipstream.trainer.engine.time_steps", lambda *a, launch=launch, **k: StepTimes(launch, 1.0))
        lanes = RecordingLanes()
        run = run_of(tmp_path / str(launch), lanes, graphs="auto", plan={"epochs": 1})
        run.fit()
        (line,) = run.lines("warm_up")
        assert (line["cuda_graphs"]["used"], bool(lanes.made.tapes)) == (used, used)


def test_on_is_refused_where_nothing_can_be_recorded(tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match=r"placement\.cuda_graphs = 'on': this device cannot record"):
        run_of(tmp_path, ModelLanes(), graphs="on").fit()


@pytest.mark.parametrize(
    ("wish", "launch", "used", "why"),
    [
        ("auto", 0.0383, True, "launching takes 38.3 of 40.2 ms of a step, more than 50%"),
        ("auto", 0.0043, False, "launching takes 4.3 of 40.2 ms of a step, not more than 50%"),
        ("on", 0.0043, True, 'placement.cuda_graphs = "on"; launching takes 4.3 of 40.2 ms of a step'),
    ],
)
def test_the_rule(wish: str, launch: float, used: bool, why: str) -> None:
    assert should_record(StepTimes(launch_seconds=launch, step_seconds=0.0402), wish=wish) == (used, why)


def test_steps_are_timed_alone_and_the_quickest_counts() -> None:
    now, took = 0.0, itertools.chain([3.0, 1.0, 2.0])
    pending = 5.0  # what the device still has to do when timing begins

    def prepare() -> str:
        nonlocal now
        now += 100.0
        return "prepared"

    def step(prepared: str) -> None:
        nonlocal now, pending
        assert (prepared, pending) == ("prepared", 0.0)
        now += next(took)
        pending = 4.0

    def finish() -> None:
        nonlocal now, pending
        now, pending = now + pending, 0.0

    times = time_steps(step, prepare=prepare, finish=finish, clock=lambda: now)
    assert times == StepTimes(launch_seconds=1.0, step_seconds=5.0)
