"""A wait turns into another one when the device has run dry, not before and not after its end."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from slipstream.device.stream_model import ModelStreams, StreamModel
from slipstream.device.streams import Event
from slipstream.launch.stages import DryWatch, dry_watch, time_stages
from slipstream.launch.training import OnDevice
from slipstream.observe import Account
from slipstream.records import HiddenPack


class Clock:
    now = 0

    def __call__(self) -> int:
        return self.now


class Device:
    """A completer whose events are reached when `run_dry` is called."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Event, Callable[[], None]]] = []
        self.closed = False

    def submit(self, event: Event, done: Callable[[], None]) -> None:
        self.waiting.append((event, done))

    def close(self) -> None:
        self.closed = True

    def run_dry(self) -> None:
        while self.waiting:
            self.waiting.pop(0)[1]()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def device() -> Device:
    return Device()


def watch_of(device: Device, *, watched: int = 16) -> DryWatch:
    return DryWatch(ModelStreams(StreamModel(), process="p"), device, watched=watched)


def test_a_wait_becomes_another_when_the_device_has_run_dry(clock: Clock, device: Device) -> None:
    account, watch = Account("target-0", clock=clock), watch_of(device)
    with account.state("wait_gpu") as claim:
        watch.until_dry(claim, "wait_slot")
        clock.now += 30
        device.run_dry()
        clock.now += 12
    clock.now += 5
    assert account.read() == (47, {"idle": 5, "wait_gpu": 30, "wait_slot": 12})


def test_a_wait_that_ends_first_stays_what_it_was(clock: Clock, device: Device) -> None:
    account, watch = Account("target-0", clock=clock), watch_of(device)
    with account.state("wait_gpu") as claim:
        watch.until_dry(claim, "wait_slot")
        clock.now += 30
    device.run_dry()
    clock.now += 5
    assert account.read() == (35, {"idle": 5, "wait_gpu": 30})


def test_a_state_nested_in_it_keeps_its_time(clock: Clock, device: Device) -> None:
    account, watch = Account("worker-0", clock=clock), watch_of(device)
    with account.state("wait_gpu") as claim:
        watch.until_dry(claim, "wait_input")
        clock.now += 1
        with account.state("target"):
            clock.now += 10
            device.run_dry()
            clock.now += 10
        clock.now += 7
    assert account.read() == (28, {"idle": 0, "wait_gpu": 1, "target": 20, "wait_input": 7})


def test_more_waits_than_can_be_watched_are_not(clock: Clock, device: Device) -> None:
    account, watch = Account("target-0", clock=clock), watch_of(device, watched=2)
    for _ in range(5):
        with account.state("wait_gpu") as claim:
            watch.until_dry(claim, "wait_slot")
    assert len(device.waiting) == 2
    device.run_dry()
    with account.state("wait_gpu") as claim:
        watch.until_dry(claim, "wait_slot")
    assert len(device.waiting) == 1
    watch.close()
    assert device.closed


def test_a_take_waits_for_its_gpu_first(clock: Clock, device: Device) -> None:
    class Source:
        def take(self, pack_id: int) -> HiddenPack:
            clock.now += 20
            device.run_dry()
            clock.now += 3
            return HiddenPack(pack_id, 0, 0, torch.zeros(2, 1, 2), None, seal=0, target_fingerprint="t")

    account = Account("drafter-0", clock=clock)
    source = OnDevice(Source(), device=torch.device("cpu"), account=account, watch=watch_of(device))  # type: ignore[arg-type]
    source.take(4)
    assert account.read() == (23, {"idle": 0, "wait_gpu": 20, "wait_input": 3})


def test_a_cpu_runs_nothing_ahead(clock: Clock) -> None:
    account = Account("drafter-0", clock=clock)
    assert dry_watch(device="cpu") is None
    time_stages(account, device="cpu")
    assert account.stages is None
