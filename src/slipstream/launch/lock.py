"""One start of a run at a time: a lock in the run folder, held by the supervisor and by every child it starts.

The kernel lets go of it when the last of them ends, however it ends, so that nothing stale is ever left behind.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
from types import TracebackType

from slipstream.errors import PreflightError
from slipstream.runfolder import RunFolder

LOCK_FILE = "run.lock"


class RunLock:
    """While entered, no other process can start or resume the run. Raises `PreflightError` naming the process that does."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self.fd = -1

    def __enter__(self) -> RunLock:
        self.fd = os.open(self._folder.root / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            refusal = self._refusal()
            os.close(self.fd)
            raise refusal from error
        os.ftruncate(self.fd, 0)
        os.pwrite(self.fd, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        os.close(self.fd)

    def _refusal(self) -> PreflightError:
        try:
            held = json.loads(os.pread(self.fd, 4096, 0))
            pid, host = int(held["pid"]), str(held["host"])
        except (ValueError, KeyError, TypeError):
            pid, host = 0, socket.gethostname()
        where = "" if host == socket.gethostname() else f" on {host}"
        rule, hint = f"process {pid}{where} is training it", "wait for it, or end it with Ctrl-C or SIGTERM and resume"
        if pid and not where and not os.path.exists(f"/proc/{pid}"):
            rule = f"its supervisor, process {pid}, is gone, its workers are still ending"
            hint = "they end by themselves within half a minute"
        return PreflightError(key="name", value=self._folder.root.name, rule=rule, hint=hint)
