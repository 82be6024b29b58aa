"""Streams and events on a CPU that prove an order instead of keeping one: every access is checked with vector clocks.

Each timeline (a stream, or a process's CPU) has a clock: how far it knows every timeline to have come. Work given to a
stream knows what the stream and the CPU that gave it know; an event carries its stream's clock to whoever waits for it.
An access is ordered after an earlier one if its clock has reached that one's tick. So the verdict does not depend on when
the modelled device happens to run, only on what the code under test ordered: one run stands for all timings of it.

Threads of a process count as one CPU: they hand each other work under locks, which order as a program does.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast

from slipstream.device.streams import Event, Stream, Streams


class UnorderedAccess(AssertionError):
    """A read that its write, or an overwrite that a read or write before it, is not ordered before."""


@dataclass(slots=True, eq=False)
class Timeline:
    """A stream, or the CPU of a process. `clock[name]` is the last tick of that timeline known to be done by now."""

    name: str
    clock: dict[str, int] = field(default_factory=dict)

    def learn(self, clock: dict[str, int]) -> None:
        """What is known elsewhere is known here from now on."""
        for name, tick in clock.items():
            self.clock[name] = max(tick, self.clock.get(name, 0))

    def tick(self) -> tuple[str, int]:
        """The next moment of this timeline."""
        self.clock[self.name] = self.clock.get(self.name, 0) + 1
        return self.name, self.clock[self.name]


@dataclass(slots=True)
class _Accesses:
    """Moments of a buffer's last write and of the last read on each timeline since."""

    written: tuple[str, int] | None = None
    read: dict[str, int] = field(default_factory=dict)


class StreamModel:
    """The memory that all modelled processes share, and every access to it so far."""

    def __init__(self) -> None:
        self._buffers: dict[Hashable, _Accesses] = {}
        self._names: set[str] = set()
        self.num_checked = 0

    def timeline(self, name: str) -> Timeline:
        """A new timeline; names are unique."""
        assert name not in self._names, f"there is a timeline {name} already"
        self._names.add(name)
        return Timeline(name)

    def access(self, by: Timeline, *, reads: Iterable[Hashable] = (), writes: Iterable[Hashable] = ()) -> None:
        """One piece of work of a timeline, and what it touches. Raises `UnorderedAccess`."""
        moment = by.tick()
        for name in reads:
            accesses = self._buffers.setdefault(name, _Accesses())
            self._check(by, f"reads {name}, written", accesses.written)
            accesses.read[moment[0]] = moment[1]
        for name in writes:
            accesses = self._buffers.setdefault(name, _Accesses())
            self._check(by, f"writes {name}, written", accesses.written)
            for earlier in accesses.read.items():
                self._check(by, f"writes {name}, read", earlier)
            self._buffers[name] = _Accesses(written=moment)

    def _check(self, by: Timeline, what: str, earlier: tuple[str, int] | None) -> None:
        self.num_checked += 1
        if earlier is not None and by.clock.get(earlier[0], 0) < earlier[1]:
            raise UnorderedAccess(f"{by.name} {what} by {earlier[0]}, without being ordered after it")


class ModelEvent:
    """An `Event` of a modelled process. `synchronize` lets the process's CPU know what the event's stream had done."""

    def __init__(self, cpu: Timeline) -> None:
        self._cpu = cpu
        self.clock: dict[str, int] | None = None

    def query(self) -> bool:
        """Always reached: whoever asks learns so, and no later work is known done by it."""
        self.synchronize()
        return True

    def synchronize(self) -> None:
        """Contract: `Event.synchronize`."""
        if self.clock is not None:
            self._cpu.learn(self.clock)


class ModelStreams(Streams):
    """The streams of one modelled process. `cpu` is its CPU's timeline; messages between processes carry its clock."""

    def __init__(self, model: StreamModel, *, process: str) -> None:
        self._model, self._process = model, process
        self.cpu = model.timeline(f"{process}.cpu")
        self._entered = [model.timeline(f"{process}.compute")]

    def adopt_thread(self) -> None:
        """Nothing to do: a modelled process has one CPU."""

    def current(self) -> Stream:
        """Contract: `Streams.current`."""
        return cast(Stream, self._entered[-1])

    def side(self, name: str) -> Stream:
        """Contract: `Streams.side`."""
        return cast(Stream, self._model.timeline(f"{self._process}.{name}"))

    def event(self) -> Event:
        """Contract: `Streams.event`."""
        return ModelEvent(self.cpu)

    @contextmanager
    def within(self, stream: Stream) -> Iterator[None]:
        """Contract: `Streams.within`."""
        self._entered.append(cast(Timeline, stream))
        try:
            yield
        finally:
            self._entered.pop()

    def record(self, event: Event, *, on: Stream) -> None:
        """Contract: `Streams.record`."""
        stream = cast(Timeline, on)
        stream.learn(self.cpu.clock)
        cast(ModelEvent, event).clock = dict(stream.clock)

    def wait(self, event: Event, *, by: Stream) -> None:
        """Contract: `Streams.wait`."""
        clock = cast(ModelEvent, event).clock
        if clock is not None:
            cast(Timeline, by).learn(clock)

    def work(self, *, reads: Iterable[Hashable] = (), writes: Iterable[Hashable] = ()) -> None:
        """Give the current stream a piece of work that touches these buffers. Raises `UnorderedAccess`."""
        stream = self._entered[-1]
        stream.learn(self.cpu.clock)
        self._model.access(stream, reads=reads, writes=writes)

    def look(self, *, reads: Iterable[Hashable] = (), writes: Iterable[Hashable] = ()) -> None:
        """The CPU itself touches these buffers now. Raises `UnorderedAccess`."""
        self._model.access(self.cpu, reads=reads, writes=writes)
