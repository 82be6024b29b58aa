"""Child processes, started and stopped by their own handles, never by name.

A child is a fresh interpreter (never a fork) that runs `slipstream.launch.child` with a JSON job. It is given inherited file
descriptors: its control connection and whatever its role needs. It runs in its own session, so that a Ctrl-C in the terminal
reaches the supervisor alone, which then ends the run in order.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from slipstream.device.threads import thread_environment
from slipstream.transport.connections import connection_pair

TAIL_BYTES = 4000
TERMINATE_SECONDS = 5.0
KILL_SECONDS = 10.0
STACKS_SECONDS = 0.5
"""What a hung child gets to write down where its threads are."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Child:
    """A running child: its name, its handle, our end of its control connection, and its log file."""

    name: str
    process: subprocess.Popen[bytes]
    control: Connection
    log: Path
    started_at: float
    ready: bool = False
    done: bool = False
    failure: str | None = None
    lost_peer: bool = False
    """Whether it failed for want of another process, which then is the cause."""
    killed_at: float | None = None
    """When it was killed because it hung."""
    result: dict[str, Any] = field(default_factory=dict)

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self.process.poll() is None

    def describe_end(self) -> str:
        """How the process ended, in words, with the end of its log."""
        code = self.process.poll()
        how = "still runs" if code is None else f"exit code {code}"
        if code is not None and code < 0:
            how = f"signal {signal.Signals(-code).name}"
        text = self.failure or log_tail(self.log)
        return f"{self.name} ({how}), log {self.log}" + (f":\n{text}" if text else "")

    def kill_hung(self, why: str) -> None:
        """Have a child that does nothing say where it is, in its log, and kill it. `why` is told as its failure."""
        self.process.send_signal(signal.SIGUSR1)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=STACKS_SECONDS)
        self.process.kill()
        self.killed_at = time.monotonic()
        self.failure = f"{why}; {self.where_it_was}"

    @property
    def where_it_was(self) -> str:
        """Where to read what it was doing when it hung."""
        return f"if it could still say where its threads were, that is at the end of {self.log}"

    def ask_to_stop(self) -> None:
        """Ask the child to finish its step and end. A child that is gone is left to the caller's next look."""
        try:
            self.control.send(("stop",))
        except (BrokenPipeError, OSError):
            return


def start_child(
    *,
    name: str,
    job: Mapping[str, Any],
    descriptors: Mapping[str, int],
    log: Path,
    threads: int,
    environment: Mapping[str, str] | None = None,
) -> Child:
    """Start a child. `descriptors` are inherited under the same numbers and named in the job.

    The child reads its job from standard input; its output goes to `log`, appended. `threads` sets every CPU pool of the
    child, before any library starts one.
    """
    ours, theirs = connection_pair()
    passed = {**descriptors, "control": theirs.fileno()}
    environ = {**thread_environment(threads, base=os.environ), "HF_HUB_OFFLINE": "1", **(environment or {})}
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "slipstream.launch.child"],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=tuple(sorted(set(passed.values()))),
            env=environ,
            start_new_session=True,
        )
    theirs.close()
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps({**job, "name": name, "threads": threads, "descriptors": passed}).encode())
        process.stdin.close()
    except BrokenPipeError:
        process.wait()
    return Child(name=name, process=process, control=ours, log=log, started_at=time.monotonic())


def log_tail(log: Path) -> str:
    """The end of a log file, at most `TAIL_BYTES`."""
    if not log.is_file():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL_BYTES))
        return file.read().decode(errors="replace").strip()


def end_all(children: Sequence[Child], *, grace_seconds: float) -> None:
    """Ask all to stop and wait for them together; terminate who is still there, then kill, each by its own handle."""
    for child in children:
        if child.alive:
            child.ask_to_stop()
    _wait_for(children, seconds=grace_seconds)
    for child in children:
        if child.alive:
            child.process.terminate()
    _wait_for(children, seconds=TERMINATE_SECONDS)
    for child in children:
        if child.alive:
            log.warning("%s, process %d, does not end when asked to: killed", child.name, child.process.pid)
            child.process.kill()
    _wait_for(children, seconds=KILL_SECONDS)
    for child in children:
        if child.alive:
            log.error("%s, process %d, is stuck in the kernel and is left behind", child.name, child.process.pid)
        child.control.close()


def _wait_for(children: Sequence[Child], *, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for child in children:
        with suppress(subprocess.TimeoutExpired):
            child.process.wait(timeout=max(0.0, deadline - time.monotonic()))
