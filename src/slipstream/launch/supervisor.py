"""Owns the children of a run: starts them, hears their reports, restarts a target worker that died, ends the run in order.

Waits for: reports and ends of children. Nothing waits for it but the issue of packs, which its broker thread does.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from types import FrameType
from typing import Any, NoReturn, Protocol

from slipstream.errors import Interrupted, PeerDied, UsageError, WorkerFailed
from slipstream.launch.hangs import PULSE, HangWatch
from slipstream.launch.processes import Child, end_all
from slipstream.transport.stats import Silence

POLL_SECONDS = 0.5
GRACE_SECONDS = 30.0
STUCK_SECONDS = 30.0
"""A hung child that is still there so long after it was killed is stuck in a driver."""
CAUSE_SECONDS = 5.0
"""How long one drafter's loss of another waits for that one to be heard: the first to end need not be the one that failed."""

log = logging.getLogger(__name__)


class WorkerStarter(Protocol):
    """Starts (again) the target worker of that index and attaches it to the broker; knows how to detach a dead one."""

    def start(self, index: int, attempt: int) -> Child:
        """Start the worker."""

    def detach(self, index: int, cause: str) -> None:
        """Take back what the dead worker had in hand."""

    def silence(self, index: int) -> Silence | None:
        """How long the worker has had packs in hand without a word; none if it has none."""


@dataclass(slots=True)
class Supervisor:
    """Runs drafters (or colocated processes) to their end, with target workers that may be restarted.

    A process that makes no progress for `stall_seconds` is killed, then treated as one that died.

    `on_report(name, kind, payload)` sees every report; `close_broker(reason, lost)` tells the transport's ends why it closes,
    and which peer is lost, if one is. Raises `WorkerFailed` when a drafter dies or a target worker dies too
    often, `Interrupted` when SIGINT or SIGTERM ended the run in order.
    """

    drafters: Sequence[Child]
    starter: WorkerStarter | None
    num_targets: int
    max_restarts: int
    ready_seconds: float
    stall_seconds: float
    on_report: Callable[[str, str, Any], None]
    close_broker: Callable[[str, str | None], None]
    targets: list[Child] = field(default_factory=list)
    restarts: list[int] = field(default_factory=list)
    signals: list[int] = field(default_factory=list)
    asked_to_stop: bool = False
    watch: HangWatch = field(init=False)

    def __post_init__(self) -> None:
        self.watch = HangWatch(stall_seconds=self.stall_seconds)

    def run(self) -> dict[str, Any]:
        """Run to the end and return what drafter rank 0 reported as its result."""
        with _SignalsTo(self.signals.append):
            try:
                for index in range(self.num_targets):
                    self._start_target(index, attempt=0)
                while not all(child.done for child in self.drafters):
                    self._look()
                self._finish()
            except BaseException as error:
                self.close_broker(str(error), None)
                at_once = len(self.signals) > 1
                end_all([*self.drafters, *self.targets], grace_seconds=0 if at_once else GRACE_SECONDS / 3)
                raise
        if self.signals and self.drafters[0].result.get("status") != "finished":
            raise self._interrupted(f"ended in order after {signal.Signals(self.signals[0]).name}; continue with --resume")
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
        self._listen(children)
        self._check_ready(children)
        self._check_hangs()
        for child in children:
            if not child.done and not child.alive:
                self._ended(child)

    def _listen(self, children: Sequence[Child]) -> None:
        """Wait for reports, ends and signals, a little while at most, and take what comes."""
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
        self._heed_signals()

    def _hear(self, child: Child) -> None:
        while (report := _next_report(child)) is not None:
            self._take(child, kind=report[0], payload=report[1])

    def _take(self, child: Child, *, kind: str, payload: Any) -> None:
        if kind == PULSE:
            self.watch.hear(child.name, payload)
            return
        if kind == "ready":
            child.ready = True
        elif kind == "done":
            child.done, child.result = True, payload
        elif kind == "failed":
            child.failure = f"{payload['kind']}: {payload['message']}"
            child.lost_peer = payload["kind"] == PeerDied.__name__
        self.on_report(child.name, kind, payload)

    def _check_ready(self, children: Sequence[Child]) -> None:
        now = time.monotonic()
        late = [child for child in children if not child.ready and now - child.started_at > self.ready_seconds]
        if late:
            raise WorkerFailed(
                f"{', '.join(child.name for child in late)} did not become ready within placement.ready_seconds = "
                f"{self.ready_seconds:.0f}; logs: {', '.join(str(child.log) for child in late)}"
            )

    def _check_hangs(self) -> None:
        """End processes that hang: nothing but their end makes the kernel and the GPU let go of them."""
        self.watch.look()
        working = {child.name: child for child in self.drafters if child.ready and not child.done and child.alive}
        stuck = {name: why for name in working if (why := self.watch.stuck(name)) is not None}
        for name, why in stuck.items():
            working[name].kill_hung(f"killed, since it was {why}")
        if stuck:
            told = "; ".join(f"{name} hangs: {why}; {working[name].where_it_was}" for name, why in stuck.items())
            raise WorkerFailed(f"{told}; continue with --resume")
        for index, child in enumerate(self.targets):
            assert self.starter is not None
            if child.done or not child.alive:
                continue
            if child.killed_at is None:
                why = self.watch.silent(self.starter.silence(index)) if child.ready else None
                if why is not None:
                    log.warning("%s hangs: %s", child.name, why)
                    child.kill_hung(f"killed, since {why}")
            elif time.monotonic() - child.killed_at > STUCK_SECONDS:
                self._give_up(child, f"{child.name} does not even end when killed, so it is stuck in a driver: {child.failure}")

    def _ended(self, child: Child) -> None:
        """A child whose process is gone: hear what it still said, then restart it or end the run."""
        self._hear(child)
        if child.done:
            return
        if child not in self.targets:
            raise WorkerFailed(self._cause_of(child).describe_end())
        index = self.targets.index(child)
        assert self.starter is not None
        self.starter.detach(index, child.describe_end())
        self.restarts[index] += 1
        if child.failure is not None and child.process.returncode == UsageError.exit_code:
            self._give_up(child, f"it would fail again in the same way: {child.describe_end()}")
        if self.restarts[index] > self.max_restarts:
            self._give_up(
                child,
                f"target worker {index} ended {self.restarts[index]} times, more than placement.max_restarts = "
                f"{self.max_restarts}; last: {child.describe_end()}",
            )
        log.warning("restarting %s", child.describe_end())
        child.control.close()
        self.on_report(child.name, "restart", {"attempt": self.restarts[index]})
        self._start_target(index, attempt=self.restarts[index])

    def _cause_of(self, child: Child) -> Child:
        """The drafter to blame for the end of one: itself, or another that ends too and that it lost."""
        deadline = time.monotonic() + CAUSE_SECONDS
        while child.lost_peer and time.monotonic() < deadline:
            ended = [other for other in self.drafters if not other.done and not other.alive]
            for other in ended:
                self._hear(other)
            causes = [other for other in ended if not other.done and not other.lost_peer]
            if causes:
                return causes[0]
            self._listen([other for other in self.drafters if not other.done and other.alive])
        return child

    def _give_up(self, child: Child, reason: str) -> NoReturn:
        """End the run for the sake of a target worker; who waits for its packs hears its name."""
        self.close_broker(reason, child.name)
        raise WorkerFailed(reason)

    def _finish(self) -> None:
        """All drafters are done, so that the broker has no more for the targets: hear what they say last, then end all."""
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline:
            working = [child for child in self.targets if not child.done and child.alive]
            if not working:
                break
            self._listen(working)
        for child in self.targets:
            self._hear(child)
        self.close_broker("the run is over", None)
        end_all([*self.drafters, *self.targets], grace_seconds=GRACE_SECONDS)

    def _heed_signals(self) -> None:
        if len(self.signals) > 1:
            raise self._interrupted("asked a second time to stop: ended at once, steps since the last checkpoint are lost")
        if self.signals and not any(child.ready for child in self.drafters):
            raise self._interrupted("stopped while it loaded: no step was trained since the last checkpoint")
        if self.signals and not self.asked_to_stop:
            self.asked_to_stop = True
            log.warning("%s: finishing the step and writing a checkpoint", signal.Signals(self.signals[0]).name)
            for child in self.drafters:
                child.ask_to_stop()

    def _interrupted(self, message: str) -> Interrupted:
        interrupted = Interrupted(message)
        interrupted.exit_code = 128 + self.signals[0]
        return interrupted


def _next_report(child: Child) -> tuple[str, Any] | None:
    """What the child has said; none if nothing, or no more. A child that hangs up is about to end."""
    try:
        if not child.control.closed and child.control.poll():
            kind, payload = child.control.recv()
            return kind, payload
    except (EOFError, OSError):
        with suppress(subprocess.TimeoutExpired):
            child.process.wait(timeout=GRACE_SECONDS)
    return None


def stopped_outside() -> Interrupted:
    """What SIGTERM raises in a start outside `Supervisor.run`, which has its own way with signals."""
    interrupted = Interrupted("stopped by SIGTERM before training began or after it ended")
    interrupted.exit_code = 128 + signal.SIGTERM
    return interrupted


class _SignalsTo:
    """While entered, SIGINT and SIGTERM call `handler(number)`, which must not raise. Does nothing outside the main thread."""

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
