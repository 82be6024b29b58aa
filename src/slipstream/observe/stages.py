"""Stages of a worker's work on its GPU, timed by pairs of events around what the CPU launches. Nobody waits for them.

Events come from a fixed pool and are read once they are reached, when a later stage begins. A stage for which no pair is
free is dropped and counted. A pair costs the CPU a few microseconds and the GPU nothing that can be measured.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

from slipstream.observe.spans import SpanLog

if TYPE_CHECKING:
    import torch

PAIRS = 512
"""Stages that may be under way: a loop that runs two steps of forty packs ahead needs fewer."""

READ_AT_ONCE = 4
"""Stages that are read when another begins: more than begin, so that none is left behind for long."""


class TimedEvent(Protocol):
    """An event that knows when the device reached it."""

    def query(self) -> bool:
        """Whether it has been reached; waits for nothing."""
        ...

    def synchronize(self) -> None:
        """Sleep until it has."""
        ...

    def elapsed_time(self, end_event: Any, /) -> float:
        """Milliseconds from this event to a later one; both have been reached."""
        ...


@dataclass(slots=True, eq=False)
class Stage:
    """A pair of events, and what lies between them. `launched_ns` is when the CPU recorded the first."""

    began: TimedEvent
    ended: TimedEvent
    state: str = ""
    pack: int | None = None
    step: int | None = None
    launched_ns: int = 0


class GpuStages:
    """Times stages of one stream, in the order in which they are launched; they do not nest.

    `record(event)` puts an event behind what the stream has been given. Device times become times of `clock` by counting on
    from the stage read before, from an event that is waited for once, here; and since the two clocks drift apart, a stage
    never begins before it was launched nor ends after it was seen to have ended, which moves all that come after it.
    """

    def __init__(
        self,
        *,
        event: Callable[[], TimedEvent],
        record: Callable[[TimedEvent], None],
        spans: SpanLog,
        pairs: int = PAIRS,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._record, self._spans, self._clock = record, spans, clock
        self._free = deque(Stage(began=event(), ended=event()) for _ in range(pairs))
        for stage in self._free:  # what a driver makes of an event it makes at its first use
            record(stage.began)
            record(stage.ended)
        self._running: deque[Stage] = deque()
        self._known = self._free.popleft()
        self._known.ended.synchronize()
        self._known_ns = clock()
        self.dropped = 0
        """Stages that no pair was free for."""

    def begin(self, state: str, pack: int | None, step: int | None) -> object | None:
        """What is launched from here on is `state`, until `end`. None, and counted, when no pair is free."""
        for _ in range(READ_AT_ONCE):
            if not self._read_next():
                break
        if not self._free:
            self.dropped += 1
            return None
        stage = self._free.popleft()
        stage.state, stage.pack, stage.step, stage.launched_ns = state, pack, step, self._clock()
        self._record(stage.began)
        return stage

    def end(self, stage: object) -> None:
        """All of it has been launched."""
        assert isinstance(stage, Stage)
        self._record(stage.ended)
        self._running.append(stage)

    def close(self) -> None:
        """Read what has been reached; the rest is dropped."""
        while self._read_next():
            pass
        self.dropped += len(self._running)
        self._running.clear()

    def _read_next(self) -> bool:
        """Read the oldest stage, if it is over."""
        if not self._running or not self._running[0].ended.query():
            return False
        stage, seen = self._running.popleft(), self._clock()
        start = self._known_ns + _nanoseconds(self._known.ended, stage.began)
        start = max(start, stage.launched_ns)
        stop = min(start + _nanoseconds(stage.began, stage.ended), seen)
        self._spans.add("gpu", stage.state, min(start, stop), stop, stage.pack, stage.step)
        self._free.append(self._known)
        self._known, self._known_ns = stage, stop
        return True


def _nanoseconds(began: TimedEvent, ended: TimedEvent) -> int:
    return round(began.elapsed_time(ended) * 1e6)


def cuda_stages(spans: SpanLog, *, device: torch.device) -> GpuStages:
    """Stages of the stream that is current here, on a CUDA device. Waits for the device once."""
    import torch  # here, not above: the supervisor imports this package without torch

    stream = torch.cuda.current_stream(device)

    def event() -> TimedEvent:
        return cast(TimedEvent, torch.cuda.Event(enable_timing=True))

    return GpuStages(event=event, record=lambda event: cast(Any, event).record(stream), spans=spans)
