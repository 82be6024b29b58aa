"""A run in the background: the same command in a session of its own, its output in the run folder.

Waits for: the new process to hold the run's lock, or to end. It outlives the terminal it was started from.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence

from slipstream.errors import WorkerFailed
from slipstream.launch.handle import RunHandle, read_handle
from slipstream.launch.processes import log_tail
from slipstream.runfolder import RunFolder

START_SECONDS = 120.0
POLL_SECONDS = 0.1
LOG_FILE = "supervisor.log"


def start_detached(arguments: Sequence[str], *, folder: RunFolder) -> RunHandle:
    """Run `slipstream ARGUMENTS…` detached and return its handle once it supervises the run in `folder`.

    Raises `WorkerFailed` with the end of its log when it ends before that.
    """
    folder.logs.mkdir(parents=True, exist_ok=True)
    log = folder.logs / LOG_FILE
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "slipstream.cli.main", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        handle = read_handle(folder)
        if handle is not None and handle.pid == process.pid:
            return handle
        if process.poll() is not None:
            raise WorkerFailed(f"it ended with {process.returncode} before it began; {log}:\n{log_tail(log)}")
        time.sleep(POLL_SECONDS)
    process.terminate()
    raise WorkerFailed(f"it did not begin within {START_SECONDS:.0f} s and was terminated; log {log}")
