"""Accounts of time: every nanosecond of a worker is charged to exactly one state. Waits for nothing.

States are work ("forward", "backward", "optimizer", "target", "pack", ...) or waits with their cause ("wait_input",
"wait_slot", "wait_peer"); what no state claims is "idle". A nested state takes its time away from the one around it, so
the states of a worker sum to its wall time.
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

IDLE = "idle"
"""The state of a worker that no other state claims."""

logger = logging.getLogger(__name__)


class Account:
    """Time of one worker thread by state, in nanoseconds. The first thread that switches it owns it; any may read it."""

    def __init__(self, worker: str, *, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self.worker = worker
        self._clock = clock
        self._lock = threading.Lock()
        self._charged: dict[str, int] = {IDLE: 0}
        self._state = IDLE
        self._owner: int | None = None
        self._began = self._since = clock()

    @contextmanager
    def state(self, name: str) -> Iterator[None]:
        """Charge the time inside to `name`, except what a state nested in it claims."""
        outer = self._switch(name)
        try:
            yield
        finally:
            self._switch(outer)

    def _switch(self, name: str) -> str:
        self._owner = self._owner or threading.get_ident()
        assert self._owner == threading.get_ident(), f"the account of {self.worker} is switched by two threads"
        with self._lock:
            now = self._clock()
            outer = self._state
            self._charged[outer] = self._charged.get(outer, 0) + now - self._since
            self._state, self._since = name, now
        return outer

    def read(self) -> tuple[int, dict[str, int]]:
        """Wall nanoseconds since the account was opened, and nanoseconds by state; the latter sum to the former."""
        with self._lock:
            now = self._clock()
            charged = dict(self._charged)
            charged[self._state] = charged.get(self._state, 0) + now - self._since
            return now - self._began, charged


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
