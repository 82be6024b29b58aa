"""Owns the children of a run: starts them, hears their reports, restarts a target worker that died, ends the run in order.

Waits for: reports and ends of children. Nothing waits for it but the issue of packs, which its broker thread does.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from types import FrameType
from typing import Any, Protocol

from slipstream.errors import Interrupted, WorkerFailed
from slipstream.launch.processes import Child, end_all

POLL_SECONDS = 0.5
GRACE_SECONDS = 30.0

log = logging.getLogger(__name__)


class WorkerStarter(Protocol):
    """Starts (again) the target worker of that index and attaches it to the broker; knows how to detach a dead one."""

    def start(self, index: int, attempt: int) -> Child:
        """Start the worker."""

    def detach(self, index: int, cause: str) -> None:
        """Take back what the dead worker had in hand."""


@dataclass(slots=True)
class Supervisor:
    """Runs drafters (or colocated processes) to their end, with target workers that may be restarted.

    `on_report(name, kind, payload)` sees every report. Raises `WorkerFailed` when a drafter dies or a target worker dies too
    often, `Interrupted` when SIGINT or SIGTERM ended the run in order.
    """

    drafters: Sequence[Child]
    starter: WorkerStarter | None
    num_targets: int
    max_restarts: int
    ready_seconds: float
    on_report: Callable[[str, str, Any], None]
    close_broker: Callable[[str], None]
    targets: list[Child] = field(default_factory=list)
    restarts: list[int] = field(default_factory=list)
    signal_number: int = 0

    def run(self) -> dict[str, Any]:
        """Run to the end and return what drafter rank 0 reported as its result."""
        with _SignalsTo(self._on_signal):
            try:
                for index in range(self.num_targets):
                    self._start_target(index, attempt=0)
                while not all(child.done for child in self.drafters):
                    self._look()
                self._finish()
            except BaseException as error:
                self.close_broker(str(error))
                end_all([*self.drafters, *self.targets], grace_seconds=GRACE_SECONDS / 3)
                raise
        if self.signal_number:
            name = signal.Signals(self.signal_number).name
            interrupted = Interrupted(f"ended in order after {name}; continue with --resume")
            interrupted.exit_code = 128 + self.signal_number
            raise interrupted
        return self.drafters[0].result

    def _start_target(self, index: int, *, attempt: int) -> None:
        assert self.starter is not None
        child = self.starter.start(index, attempt)
        if index < len(self.targets):
            self.targets[index] = child
        else:
            self.targets.append(child)
            self.restarts.append(0)

    def _look(self) -> None:
        children = [child for child in (*self.drafters, *self.targets) if not child.done]
        sources: dict[Any, Child] = {child.control: child for child in children if not child.control.closed}
        handles = [os.pidfd_open(child.process.pid) for child in children if child.alive]
        try:
            heard = wait([*sources, *handles], timeout=POLL_SECONDS)
        finally:
            for handle in handles:
                os.close(handle)
        for source in heard:
            if isinstance(source, Connection):
                self._hear(sources[source])
        self._check_ready(children)
        for child in children:
            if not child.done and not child.alive:
                self._ended(child)

    def _hear(self, child: Child) -> None:
        try:
            while child.control.poll():
                kind, payload = child.control.recv()
                self._take(child, kind=kind, payload=payload)
        except (EOFError, OSError):
            with suppress(Exception):
                child.process.wait(timeout=GRACE_SECONDS)

    def _take(self, child: Child, *, kind: str, payload: Any) -> None:
        if kind == "ready":
            child.ready = True
        elif kind == "done":
            child.done, child.result = True, payload
        elif kind == "failed":
            child.failure = f"{payload['kind']}: {payload['message']}"
        self.on_report(child.name, kind, payload)

    def _check_ready(self, children: Sequence[Child]) -> None:
        now = time.monotonic()
        late = [child for child in children if not child.ready and now - child.started_at > self.ready_seconds]
        if late:
            raise WorkerFailed(
                f"{', '.join(child.name for child in late)} did not become ready within placement.ready_seconds = "
                f"{self.ready_seconds:.0f}; logs: {', '.join(str(child.log) for child in late)}"
            )

    def _ended(self, child: Child) -> None:
        """A child whose process is gone: hear what it still said, then restart it or end the run."""
        self._hear(child)
        if child.done:
            return
        if child not in self.targets:
            raise WorkerFailed(child.describe_end())
        index = self.targets.index(child)
        assert self.starter is not None
        self.starter.detach(index, child.describe_end())
        self.restarts[index] += 1
        if self.restarts[index] > self.max_restarts:
            raise WorkerFailed(
                f"target worker {index} ended {self.restarts[index]} times, more than placement.max_restarts = "
                f"{self.max_restarts}; last: {child.describe_end()}"
            )
        log.warning("restarting %s", child.describe_end())
        child.control.close()
        self.on_report(child.name, "restart", {"attempt": self.restarts[index]})
        self._start_target(index, attempt=self.restarts[index])

    def _finish(self) -> None:
        """All drafters are done: the targets have nothing left to do and end by themselves."""
        self.close_broker("")
        end_all([*self.drafters, *self.targets], grace_seconds=GRACE_SECONDS)

    def _on_signal(self, number: int) -> None:
        if self.signal_number:
            raise Interrupted("asked a second time to stop; children are ended by their handles, the last step is lost")
        self.signal_number = number
        log.warning("%s: finishing the step and writing a checkpoint", signal.Signals(number).name)
        for child in self.drafters:
            child.ask_to_stop()


class _SignalsTo:
    """While entered, SIGINT and SIGTERM call `handler(number)`; only in the main thread, where signals arrive."""

    def __init__(self, handler: Callable[[int], None]) -> None:
        self._handler = handler
        self._before: dict[int, Any] = {}

    def __enter__(self) -> None:
        with suppress(ValueError):
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._call)

    def __exit__(self, *exception: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _call(self, number: int, frame: FrameType | None) -> None:
        self._handler(number)
