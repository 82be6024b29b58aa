"""The trainer's streams: the one that computes, and side streams that only copy; and the memory they copy between.

What crosses between them is persistent, ordered by events that its owner keeps. Tests put `device.stream_model` and plain
memory in place of `CudaLanes` and run the same code on a CPU, with every access checked.
"""

from __future__ import annotations

import mmap
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from slipstream.device.pinned import PinnedSlots
from slipstream.device.recorder import CudaRecorder, Recorder
from slipstream.device.streams import CudaStreams, Event, Stream, Streams

SPAN_BYTES = 1 << 30
"""Slabs are page-locked in pieces of this size, in the background; a copy must not cross a border."""

Pair = tuple[Tensor, Tensor]
"""(to, of): of one size and type; one of the two is page-locked host memory."""


class TimedEvent(Event, Protocol):
    """An event that knows when it was reached."""

    def elapsed_time(self, end_event: Any, /) -> float:
        """Milliseconds from this event to a later one; both have been reached."""
        ...


@dataclass(frozen=True, slots=True)
class Slab:
    """Page-locked host memory of exactly its size, uint8. `spans` are bytes (start, stop) that one copy may cover.

    `ensure` returns once all of it is page-locked.
    """

    memory: Tensor
    spans: tuple[tuple[int, int], ...]
    ensure: Callable[[], None]


class Lanes(ABC):
    """The compute stream of the thread that makes it, and side streams. None waits but `Event.synchronize` and `finish`."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._compute = streams.current()

    def adopt_thread(self) -> None:
        """First call of a thread that will wait for events."""
        self._streams.adopt_thread()

    def event(self) -> Event:
        """A new event, for a slot to own; never recorded, it counts as reached."""
        return self._streams.event()

    def side(self, name: str) -> Stream:
        """A new side stream. What must not queue behind a checkpoint has one of its own."""
        return self._streams.side(name)

    def copy(self, pairs: Sequence[Pair], *, on: Stream, after: Event, then: Sequence[Event]) -> None:
        """On a side stream: wait for `after`, copy, record each of `then`."""
        assert on != self._compute, "copies on the compute stream would hold it up"
        self._streams.wait(after, by=on)
        with self._streams.within(on):
            for to, of in pairs:
                self.transfer(to, of)
        for event in then:
            self._streams.record(event, on=on)

    def mark(self, event: Event) -> None:
        """Record an event where the compute stream stands."""
        self._streams.record(event, on=self._compute)

    def hold(self, event: Event) -> None:
        """What is launched on the compute stream from here on runs after the event."""
        self._streams.wait(event, by=self._compute)

    def recorder(self) -> Recorder | None:
        """What records work of the compute stream, for it to replay; none where that cannot be done."""
        return None

    @abstractmethod
    def timed_event(self) -> TimedEvent:
        """A new event that knows its time."""

    @abstractmethod
    def transfer(self, to: Tensor, of: Tensor) -> None:
        """Launch one copy on the stream that is current."""

    @abstractmethod
    def pinned(self, nbytes: int) -> Tensor:
        """Page-locked host memory, uint8 `[nbytes]`: for small pieces, sizes are rounded up to powers of two."""

    @abstractmethod
    def slab(self, nbytes: int) -> Slab:
        """Page-locked host memory of exactly that size, given back with the lanes."""

    @abstractmethod
    def buffer(self, nbytes: int) -> Tensor:
        """Device memory, uint8 `[nbytes]`."""

    @abstractmethod
    def finish(self) -> None:
        """Wait for all of the device's work: outside the loop only."""

    @abstractmethod
    def give_back(self) -> None:
        """Return cached device memory that nothing uses to the driver: outside the loop only."""


class CudaLanes(Lanes):
    """On a GPU. Made by the thread that trains, on the stream that it trains on."""

    def __init__(self, device: torch.device) -> None:
        self.device = device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
        super().__init__(CudaStreams(self.device))

    def recorder(self) -> Recorder:
        """CUDA graphs."""
        return CudaRecorder(self.device, stage="drafter")

    def timed_event(self) -> TimedEvent:
        """Waiting for it sleeps."""
        return cast(TimedEvent, torch.cuda.Event(blocking=True, enable_timing=True))

    def transfer(self, to: Tensor, of: Tensor) -> None:
        """Asynchronous, as the host's side is page-locked."""
        to.copy_(of, non_blocking=True)

    def pinned(self, nbytes: int) -> Tensor:
        """From torch's pool."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def slab(self, nbytes: int) -> Slab:
        """Anonymous pages, locked span by span in a thread of their own: about half a second a GiB."""
        size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
        spans = tuple((start, min(start + SPAN_BYTES, size)) for start in range(0, size, SPAN_BYTES))
        locked = PinnedSlots([(memory.data_ptr() + start, stop - start) for start, stop in spans], order=range(len(spans)))
        weakref.finalize(self, _unlock, locked, memory)

        def ensure() -> None:
            for span in range(len(spans)):
                locked.ensure(span)

        return Slab(memory=memory[:nbytes], spans=spans, ensure=ensure)

    def buffer(self, nbytes: int) -> Tensor:
        """From the caching allocator; aligned to 512 bytes."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def finish(self) -> None:
        """All streams of the device."""
        torch.cuda.synchronize(self.device)

    def give_back(self) -> None:
        """What tuning and compiling left in the caching allocator."""
        torch.cuda.empty_cache()


def _unlock(locked: PinnedSlots, _memory: Tensor) -> None:
    """Before the pages go, which the second argument holds: an address that is still locked cannot be locked again."""
    locked.close()
