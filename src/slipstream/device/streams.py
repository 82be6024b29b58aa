"""Streams and events: what may overlap on a device, and the one way in which one stream waits for another.

Everything that moves slots is written against `Streams`. `CudaStreams` is the device's own; `stream_model.ModelStreams`
stands in for it on a CPU and proves from vector clocks that every access is ordered. Nothing here makes the CPU wait,
except `Event.synchronize`, which is for completer threads alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, cast

if TYPE_CHECKING:
    import torch


class Stream(Protocol):
    """A queue of work on the device; equal to itself alone."""


class Event(Protocol):
    """A place in a stream's work. Owned by a slot and recorded again and again; never recorded, it counts as reached."""

    def query(self) -> bool:
        """Whether the work up to the last record has finished; waits for nothing."""
        ...

    def synchronize(self) -> None:
        """Sleep until it has. For completer threads: a loop that trains or captures never calls it."""
        ...


class Streams(ABC):
    """The streams of one process on one device."""

    @abstractmethod
    def adopt_thread(self) -> None:
        """Make the calling thread work on this device: threads do not inherit it. First call of every new thread."""

    @abstractmethod
    def current(self) -> Stream:
        """The stream that the calling thread enqueues on. Ask before entering `within`: inside, it is the side stream."""

    @abstractmethod
    def side(self, name: str) -> Stream:
        """A new stream beside the current one. Few are enough: each has an allocator pool of its own."""

    @abstractmethod
    def event(self) -> Event:
        """A new event, for a slot to own."""

    @abstractmethod
    def within(self, stream: Stream) -> AbstractContextManager[object]:
        """What the calling thread enqueues inside goes to `stream`."""

    @abstractmethod
    def record(self, event: Event, *, on: Stream) -> None:
        """Put `event` behind all that `on` has been given so far."""

    @abstractmethod
    def wait(self, event: Event, *, by: Stream) -> None:
        """What `by` is given from here on starts after `event`, as last recorded. The CPU waits for nothing."""

    def order(self, *, after: Stream, before: Stream, event: Event) -> None:
        """What `after` is given from here on starts when all that `before` has been given so far is done.

        The two must differ: a stream that waits for itself waits for nothing, and the order meant was another one.
        """
        assert after != before, "a stream cannot be ordered after itself: was the producer's stream captured too late?"
        self.record(event, on=before)
        self.wait(event, by=after)


class CudaStreams(Streams):
    """Streams of one CUDA device. `device` needs an index."""

    def __init__(self, device: torch.device) -> None:
        import torch  # here, not above: the supervisor imports this package without torch

        assert device.type == "cuda", f"{device} has no streams"
        assert device.index is not None, f"{device} has no index"
        self._cuda, self._device = torch.cuda, device

    def adopt_thread(self) -> None:
        """Contract: `Streams.adopt_thread`."""
        self._cuda.set_device(self._device)

    def current(self) -> Stream:
        """Contract: `Streams.current`."""
        return cast(Stream, self._cuda.current_stream(self._device))

    def side(self, name: str) -> Stream:
        """A stream of high priority: the little that runs there does not queue behind a forward's thread blocks."""
        return cast(Stream, self._cuda.Stream(self._device, priority=-1))

    def event(self) -> Event:
        """An event whose `synchronize` sleeps, and lets go of the interpreter's lock meanwhile."""
        return cast(Event, self._cuda.Event(blocking=True))

    def within(self, stream: Stream) -> AbstractContextManager[object]:
        """Contract: `Streams.within`."""
        return cast(AbstractContextManager[object], self._cuda.stream(cast(Any, stream)))

    def record(self, event: Event, *, on: Stream) -> None:
        """Contract: `Streams.record`."""
        cast(Any, event).record(on)

    def wait(self, event: Event, *, by: Stream) -> None:
        """Contract: `Streams.wait`."""
        cast(Any, by).wait_event(event)
