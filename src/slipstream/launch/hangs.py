"""Processes that hang: alive, and without progress. Found out by what they do not say.

A drafter (or colocated process) tells every few seconds how often its account of time has changed state; within a step it
changes many times. States that may last, above all waits for somebody else, are no hang; to say nothing at all is one. What a
target worker has in hand the broker knows. Waits for nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from slipstream.observe import Account
from slipstream.transport.stats import Silence

PULSE_SECONDS = 5.0
PULSE = "pulse"
"""Kind of a child's report whose payload is a `Pulse`."""

WITHIN_A_STEP = frozenset({"target", "publish", "forward", "backward", "forward_backward", "optimizer", "hooks", "wait_gpu"})
"""States of a training process none of which lasts. Others may: loading, warming up, measuring, disks, waits for others."""

ABSENT_SECONDS = 30.0
"""A supervisor that has not looked for so long was stopped itself, as its children may have been: it counts from then on."""


@dataclass(frozen=True, slots=True)
class Pulse:
    """What a process was doing: how often its account had changed state, the state, and the step."""

    changes: int
    state: str
    step: int


class Reports(Protocol):
    """A child's end of its control connection."""

    def report(self, kind: str, payload: object) -> None:
        """Send one report."""


@contextmanager
def pulse(control: Reports, account: Account, *, stall_seconds: float) -> Iterator[None]:
    """Report a `Pulse` now and again, several times in `stall_seconds`, from a thread of its own, while entered."""
    over, every_seconds = threading.Event(), min(PULSE_SECONDS, stall_seconds / 8)

    def beat() -> None:
        while True:
            control.report(PULSE, Pulse(changes=account.changes, state=account.now, step=account.step))
            if over.wait(every_seconds):
                return

    thread = threading.Thread(target=beat, name="pulse", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(every_seconds)


class HangWatch:
    """Who has made no progress for `stall_seconds`. One thread's; `clock` in seconds."""

    def __init__(self, *, stall_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.stall_seconds = stall_seconds
        self._clock = clock
        self._looked_at = self._looking_since = clock()
        self._last: dict[str, tuple[Pulse, float]] = {}
        self._heard_at: dict[str, float] = {}

    def hear(self, name: str, heard: Pulse) -> None:
        """A pulse of a process."""
        now = self._heard_at[name] = self._clock()
        before = self._last.get(name)
        if before is None or (before[0].changes, before[0].state) != (heard.changes, heard.state):
            self._last[name] = heard, now

    def look(self) -> None:
        """To be called again and again: a gap between two calls counts for nobody."""
        now = self._clock()
        if now - self._looked_at > ABSENT_SECONDS:
            self._looking_since = now
        self._looked_at = now

    def stuck(self, name: str) -> str | None:
        """What a process has been doing for too long, in words; none if it is well, or has said nothing ever."""
        if name not in self._last:
            return None
        last, since = self._last[name]
        where = f'in state "{last.state}" of step {last.step}'
        seconds, silent = self._since(since), self._since(self._heard_at[name])
        if silent >= self.stall_seconds:
            return f"no sign of life for {silent:.0f} s, last {where}, {self._limit}"
        if seconds >= self.stall_seconds and last.state in WITHIN_A_STEP:
            return f"{where} for {seconds:.0f} s, {self._limit}"
        return None

    def silent(self, silence: Silence | None) -> str | None:
        """Why a target worker counts as hung, in words; none if it does not."""
        if silence is None or min(silence.seconds, self._since(self._looking_since)) < self.stall_seconds:
            return None
        packs = ", ".join(str(pack_id) for pack_id in silence.packs)
        return f"it had pack {packs} in hand and handed none over for {silence.seconds:.0f} s, {self._limit}"

    def _since(self, moment: float) -> float:
        return self._looked_at - max(moment, self._looking_since)

    @property
    def _limit(self) -> str:
        return f"longer than placement.stall_seconds = {self.stall_seconds:g}"
