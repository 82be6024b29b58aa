"""Spans: every stretch of time that a worker spends in one state, and what its side threads and its GPU do meanwhile.

`add` costs a microsecond and never waits: a thread writes. What comes faster than it can write is dropped and counted.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

logger = logging.getLogger(__name__)

Role = Literal["target", "drafter", "colocated", "answers", "supervisor"]

LIMIT = 1 << 17
"""Spans that may wait for the writing thread."""


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """Who writes: the worker's name, its role, its rank in it, and its GPU's index among those of the run (none on a CPU)."""

    worker: str
    role: Role
    rank: int
    gpu: int | None


class SpanLog:
    """Spans of one worker process, appended to a file of JSON lines from a thread of its own.

    The first line of each start is a header with the worker's facts and `unix_ns`, the wall clock that all `start_us` count
    from; then arrays `[lane, state, start_us, micros, pack id or null, step or null]`. Times are of `clock`, in nanoseconds.
    Where spans were dropped, a line `{"kind": "dropped", "spans": how many}` is the last. `before_write` is called by the
    thread before each write. A disk that fails later is reported once and never stops the worker. Raises
    `OSError` when the file cannot be opened.
    """

    def __init__(
        self,
        facts: WorkerFacts,
        *,
        path: Path,
        every_seconds: float = 1.0,
        limit: int = LIMIT,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._worker, self._limit, self._every_seconds = facts.worker, limit, every_seconds
        self._waiting: deque[tuple[str, str, int, int, int | None, int | None]] = deque()
        self.dropped = 0
        """Spans that are in no file, because they came too fast or the disk failed."""
        self.before_write: Callable[[], None] | None = None
        self._failed = False
        torn = path.is_file() and not _ends_with_newline(path)
        self._file = path.open("a", encoding="utf-8")
        self._epoch = clock()
        header = {
            "kind": "start",
            "worker": facts.worker,
            "role": facts.role,
            "rank": facts.rank,
            "gpu": facts.gpu,
            "pid": os.getpid(),
            "unix_ns": time.time_ns(),
            "clock_ns": self._epoch,
        }
        self._write(("\n" if torn else "") + json.dumps(header) + "\n", count=0)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"spans-{facts.worker}", daemon=True)
        self._thread.start()

    def add(self, lane: str, state: str, start_ns: int, stop_ns: int, pack: int | None, step: int | None) -> None:
        """Take one span. From any thread."""
        if len(self._waiting) < self._limit:
            self._waiting.append((lane, state, start_ns, stop_ns, pack, step))
        else:
            self.dropped += 1

    def close(self) -> None:
        """Write what is left and close the file. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._thread.join()
        self._write_waiting()
        if self.dropped:
            self._write(json.dumps({"kind": "dropped", "spans": self.dropped}) + "\n", count=0)
        try:
            self._file.close()
        except OSError:
            self._report()
        if self.dropped:
            logger.warning("%d spans of %s are in no file", self.dropped, self._worker)

    def __enter__(self) -> SpanLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        while not self._closing.wait(self._every_seconds):
            self._write_waiting()

    def _write_waiting(self) -> None:
        if self.before_write is not None:
            self.before_write()
        count = len(self._waiting)
        lines = (_line(self._waiting.popleft(), epoch=self._epoch) for _ in range(count))
        self._write("".join(lines), count=count)

    def _write(self, text: str, *, count: int) -> None:
        if not text:
            return
        try:
            self._file.write(text)
            self._file.flush()
        except OSError:
            self.dropped += count
            self._report()

    def _report(self) -> None:
        if not self._failed:
            self._failed = True
            logger.warning("spans of %s cannot be written; training goes on without them", self._worker, exc_info=True)


def _line(span: tuple[str, str, int, int, int | None, int | None], *, epoch: int) -> str:
    """One line, or none for a span that ends in the microsecond in which it starts. Neighbours in time meet exactly."""
    lane, state, start, stop, pack, step = span
    start_us, stop_us = (start - epoch) // 1000, (stop - epoch) // 1000
    if start_us == stop_us:
        return ""
    pack_id, of_step = "null" if pack is None else pack, "null" if step is None else step
    return f'["{lane}","{state}",{start_us},{stop_us - start_us},{pack_id},{of_step}]\n'


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(0, os.SEEK_END)
        if file.tell() == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
