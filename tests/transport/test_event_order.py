"""The event-order model: the real staging code over modelled streams, thousands of interleavings, and planted faults."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from staging_model import (
    LAYOUT,
    SCALED,
    ModelOperations,
    Steps,
    World,
    activations,
    forward,
    forward_scaled,
    host_slots,
    make_buffers,
    make_slots,
    name_of,
    ring_plan,
    states_of,
    train,
)

from slipstream.device.stream_model import ModelStreams, StreamModel, UnorderedAccess
from slipstream.device.streams import Event, Streams
from slipstream.transport.arrivals import Arrivals
from slipstream.transport.departures import Departures
from slipstream.transport.device_inline import Berth, DeviceInline
from slipstream.transport.ledger import Assignment, PackOrder
from slipstream.transport.operations import DeviceSlot
from slipstream.transport.planned import PlannedUse
from slipstream.transport.slots import SlotPool
from slipstream.transport.staged_inline import StagedInline

SEEDS = st.integers(0, 2**32)


def split(world_class: type[World], seed: int) -> World:
    """A world of random size, run to its end."""
    chance = random.Random(seed)
    num_slots, distance = chance.randint(1, 4), chance.choice([0, 0, 3, 5])
    order, uses = ring_plan(chance, num_packs=chance.randint(6, 14), num_slots=num_slots, distance=distance)
    world = world_class(
        chance=chance,
        order=order,
        uses=uses,
        num_targets=chance.randint(1, 2),
        num_buffers=chance.randint(2, 3),
        damage=chance.choice([0.0, 0.0, 0.2]) if world_class.may_be_damaged else 0.0,
    )
    world.run()
    return world


@settings(max_examples=1500, deadline=None)
@given(seed=SEEDS)
def test_split_is_ordered_in_every_interleaving(seed: int) -> None:
    world = split(World, seed)
    assert world.model.num_checked > 100
    stats = world.shelf.stats()
    assert stats.seals_rejected == 0 or world.damage > 0


class InEightBits(World):
    """Slots of values and scales, which travel, are sealed and read together; damage is done to a scale."""

    layout = SCALED
    forward = staticmethod(forward_scaled)


@settings(max_examples=500, deadline=None)
@given(seed=SEEDS)
def test_scales_are_ordered_with_their_values(seed: int) -> None:
    world = split(InEightBits, seed)
    assert world.model.num_checked > 100
    stats = world.shelf.stats()
    assert stats.seals_rejected == 0 or world.damage > 0


def caught(run: Callable[[int], object], *, error: type[BaseException], match: str) -> None:
    """The fault is found whatever the interleaving: the verdict does not hang on luck."""
    for seed in range(20):
        with pytest.raises(error, match=match):
            run(seed)


def verdict(world_class: type[World], seed: int) -> str:
    """What the model says of a run; nothing if it is content."""
    try:
        split(world_class, seed)
    except UnorderedAccess as error:
        return str(error)
    return ""


class PacksOnASideStream:
    """Fault 1: the hook hands packing to a second stream, and the next forward starts without it."""

    def __init__(self) -> None:
        self.sides: dict[int, tuple[object, Event]] = {}

    def __call__(self, streams: ModelStreams, assignment: Assignment, slot: DeviceSlot) -> None:
        side, written = self.sides.setdefault(id(streams), (streams.side("packing"), streams.event()))
        computing = streams.current()
        for _ in range(LAYOUT.num_taps):
            streams.work(writes=[activations(streams)])
            streams.order(after=side, before=computing, event=written)  # type: ignore[arg-type]
            with streams.within(side):  # type: ignore[arg-type]
                streams.work(reads=[activations(streams)], writes=[name_of(slot.hidden_TKD)])
        slot.hidden_TKD.copy_(states_of(assignment.pack_id))


def test_packing_on_a_second_stream_while_the_next_forward_runs_is_caught() -> None:
    def run(seed: int) -> None:
        class Faulty(World):
            forward = staticmethod(PacksOnASideStream())

        split(Faulty, seed)

    caught(run, error=UnorderedAccess, match="target-..compute writes activations of .*, read by target-..packing")


class CapturesTooLate(Departures):
    """Fault 2: the producer's stream is asked for inside the copy stream's context, where it is the copy stream."""

    bare = False

    def depart(self, assignment: Assignment) -> None:
        berth = self._open.pop(assignment)
        self._operations.add_up(berth.slot, parts_P=berth.slot.parts_P)
        with self._streams.within(self._copying):
            producing = self._streams.current()
            if self.bare:  # as `stream.wait_stream(current_stream())` would be
                self._streams.record(berth.packed, on=producing)
                self._streams.wait(berth.packed, by=self._copying)
            else:
                self._streams.order(after=self._copying, before=producing, event=berth.packed)
            self._hosts[0].copy_out(assignment.slot, source=berth.slot, operations=self._operations)


class CapturesTooLateBare(CapturesTooLate):
    bare = True


def test_capturing_the_producer_inside_the_side_streams_context_is_caught() -> None:
    class Faulty(World):
        departures_class = CapturesTooLate

    class Bare(World):
        departures_class = CapturesTooLateBare

    caught(lambda seed: split(Faulty, seed), error=AssertionError, match="ordered after itself")
    caught(
        lambda seed: split(Bare, seed),
        error=UnorderedAccess,
        match="target-..device-to-host reads .*, written by target-..compute",
    )


class FreesWhenTaken(Arrivals):
    """Fault 3: the host slot goes back when its copy was started, not when it has finished."""

    def _start(self, trip) -> None:  # type: ignore[no-untyped-def]
        super()._start(trip)
        if trip.ready is not None and trip.use.is_last:
            self._link.release(trip.use.pack_id)
            trip.use = PlannedUse(pack_id=trip.use.pack_id, is_last=False)


def test_freeing_a_host_slot_when_it_is_taken_is_caught() -> None:
    class Faulty(World):
        arrivals_class = FreesWhenTaken
        may_be_damaged = False  # a pack refused after its slot was freed would be another fault

    verdicts = [verdict(Faulty, seed) for seed in range(60)]
    wanted = re.compile(r"device-to-host writes .*, read by drafter.host-to-device, without")
    assert sum(bool(wanted.search(text)) for text in verdicts) > 50, verdicts


def test_the_used_event_is_needed() -> None:
    """A buffer refilled without waiting for the backward pass that reads it."""

    class ForgetsUsed(Arrivals):
        def finish(self) -> None:
            trip, self._taken = self._taken, None
            if trip is not None:
                self._free.append(trip.buffer)

    class Faulty(World):
        arrivals_class = ForgetsUsed

    caught(lambda seed: split(Faulty, seed), error=UnorderedAccess, match=r"host-to-device writes .* read by drafter.compute")


def test_the_device_slot_waits_for_its_copy() -> None:
    """A forward that writes a device slot which is still being copied out."""

    class DoesNotWait(Departures):
        def begin(self, assignment: Assignment) -> DeviceSlot:
            self._streams = _WaitsForNothing(self._streams)
            try:
                return super().begin(assignment)
            finally:
                self._streams = self._streams.streams

    class Faulty(World):
        departures_class = DoesNotWait

    wanted = re.compile(r"target-..compute writes .*, read by target-..device-to-host, without")
    assert sum(bool(wanted.search(verdict(Faulty, seed))) for seed in range(20)) > 5  # else the CPU knew of the copy by chance


class _WaitsForNothing:
    def __init__(self, streams: Streams) -> None:
        self.streams = streams

    def current(self) -> object:
        return self.streams.current()

    def wait(self, event: Event, *, by: object) -> None:
        pass


def inline_plan(chance: random.Random) -> tuple[list[PackOrder], list[PlannedUse], int]:
    order, uses = ring_plan(
        chance, num_packs=chance.randint(5, 10), num_slots=chance.randint(2, 4), distance=chance.choice([0, 3, 5])
    )
    kept = max(pack.slot for pack in order) + 1
    return [PackOrder(pack_id=1000, rank=0, slot=kept, kept=True), *order], uses, kept + 1


def drive(source: StagedInline | DeviceInline, uses: list[PlannedUse], streams: ModelStreams, steps: Steps) -> None:
    """Train on all uses, validate now and then, while the completers move by chance."""
    for use in uses:
        if steps.chance.random() < 0.2:
            train(streams, source.take(1000))
        train(streams, source.take(use.pack_id))
        while steps.chance.random() < 0.4 and steps.step():
            pass
        if use.is_last:
            source.release(use.pack_id)
    train(streams, source.take(1000))
    source.close()


@settings(max_examples=500, deadline=None)
@given(seed=SEEDS)
def test_colocated_through_host_memory_is_ordered(seed: int) -> None:
    chance = random.Random(seed)
    order, uses, num_slots = inline_plan(chance)
    streams = ModelStreams(StreamModel(), process="worker")
    operations, steps = ModelOperations(streams), Steps(chance)
    buffers = make_buffers(operations, chance.randint(3, 4))
    source = StagedInline(
        order=order,
        uses=uses,
        produce=lambda assignment, slot: forward(streams, assignment, slot),
        host=host_slots(SlotPool.private(LAYOUT, num_slots), streams),
        slots=make_slots(operations, 2),
        buffers=buffers[:-1],
        guest=buffers[-1],
        fingerprint="target",
        streams=streams,
        operations=operations,
        background=steps,
    )
    drive(source, uses, streams, steps)
    assert source.stats().packs_released == len(order) - 1


def berths(operations: ModelOperations, count: int) -> list[Berth]:
    event = operations.streams.event
    return [
        Berth(slot, *(torch.zeros(1, dtype=torch.int64) for _ in range(3)), packed=event(), checked=event())
        for slot in make_slots(operations, count)
    ]


@settings(max_examples=500, deadline=None)
@given(seed=SEEDS)
def test_colocated_on_the_device_is_ordered(seed: int) -> None:
    chance = random.Random(seed)
    order, uses, num_slots = inline_plan(chance)
    streams = ModelStreams(StreamModel(), process="worker")
    operations, steps = ModelOperations(streams), Steps(chance)
    slots = berths(operations, num_slots)
    source = DeviceInline(
        order=order,
        uses=uses,
        produce=lambda assignment, slot: forward(streams, assignment, slot),
        berths=slots,
        slot_bytes=LAYOUT.nbytes,
        fingerprint="target",
        streams=streams,
        operations=operations,
        background=steps,
    )
    drive(source, uses, streams, steps)
    assert source.stats().packs_released == len(order) - 1
