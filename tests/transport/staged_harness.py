"""The staged ends on a CPU, with real threads, a real broker and connections: streams that do everything at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import cast

import torch
from staging_model import Unlocked

from slipstream.device.shared import SharedMemory
from slipstream.device.streams import Event, Stream, Streams
from slipstream.errors import TransportClosed
from slipstream.transport.arrivals import Buffer
from slipstream.transport.connections import connection_pair
from slipstream.transport.host_slots import HostSlots
from slipstream.transport.layout import SlotLayout
from slipstream.transport.ledger import Assignment, PackOrder
from slipstream.transport.operations import DeviceSlot, device_slots, plain_checksum, sum_of_parts
from slipstream.transport.planned import PlannedUse
from slipstream.transport.shared import Broker, SharedSink
from slipstream.transport.slots import SlotPool
from slipstream.transport.staged import StagedSink, StagedSource

LAYOUT = SlotLayout(pack_tokens=128, num_taps=2, hidden_size=16, dtype="bfloat16", last_hidden=True)


class AtOnce(Streams):
    """A device that has always finished: what is given to it is done on the spot."""

    def adopt_thread(self) -> None:
        pass

    def current(self) -> Stream:
        return cast(Stream, "compute")

    def side(self, name: str) -> Stream:
        return cast(Stream, name)

    def event(self) -> Event:
        return AlwaysReached()

    def within(self, stream: Stream) -> AbstractContextManager[object]:
        return nullcontext()

    def record(self, event: Event, *, on: Stream) -> None:
        pass

    def wait(self, event: Event, *, by: Stream) -> None:
        pass


class AlwaysReached:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class Slow(AtOnce):
    """A device whose events are reached when `go_on` is set; if it is `broken`, the first wait for one is an error."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.broken = False

    def event(self) -> Event:
        return SlowEvent(self)


class SlowEvent:
    def __init__(self, device: Slow) -> None:
        self.device = device

    def query(self) -> bool:
        return self.device.go_on.is_set()

    def synchronize(self) -> None:
        assert self.device.go_on.wait(30)
        if self.device.broken:
            self.device.broken = False
            raise RuntimeError("an illegal memory access was encountered")


class PlainOperations:
    """The operations on CPU tensors."""

    num_parts = 1

    def copy(self, *, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def add_up(self, slot: DeviceSlot, *, parts_P: torch.Tensor) -> None:
        total = plain_checksum(slot)
        parts_P[0] = total - (total >> 63 << 64)

    def read(self, parts_P: torch.Tensor) -> int:
        return sum_of_parts(parts_P)


OPERATIONS, STREAMS = PlainOperations(), AtOnce()


def states_of(pack_id: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(pack_id + 1)
    return torch.randn(LAYOUT.pack_tokens, LAYOUT.num_taps, LAYOUT.hidden_size, generator=generator).to(torch.bfloat16)


def write_states(assignment: Assignment, slot: DeviceSlot) -> None:
    slot.hidden_TKD.copy_(states_of(assignment.pack_id))
    assert slot.last_hidden_TD is not None
    slot.last_hidden_TD.copy_(states_of(assignment.pack_id)[:, 1])


def make_host(pool: SlotPool, streams: Streams = STREAMS) -> HostSlots:
    return HostSlots(
        pool=pool,
        locked=Unlocked(),
        parts_MP=torch.zeros(pool.num_slots, 1, dtype=torch.int64),
        landed=[streams.event() for _ in range(pool.num_slots)],
    )


def make_slots(count: int, layout: SlotLayout = LAYOUT) -> list[DeviceSlot]:
    return device_slots(layout, count, operations=OPERATIONS, device=torch.device("cpu"))


def make_buffers(count: int, layout: SlotLayout = LAYOUT) -> list[Buffer]:
    event = STREAMS.event
    return [
        Buffer(slot=slot, found_P=torch.zeros(1, dtype=torch.int64), copied=event(), checked=event(), used=event())
        for slot in make_slots(count, layout)
    ]


class StagedHost:
    """A broker, a target thread with its own mapping, and the drafter's end in the test's thread."""

    def __init__(
        self,
        order: Sequence[PackOrder],
        uses: Iterable[PlannedUse],
        *,
        num_slots: int,
        produce: Callable[[Assignment, DeviceSlot], None] = write_states,
        layout: SlotLayout = LAYOUT,
        target_streams: Streams | None = None,
    ) -> None:
        self.memory = SharedMemory.create(layout.nbytes * num_slots)
        self.pool = SlotPool.shared(layout, num_slots, self.memory)
        self.broker = Broker(order=order, slot_bytes=layout.nbytes)
        self.broker.start()
        ours, theirs = connection_pair()
        self.broker.attach_consumer("drafter-0", 0, ours)
        *buffers, guest = make_buffers(3, layout)
        self.source = StagedSource(
            connection=theirs,
            host=make_host(SlotPool.shared(layout, num_slots, self.memory)),
            buffers=buffers,
            guest=guest,
            uses=uses,
            streams=STREAMS,
            operations=OPERATIONS,
        )
        ours, theirs = connection_pair()
        self.broker.attach_producer("target-0", ours)
        self.sink = StagedSink(
            sink=SharedSink(connection=theirs, pools=[], fingerprint="target"),
            hosts=[make_host(SlotPool.shared(layout, num_slots, self.memory), target_streams or STREAMS)],
            slots=make_slots(2, layout),
            streams=target_streams or STREAMS,
            operations=OPERATIONS,
        )
        self.written: list[Assignment] = []
        self.failures: list[str] = []
        self.thread = threading.Thread(target=self._produce, args=(produce,))
        self.thread.start()

    def _produce(self, produce: Callable[[Assignment, DeviceSlot], None]) -> None:
        try:
            while (assignment := self.sink.acquire()) is not None:
                self.written.append(assignment)
                last, scale = self.sink.last_hidden(assignment), self.sink.scale(assignment)
                produce(assignment, DeviceSlot(self.sink.hidden(assignment), last, torch.zeros(1), scale))
                self.sink.publish(assignment)
        except TransportClosed:  # the test is over
            pass
        except BaseException as error:
            self.failures.append(repr(error))
        self.sink.close()

    def stop(self) -> None:
        self.source.close()
        self.broker.close()
        self.thread.join(30)
        assert not self.thread.is_alive()
        assert not self.failures
        self.pool.close()
        self.memory.close()
