"""Writes checkpoints from a thread, from a copy of the state, while training goes on. Rank 0 only.

Waits for: the checkpoint before, if the disk is still busy with it. Unblocked by: the disk.
"""

from __future__ import annotations

import platform
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import safetensors
import torch

import slipstream
from slipstream.observe import Account
from slipstream.trainer.checkpoint import Checkpoint, CheckpointIdentity, keep_checkpoints, write_checkpoint


class CheckpointWriter:
    """One checkpoint at a time in the background. What goes wrong there is raised by the next call of any method.

    `account`, that of the thread that saves, is told how long each took to write.
    """

    def __init__(self, *, folder: Path, identity: CheckpointIdentity, keep: int, account: Account | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in (*folder.glob(".step-*.writing"), *folder.glob(".step-*.replaced")):
            shutil.rmtree(leftover)  # of a process that was killed while it wrote: never became a checkpoint
        self._folder = folder
        self._identity = identity
        self._keep = keep
        self._account = account or Account("checkpoints")
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def save(self, checkpoint: Checkpoint | Callable[[], Checkpoint]) -> None:
        """Start to write; waits only for the one before. Raises what went wrong with that, usually `CheckpointError`.

        A callable is called by the writing thread, and may wait there for the checkpoint to arrive from a GPU.
        """
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(checkpoint,), name="checkpoint", daemon=False)
        self._thread.start()

    def check(self) -> None:
        """Raise what went wrong in the background, if anything did. Waits for nothing."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def wait(self) -> None:
        """Wait until nothing is being written. Raises what went wrong."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def _run(self, checkpoint: Checkpoint | Callable[[], Checkpoint]) -> None:
        self._error = _caught(lambda: self._write(checkpoint))

    def _write(self, checkpoint: Checkpoint | Callable[[], Checkpoint]) -> None:
        whole = checkpoint if isinstance(checkpoint, Checkpoint) else checkpoint()
        with self._account.aside("writer", "write", step=whole.cursor.step):
            write_checkpoint(whole, folder=self._folder, identity=self._identity, versions=versions())
            keep_checkpoints(self._folder, keep=self._keep)


def versions() -> Mapping[str, str]:
    """Versions that a checkpoint records."""
    return {
        "slipstream": slipstream.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "safetensors": safetensors.__version__,
    }


def _caught(action: Callable[[], None]) -> Exception | None:
    try:
        action()
    except Exception as error:  # carried to the loop's thread, where it is raised
        return error
    return None
