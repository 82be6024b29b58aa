"""The handle of a run: the process that supervises it, told from every other by its start time, and how to end it.

A run folder names its supervisor in `process.json`. A process id alone may belong to somebody else by now, so the handle also
holds when that process began, and on which boot of which host; a signal is sent through a pidfd that was opened before that
was compared.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from slipstream.errors import UsageError
from slipstream.launch.lock import LOCK_FILE
from slipstream.runfolder import RunFolder

POLL_SECONDS = 0.5
SECOND_SIGNAL_SECONDS = 40.0
"""After the second SIGTERM the supervisor ends its children at once: they have this long, then it is killed."""
LOCK_SECONDS = 40.0
"""Children of a supervisor that is gone end by themselves within half a minute."""

HowEnded = Literal["in order", "at once", "killed"]


@dataclass(frozen=True, slots=True)
class RunHandle:
    """Who supervises a run: `started_ticks` is field 22 of /proc/PID/stat, in clock ticks since boot `boot`."""

    pid: int
    started_ticks: int
    boot: str
    host: str
    started: float
    command: tuple[str, ...]
    detached: bool

    @classmethod
    def of_this_process(cls) -> RunHandle:
        """This process's own. It is detached when it leads a session and has no terminal to read from."""
        pid = os.getpid()
        ticks = _started_ticks(pid)
        assert ticks is not None, "this process runs"
        return cls(
            pid=pid,
            started_ticks=ticks,
            boot=_boot(),
            host=socket.gethostname(),
            started=time.time(),
            command=tuple(sys.argv),
            detached=os.getsid(0) == pid and not os.isatty(0),
        )

    def write(self, folder: RunFolder) -> None:
        """Put it into the run folder, whole or not at all."""
        temporary = folder.process.with_suffix(".part")
        temporary.write_text(json.dumps(asdict(self), indent=1))
        os.replace(temporary, folder.process)

    @property
    def is_here(self) -> bool:
        """Whether this is the host that it ran on."""
        return self.host == socket.gethostname()

    @property
    def is_alive(self) -> bool:
        """Whether that very process still runs. False on another host, where nobody can tell."""
        return self.is_here and self.boot == _boot() and _started_ticks(self.pid) == self.started_ticks


def read_handle(folder: RunFolder) -> RunHandle | None:
    """The handle of a run's newest start; none when it has not begun."""
    try:
        found: dict[str, Any] = json.loads(folder.process.read_text())
        return RunHandle(**{**found, "command": tuple(found["command"])})
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None


def find_run(text: str, *, runs: Path) -> RunFolder:
    """The run folder of a path or of a name in `runs`. Raises `UsageError` that names the runs there are."""
    for root in (Path(text), runs / text):
        folder = RunFolder(root)
        if folder.state.is_file() or folder.process.is_file():
            return folder
    known = ", ".join(folder.root.name for folder in all_runs(runs)) or "none"
    raise UsageError(key="RUN", value=text, rule="is no run folder", hint=f"runs in {runs}: {known}")


def all_runs(runs: Path) -> list[RunFolder]:
    """Every run in a folder of runs, the newest start first."""
    found = [RunFolder(root) for root in runs.iterdir() if (root / "state.json").is_file()] if runs.is_dir() else []
    return sorted(found, key=lambda folder: folder.state.stat().st_mtime, reverse=True)


def stop_run(folder: RunFolder, *, grace_seconds: float, say: Callable[[str], None] = lambda text: None) -> HowEnded:
    """End a run: SIGTERM finishes its step and saves; after `grace_seconds` a second one ends it at once; then SIGKILL.

    Each goes to the supervisor alone; its children are its own to end, and end by themselves when it is gone. Returns when
    all of them are gone. Raises `UsageError` when nothing runs here under this handle.
    """
    handle = read_handle(folder)
    name = folder.root.name
    if handle is None:
        raise UsageError(key="RUN", value=name, rule="was never started, or by a version that left no handle")
    if not handle.is_here:
        raise UsageError(key="RUN", value=name, rule=f"runs on {handle.host}", hint="stop it there")
    try:
        process = os.pidfd_open(handle.pid)
    except ProcessLookupError:
        process = -1
    try:
        if process < 0 or not handle.is_alive:
            raise UsageError(key="RUN", value=name, rule=f"does not run: process {handle.pid} is over")
        how = _end(process, grace_seconds=grace_seconds, say=say)
    finally:
        if process >= 0:
            os.close(process)
    _await_lock(folder, say=say)
    return how


def _end(process: int, *, grace_seconds: float, say: Callable[[str], None]) -> HowEnded:
    signal.pidfd_send_signal(process, signal.SIGTERM)
    if _gone(process, seconds=max(grace_seconds, POLL_SECONDS)):
        return "in order"
    say(f"not ended after {grace_seconds:.0f} s: asked a second time, steps since the last checkpoint are lost")
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(process, signal.SIGTERM)
    if _gone(process, seconds=SECOND_SIGNAL_SECONDS):
        return "at once"
    say("it does not answer: killed")
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(process, signal.SIGKILL)
    _gone(process, seconds=SECOND_SIGNAL_SECONDS)
    return "killed"


def _gone(process: int, *, seconds: float) -> bool:
    """Whether the process of that pidfd ends within the time: the kernel makes the descriptor readable then."""
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def _await_lock(folder: RunFolder, *, say: Callable[[str], None]) -> None:
    """Wait until no child holds the run's lock any more."""
    path = folder.root / LOCK_FILE
    if not path.is_file():
        return
    deadline = time.monotonic() + LOCK_SECONDS
    descriptor = os.open(path, os.O_RDWR)
    try:
        while time.monotonic() < deadline:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                time.sleep(POLL_SECONDS)
            else:
                return
        say("workers of it are still ending")
    finally:
        os.close(descriptor)


def _started_ticks(pid: int) -> int | None:
    """When a process began, or none when there is no such process, or only its corpse."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(")") + 2 :].split()
    return None if fields[0] in "ZX" else int(fields[19])


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
