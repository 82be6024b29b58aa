"""Accounts of time: every nanosecond of a worker is charged to exactly one state. Waits for nothing.

States are those of `states.STATES`: work, or waits with their cause; what no state claims is "idle". A nested state takes
its time away from the one around it, so the states of a worker sum to its wall time. Every change of state is a span too.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from slipstream.observe.spans import SpanLog
from slipstream.observe.states import GPU_STAGES, IDLE

logger = logging.getLogger(__name__)


class Stages(Protocol):
    """Times a state's work on a GPU; see `stages.GpuStages`."""

    def begin(self, state: str, pack: int | None, step: int | None) -> object | None:
        """What is launched from here on belongs to a state. None when it cannot be timed."""
        ...

    def end(self, stage: object) -> None:
        """All of its work has been launched."""
        ...

    def close(self) -> None:
        """No more will begin."""
        ...


class Account:
    """Time of one worker thread by state, in nanoseconds. The first thread that switches it owns it; any may read it.

    `spans` takes every stretch of one state, on the lane "cpu"; `stages`, which may be put in place later, times on the GPU
    what states of `GPU_STAGES` launch. What no state claims is `base` until `rest` names another.
    """

    def __init__(
        self,
        worker: str,
        *,
        clock: Callable[[], int] = time.perf_counter_ns,
        spans: SpanLog | None = None,
        base: str = IDLE,
    ) -> None:
        self.worker = worker
        self.spans = spans
        self.stages: Stages | None = None
        self.step = 0
        """The step that a state named last."""
        self.changes = 0
        """How often the state has changed."""
        self._clock = clock
        self._lock = threading.Lock()
        self._charged: dict[str, int] = {IDLE: 0}
        self._base = self._now = Claim(self, base, pack=None, step=None, whole=False)
        self._whole = False
        self._owner: int | None = None
        self._began = self._since = clock()
        self._is_over = False
        if spans is not None:
            spans.before_write = self.cut

    @property
    def now(self) -> str:
        """The state that lasts just now. From any thread."""
        return self._now.name

    def state(self, name: str, *, pack: int | None = None, step: int | None = None, whole: bool = False) -> Claim:
        """A context: charge the time inside to `name`, except what a state nested in it claims; `whole` lets none claim any.

        `pack` and `step` say what the time was spent on. Contexts are entered once.
        """
        return Claim(self, name, pack=pack, step=step, whole=whole)

    def rest(self, name: str = IDLE) -> None:
        """What no state claims is `name` from here on. Outside all states."""
        assert self._now is self._base, f"the account of {self.worker} is in state {self._now.name}"
        self._base = Claim(self, name, pack=None, step=None, whole=False)
        self._enter(self._base)

    @contextmanager
    def aside(self, lane: str, name: str, *, pack: int | None = None, step: int | None = None) -> Iterator[None]:
        """A span of another thread of this worker, on its own lane: charged to nobody. From any thread."""
        began = self._clock()
        try:
            yield
        finally:
            if self.spans is not None:
                self.spans.add(lane, name, began, self._clock(), pack, step)

    def read(self) -> tuple[int, dict[str, int]]:
        """Wall nanoseconds since the account was opened, and nanoseconds by state; the latter sum to the former."""
        with self._lock:
            now = self._since if self._is_over else self._clock()
            charged = dict(self._charged)
            charged[self._now.name] = charged.get(self._now.name, 0) + now - self._since
            return now - self._began, charged

    def cut(self) -> None:
        """End the span that lasts just now and begin another of the same state, so that long ones are seen. From any thread."""
        with self._lock:
            self._charge(self._now)

    def end(self) -> None:
        """The last moment that is charged: whatever is written of the account from here on ends at it. From any thread."""
        with self._lock:
            self._charge(self._now)
            self._is_over = True

    def _rename(self, claim: Claim, name: str) -> None:
        with self._lock:
            if self._now is claim:
                self._charge(claim)
            claim.name = name

    def _enter(self, claim: Claim) -> Claim:
        me = threading.get_ident()
        self._owner = self._owner or me
        assert self._owner == me, f"the account of {self.worker} is switched by two threads"
        with self._lock:
            outer = self._now
            self._charge(claim)
            self.changes += 1
        if claim.step is not None:
            self.step = claim.step
        return outer

    def _charge(self, to: Claim) -> None:
        """Charge the current state up to now, and go on with another one. The lock is held."""
        if self._is_over:
            self._now = to
            return
        now, current, since = self._clock(), self._now, self._since
        charged = self._charged
        charged[current.name] = charged.get(current.name, 0) + now - since
        if self.spans is not None:
            self.spans.add("cpu", current.name, since, now, current.pack, current.step)
        self._now, self._since = to, now


class Claim:
    """One stretch of a state, as a context."""

    __slots__ = ("_account", "_outer", "_stage", "_whole", "name", "pack", "step")

    def __init__(self, account: Account, name: str, *, pack: int | None, step: int | None, whole: bool) -> None:
        self._account, self._whole = account, whole
        self.name, self.pack, self.step = name, pack, step
        self._outer: Claim | None = None
        self._stage: object | None = None

    def become(self, name: str) -> None:
        """What remains of it is charged to another state. From any thread; after its end this does nothing."""
        self._account._rename(self, name)

    def __enter__(self) -> Claim:
        account = self._account
        if account._whole:
            return self
        self._outer = account._enter(self)
        account._whole = self._whole
        if account.stages is not None and self.name in GPU_STAGES:
            self._stage = account.stages.begin(self.name, self.pack, self.step)
        return self

    def __exit__(self, *_: object) -> None:
        if self._outer is None:
            return
        account = self._account
        account._whole = False
        if self._stage is not None:
            assert account.stages is not None
            account.stages.end(self._stage)
        account._enter(self._outer)


class AccountWriter:
    """Appends an account to a file of JSON lines every few seconds and at the end, from a thread of its own.

    A line holds running totals in seconds: `worker`, `pid`, `time` (Unix seconds), `wall_seconds`, `states`, `closed`.
    A disk that fails later is reported once and never stops the worker. Raises `OSError` when the file cannot be opened.
    """

    def __init__(self, account: Account, *, path: Path, every_seconds: float = 5.0) -> None:
        self._account = account
        self._file = path.open("a", encoding="utf-8")
        self._every_seconds = every_seconds
        self._closing = threading.Event()
        self._failed = False
        self._thread = threading.Thread(target=self._run, name=f"account-{account.worker}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write the last line and close the file. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._thread.join()
        self._write(closed=True)
        try:
            self._file.close()
        except OSError:
            self._report("closing")

    def __enter__(self) -> AccountWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        while not self._closing.wait(self._every_seconds):
            self._write(closed=False)

    def _write(self, *, closed: bool) -> None:
        wall, states = self._account.read()
        line = {
            "worker": self._account.worker,
            "pid": os.getpid(),
            "time": time.time(),
            "wall_seconds": wall / 1e9,
            "states": {name: charged / 1e9 for name, charged in states.items()},
            "closed": closed,
        }
        try:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        except OSError:
            self._report("writing")

    def _report(self, doing: str) -> None:
        if not self._failed:
            self._failed = True
            logger.warning("account of %s: %s failed; training goes on without it", self._account.worker, doing, exc_info=True)
