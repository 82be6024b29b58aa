"""Where a child process begins: reads its job, plays its role, reports over its control connection, ends.

Waits for: its job on standard input. Ends by itself when the supervisor is gone.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from slipstream.device.allocated import allocated_memory
from slipstream.device.numa import Binding, bind_process
from slipstream.errors import SlipstreamError
from slipstream.launch.hangs import pulse
from slipstream.launch.kernel_cache import tuned_kernels
from slipstream.observe import Account, WorkerFacts, open_account
from slipstream.runfolder import RunFolder
from slipstream.transport.connections import connection_from_fd

ORPHAN_SECONDS = 20.0
ORPHAN_EXIT = 75

log = logging.getLogger(__name__)


class Control:
    """A child's end of its control connection: reports go out from any thread, the wish to stop comes in."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._stop = threading.Event()
        threading.Thread(target=self._listen, name="control", daemon=True).start()

    def stopping(self) -> bool:
        """Whether the supervisor asked this child to end, or is gone."""
        return self._stop.is_set()

    def report(self, kind: str, payload: object) -> None:
        """Send one report: `ready`, `record`, `done`, `failed`. A supervisor that is gone does not fail the sender."""
        try:
            with self._lock:
                self._connection.send((kind, payload))
        except (BrokenPipeError, OSError):
            self._stop.set()

    def _listen(self) -> None:
        try:
            while self._connection.recv()[0] == "stop":
                self._stop.set()
        except (EOFError, OSError):
            self._stop.set()
            log.error("the supervisor is gone; ending within %.0f s", ORPHAN_SECONDS)
            threading.Event().wait(ORPHAN_SECONDS)
            os._exit(ORPHAN_EXIT)


def main() -> int:
    """Play one role. Exit code 0 when done, the error's own code when it failed."""
    job: dict[str, Any] = json.load(sys.stdin)
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {job['name']} %(levelname)s %(name)s: %(message)s", force=True)
    faulthandler.register(signal.SIGUSR1)  # to standard error, which is the log: where all threads are, also in C code
    descriptors: dict[str, int] = job["descriptors"]
    if "lock" in descriptors:  # held by being open, in this process and in no other that it may start
        os.set_inheritable(descriptors["lock"], False)
    _bind(job)
    control = Control(connection_from_fd(descriptors["control"]))
    tuned = tuned_kernels(os.environ)
    try:
        with _account(job) as account, _pulse(job, control, account):
            result = _role_of(job)(job, control, account)
    except SlipstreamError as error:
        log.error("%s", error)
        control.report("failed", {"kind": type(error).__name__, "message": str(error)})
        return error.exit_code
    except Exception as error:
        log.exception("unexpected")
        control.report("failed", {"kind": type(error).__name__, "message": traceback.format_exc(limit=-6)})
        return 1
    control.report("done", {**result, **_memory()})
    if job["gpu"] is not None:
        now = tuned_kernels(os.environ)
        log.info("kernels tuned since this process began: %d; found in the cache: %d", now - tuned, tuned)
    return 0


def _role_of(job: dict[str, Any]) -> Callable[[dict[str, Any], Control, Account], dict[str, Any]]:
    """Import what the role needs, and set it aside from garbage collection.

    None of it ever becomes garbage; to look through it again and again takes 40 % of a target's start and end on a CPU.
    """
    gc.disable()
    try:
        from slipstream.device.threads import set_threads
        from slipstream.launch.roles import role

        set_threads(job["threads"])
        return role(job["role"])
    finally:
        gc.enable()
        gc.freeze()


def _bind(job: dict[str, Any]) -> None:
    """Stay next to this process's GPU, before anything that lasts is touched."""
    binding = job.get("binding")
    if binding is not None:
        log.info("bound to %s", bind_process(Binding.of_job(binding)))
    elif job["gpu"] is not None:
        log.info("not bound to cores: sysfs names no NUMA node for GPU %d", job["gpu"])


def _memory() -> dict[str, Any]:
    """What the process took of its GPU at most."""
    found = allocated_memory()
    return {} if found is None else {"memory": found.as_dict()}


def _account(job: dict[str, Any]) -> AbstractContextManager[Account]:
    """Where this process's time goes, from here on: importing what a role needs is a part of it."""
    facts = WorkerFacts(worker=job["name"], role=job["role"], rank=job.get("rank", 0), gpu=job["gpu"])
    return open_account(RunFolder(Path(job["folder"])), facts, spans=job["recipe"]["observe"]["spans"])


def _pulse(job: dict[str, Any], control: Control, account: Account) -> AbstractContextManager[None]:
    """Signs of life of a process that trains, from here on."""
    if job["role"] not in ("drafter", "colocated"):
        return nullcontext()
    return pulse(control, account, stall_seconds=job["recipe"]["placement"]["stall_seconds"])


def _leave(code: int) -> NoReturn:
    """End the process. One that failed is not taken down in order: what it left open, a group of ranks above all, may wait
    for others, who wait for it.
    """
    if code != 0:
        logging.shutdown()
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    _leave(main())
