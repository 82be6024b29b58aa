"""Training through the engine of a GPU, on a model of its streams: same results, every access ordered, faults are found."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from built_run import Built, make_recipe
from model_lanes import CountedWork, ModelLanes

from slipstream.device.stream_model import UnorderedAccess
from slipstream.errors import TrainingDiverged
from slipstream.trainer import late_metrics
from slipstream.trainer.build import Gpu
from slipstream.trainer.lanes import Lanes
from slipstream.trainer.late_metrics import LateMetrics
from slipstream.trainer.metadata import MetadataRing
from slipstream.trainer.optim import FlatAdamW
from slipstream.trainer.saving import CheckpointWriter
from slipstream.trainer.snapshot import Snapshot


@pytest.fixture
def lanes(monkeypatch: pytest.MonkeyPatch) -> ModelLanes:
    """Lanes that see what the CPU and the compute stream do with memory that crosses streams."""
    lanes = ModelLanes()
    stage, used, push, read = MetadataRing.stage, MetadataRing.used, LateMetrics.push, late_metrics._read
    send, wait = MetadataRing.send, CheckpointWriter.wait
    step, state, fill = FlatAdamW.step, Snapshot._state, late_metrics._Slot.fill

    def watched_stage(ring, arrays):
        staged = stage(ring, arrays)
        lanes.look(writes=[staged.slot.memory])
        return staged

    def watched_send(ring, staged):
        lanes.told_by("step-prefetch")
        return send(ring, staged)

    def watched_wait(writer):
        wait(writer)
        lanes.told_by("checkpoint")

    def watched_used(ring):
        lanes.touch(reads=[ring._current.memory])
        used(ring)

    def watched_push(metrics, *arguments, **keys):
        lanes.touch(writes=[metrics.totals])
        push(metrics, *arguments, **keys)

    def watched_fill(slot, *parts):
        lanes.touch(writes=[slot.computed])
        fill(slot, *parts)

    def watched_read(slot):
        lanes.look(reads=[slot.values])
        return read(slot)

    def watched_step(optimizer, **keys):
        lanes.touch(writes=[optimizer.master, optimizer.exp_avg, optimizer.exp_avg_sq, optimizer.good_steps])
        return step(optimizer, **keys)

    def watched_state(snapshot):
        lanes.look(reads=[snapshot._slab.memory, snapshot._good_steps, snapshot._counts])
        return state(snapshot)

    for owner, name, watched in (
        (MetadataRing, "stage", watched_stage),
        (MetadataRing, "send", watched_send),
        (MetadataRing, "used", watched_used),
        (CheckpointWriter, "wait", watched_wait),
        (LateMetrics, "push", watched_push),
        (late_metrics, "_read", watched_read),
        (late_metrics._Slot, "fill", watched_fill),
        (FlatAdamW, "step", watched_step),
        (Snapshot, "_state", watched_state),
    ):
        monkeypatch.setattr(owner, name, watched)
    return lanes


def engine_run(folder: Path, lanes: ModelLanes, *, resume: bool = False, **sections: dict) -> Built:
    return Built(folder, make_recipe(**sections), resume=resume, gpu=Gpu(lanes=lanes, work=CountedWork()))


def test_the_engine_trains_as_the_cpu_does(tmp_path: Path, lanes: ModelLanes) -> None:
    plain, ours = Built(tmp_path / "plain", make_recipe()), engine_run(tmp_path / "ours", lanes)
    assert plain.fit() == ours.fit()  # step, status and every count
    one, two = plain.lines("train"), ours.lines("train")
    assert [line["step"] for line in one] == [line["step"] for line in two]
    for name in ("loss", "gradient_norm", "learning_rate", "acceptance_length", "total_context_tokens", "total_anchors"):
        assert [line[name] for line in two] == pytest.approx([line[name] for line in one], rel=1e-4), name
    for name, weight in plain.drafter.state_dict().items():
        assert torch.allclose(weight, ours.drafter.state_dict()[name], atol=1e-5), name
    assert {line["seconds"] for line in two} == {0.005}  # from events, not from the time to launch
    assert ours.validated == plain.validated
    assert lanes.model.num_checked > 1000
    assert lanes.num_waits == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exact_resume_through_the_engine(tmp_path: Path, dtype: str) -> None:
    drafter = {"dtype": dtype}
    whole = engine_run(tmp_path / "whole", ModelLanes(), drafter=drafter)
    whole.fit()
    first = engine_run(tmp_path / "parts", ModelLanes(), drafter=drafter)
    assert first.fit(steps=6).status == "interrupted"
    second = engine_run(tmp_path / "parts", ModelLanes(), resume=True, drafter=drafter)
    assert second.trainer.start_step == 6
    result = second.fit()
    assert result.counters == whole.trainer.counters
    for name, weight in whole.drafter.state_dict().items():
        assert torch.equal(weight, second.drafter.state_dict()[name]), name
    one, two = whole.lines("train"), second.lines("train")
    keys = ("step", "loss", "gradient_norm", "total_anchors")
    assert [[line[key] for key in keys] for line in one] == [[line[key] for key in keys] for line in two]
    assert second.validated[0] == 6  # within warm-up, as no measurement comes before the first step
    assert second.validated[1:] == [step for step in whole.validated if step > 6]


def test_a_run_that_is_done_needs_no_warm_up(tmp_path: Path) -> None:
    engine_run(tmp_path, ModelLanes(), plan={"epochs": 1}).fit()
    again = engine_run(tmp_path, ModelLanes(), resume=True, plan={"epochs": 1})
    assert again.fit().status == "finished"
    assert [line["modes"] for line in again.lines("warm_up")][1:] == [{}]


def without(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
    monkeypatch.setattr(owner, name, lambda *_: None)


def break_update_order(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, Snapshot, "before_update")


def break_snapshot_order(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = Lanes.copy

    def at_once(lanes, pairs, *, on, after, then):
        copy(lanes, pairs, on=on, after=lanes.event() if len(pairs) > 1 else after, then=then)

    monkeypatch.setattr(Lanes, "copy", at_once)


def break_slot_reuse(monkeypatch: pytest.MonkeyPatch) -> None:
    init = MetadataRing.__init__

    def unguarded(ring, *arguments, **keys):
        init(ring, *arguments, **keys)
        for slot in ring._slots:
            slot.sent.synchronize = lambda: None

    monkeypatch.setattr(MetadataRing, "__init__", unguarded)


def break_buffer_reuse(monkeypatch: pytest.MonkeyPatch) -> None:
    def unmarked(ring):
        ring._lanes.touch(reads=[ring._current.memory])
        ring._current = None

    monkeypatch.setattr(MetadataRing, "used", unmarked)


def break_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, Lanes, "hold")


@pytest.mark.parametrize(
    "fault",
    [break_update_order, break_snapshot_order, break_slot_reuse, break_buffer_reuse, break_arrival],
    ids=lambda fault: fault.__name__,
)
def test_a_planted_fault_is_found(fault, tmp_path: Path, lanes: ModelLanes, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    run = engine_run(tmp_path, lanes)
    lanes.reached = False  # figures that were read would tell the CPU, and with it all streams, that a step is over
    with pytest.raises(UnorderedAccess):
        run.fit()


def test_rehearsals_change_nothing(tmp_path: Path, lanes: ModelLanes) -> None:
    run = engine_run(tmp_path, lanes)
    trainer = run.trainer
    before = trainer.optimizer.state()
    totals = trainer.metrics.totals.clone()
    trainer._warm_up(trainer)
    after = trainer.optimizer.state()
    for part in ("master", "exp_avg", "exp_avg_sq"):
        for name, tensor in getattr(before, part).items():
            assert torch.equal(tensor, getattr(after, part)[name]), (part, name)
    assert torch.equal(before.good_steps, after.good_steps)
    assert torch.equal(totals, trainer.metrics.totals)
    assert trainer.metrics.drain(all_of_it=True) == []
    assert run.source.num_released == 0
    assert float(trainer.optimizer.gradient.abs().sum()) > 0  # it did run backward
    assert lanes.num_given_back == 2
    assert lanes.num_finished == 6


def test_warm_up_and_late_work_are_lines_of_metrics(tmp_path: Path, lanes: ModelLanes, caplog) -> None:
    work = CountedWork()
    run = Built(tmp_path, make_recipe(), gpu=Gpu(lanes=lanes, work=work))
    take = run.source.take

    def grows(pack_id: int):
        if pack_id == 9:
            work.now["recompiles"] += 2
            work.compiled.append("kernel late")
        return take(pack_id)

    run.source.take = grows
    run.fit()
    (line,) = run.lines("warm_up")
    assert list(line["modes"]) == ["train, largest", "train, smallest", "no gradient", "first pack"]
    assert (line["recompiles"], line["step"]) == (7, 0)
    assert [(late["recompiles"], late["names"]) for late in run.lines("late_work")] == [(2, ["kernel late"])]
    assert "2 recompiles (kernel late)" in caplog.text
    assert "device_allocations" not in run.lines("late_work")[0]


def test_no_figures_that_have_not_arrived_are_waited_for(tmp_path: Path, lanes: ModelLanes) -> None:
    run = engine_run(tmp_path, lanes)
    seen = []
    drain = run.trainer.metrics.drain

    def drained(*, all_of_it: bool = False):
        lanes.num_waits = lanes.num_waits if seen else 0  # what warm-up waited for is its own affair
        records = drain(all_of_it=all_of_it)
        seen.append([record.step for record in records])
        return records

    run.trainer.metrics.drain = drained
    lanes.reached = False
    run.fit(steps=7)
    assert seen == [[]] * 7 + [list(range(7))]  # only the end waits
    assert lanes.num_waits == 7
    assert [line["step"] for line in run.lines("train")] == list(range(7))


def test_dropped_steps_are_counted_and_the_guard_sees_them(
    tmp_path: Path, lanes: ModelLanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    init = LateMetrics.__init__
    monkeypatch.setattr(LateMetrics, "__init__", lambda self, *a, **k: init(self, *a, **k, slots=3))
    run = engine_run(tmp_path, lanes, optimizer={"max_bad_steps": 4})
    take, taken = run.source.take, []

    def damaged(pack_id: int):
        pack = take(pack_id)
        taken.append(pack_id)
        lanes.reached = len(taken) > 1 + 2 * 6  # nothing arrives before step 6 is launched; warm-up takes one pack
        if len(taken) > 3:
            pack.hidden_TKD[0, 0, 0] = math.nan
        return pack

    run.source.take = damaged
    with pytest.raises(TrainingDiverged, match="4 steps in a row were not finite"):
        run.fit()
    lines = run.lines("train")
    assert run.trainer.metrics.dropped == 4
    assert [line["step"] for line in lines] == [4, 5, 6]
    assert [line["total_skipped_steps"] for line in lines] == [4, 5, 6]  # steps 1 to 3 among them, whose figures are lost
    assert lines[0]["total_context_tokens"] > 3 * lines[0]["context_tokens"]
    assert run.trainer.counters.skipped_steps == 4
