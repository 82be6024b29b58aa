"""Stages by events of a modelled device that runs late and whose clock goes wrong: nobody waits, times stay in bounds."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from slipstream.observe.accounts import Account
from slipstream.observe.spans import SpanLog, WorkerFacts
from slipstream.observe.stages import GpuStages

FACTS = WorkerFacts(worker="worker-0", role="colocated", rank=0, gpu=0)


class Device:
    """A stream that takes `work(ns)` in turn; its own clock counts `drift` more of every nanosecond. Counts waits."""

    def __init__(self, *, drift: float = 0.0) -> None:
        self.now = 1_000_000
        self.busy_until = 0
        self.drift = drift
        self.waits = self.events = 0

    def clock(self) -> int:
        return self.now

    def work(self, nanoseconds: int) -> None:
        self.busy_until = max(self.busy_until, self.now) + nanoseconds

    def event(self) -> Event:
        self.events += 1
        return Event(self)

    def record(self, event: Event) -> None:
        event.at = max(self.busy_until, self.now)


class Event:
    def __init__(self, device: Device) -> None:
        self.device, self.at = device, None

    def query(self) -> bool:
        assert self.at is not None
        return self.at <= self.device.now

    def synchronize(self) -> None:
        self.device.waits += 1
        self.device.now = max(self.device.now, self.at)

    def elapsed_time(self, end: Event) -> float:
        assert self.query()
        assert end.query()
        return (end.at - self.at) * (1 + self.device.drift) / 1e6


def make(device: Device, path: Path, *, pairs: int = 64) -> tuple[GpuStages, SpanLog]:
    log = SpanLog(FACTS, path=path, every_seconds=1000, clock=device.clock)
    stages = GpuStages(event=device.event, record=device.record, spans=log, pairs=pairs, clock=device.clock)
    return stages, log


def spans(path: Path) -> list[list]:
    return [line for line in map(json.loads, path.read_text().splitlines()) if isinstance(line, list) and line[0] == "gpu"]


def test_stages_are_read_late_and_never_waited_for(tmp_path: Path) -> None:
    device = Device()
    stages, log = make(device, tmp_path / "s.jsonl")
    assert device.waits == 1  # the event that times are counted from
    account = Account("worker-0", clock=device.clock, spans=log)
    account.stages = stages
    for step in range(3):
        for name, length in (("target", 5_000_000), ("forward", 2_000_000), ("backward", 4_000_000)):
            with account.state(name, pack=10 + step, step=step):
                device.now += 10_000
                device.work(length)
        with account.state("hooks"):  # no stage
            device.now += 30_000
    assert device.now < device.busy_until
    stages.close()
    assert stages.dropped == 9
    device.now = device.busy_until
    assert device.waits == 1
    log.close()
    assert spans(tmp_path / "s.jsonl") == []

    stages, log = make(device, tmp_path / "t.jsonl")
    began = device.now
    for step in range(3):
        for name, length in (("forward", 2_000_000), ("backward", 4_000_000)):
            stage = stages.begin(name, 10 + step, step)
            device.now += 10_000
            device.work(length)
            stages.end(stage)
        device.now += 5_000_000
    device.now += 100_000_000
    stages.close()
    log.close()
    assert stages.dropped == 0
    found = spans(tmp_path / "t.jsonl")
    assert [(span[1], span[4], span[5]) for span in found] == [
        (name, 10 + step, step) for step in range(3) for name in ("forward", "backward")
    ]
    assert [span[3] for span in found[:2]] == pytest.approx([2010, 4000], abs=2)
    assert found[0][2] == pytest.approx((began - log._epoch) / 1000, abs=2)
    assert found[-1][2] + found[-1][3] == pytest.approx(18_010, abs=20)


def test_an_empty_pool_drops_and_counts(tmp_path: Path) -> None:
    device = Device()
    stages, log = make(device, tmp_path / "s.jsonl", pairs=4)
    made = [stages.begin("forward", None, step) for step in range(5)]
    assert [stage is None for stage in made] == [False, False, False, True, True]  # one pair is what times count from
    for stage in made[:3]:
        stages.end(stage)
    assert stages.dropped == 2
    device.now += 1_000_000
    assert stages.begin("forward", None, 9) is not None
    assert device.events == 8
    log.close()


@pytest.mark.parametrize("drift", [1e-3, -1e-3])
def test_a_clock_that_goes_wrong_stays_in_bounds(drift: float, tmp_path: Path) -> None:
    """Twenty seconds of a device clock that is off by a thousandth would be off by 20 ms at the end."""
    device = Device(drift=drift)
    stages, log = make(device, tmp_path / "s.jsonl")
    truth = []
    for step in range(2000):
        stage = stages.begin("forward", None, step)
        launched = device.now
        device.work(10_000_000)
        stages.end(stage)
        truth.append((launched, device.busy_until))
        device.now = device.busy_until
    stages.close()
    log.close()
    found = spans(tmp_path / "s.jsonl")
    assert len(found) == 2000
    for span, (began, ended) in zip(found, truth, strict=True):
        start = log._epoch + span[2] * 1000
        assert start == pytest.approx(began, abs=50_000)
        assert start + span[3] * 1000 == pytest.approx(ended, abs=50_000)
    assert all(one[2] + one[3] <= two[2] for one, two in itertools.pairwise(found))


def test_nothing_is_timed_in_a_whole_state(tmp_path: Path) -> None:
    device = Device()
    stages, log = make(device, tmp_path / "s.jsonl")
    account = Account("worker-0", clock=device.clock, spans=log)
    account.stages = stages
    with account.state("warm_up", whole=True), account.state("forward"):
        device.work(1_000_000)
    device.now += 5_000_000
    stages.close()
    log.close()
    assert spans(tmp_path / "s.jsonl") == []
