"""How many packs wait between targets and drafters, sampled about once a second while a run lasts. Torch-free.

Where target and drafter are processes, the supervisor asks its broker; where they are one, that process asks itself and
reports. Waits for: nothing.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from slipstream.plan import Schedule
from slipstream.transport.ledger import QueueDepth

log = logging.getLogger(__name__)

Line = Mapping[str, float | int]


class QueueFile:
    """Lines of queues, appended to a file of JSON lines that is made with the first. A fault is reported once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None
        self._failed = False

    def write(self, lines: Sequence[Line]) -> None:
        """Append lines; never raises."""
        try:
            self._file = self._file or self._path.open("a", encoding="utf-8")
            self._file.write("".join(json.dumps(line) + "\n" for line in lines))
            self._file.flush()
        except OSError:
            self._report()

    def close(self) -> None:
        """Close the file. Idempotent."""
        try:
            if self._file is not None:
                self._file.close()
        except OSError:
            self._report()

    def _report(self) -> None:
        if not self._failed:
            self._failed = True
            log.warning("queue depths cannot be written; the run goes on without them", exc_info=True)


class QueueSampler:
    """Hands a line a rank to `put` about once a second, from a thread of its own, and once more at the end.

    `depths()` are the queues, `trained()` is the last step that was trained, -1 before the first. Of the packs in slots,
    `ready` were not trained on yet, and `held` are kept for another use (`plan.replays`).
    """

    def __init__(
        self,
        *,
        depths: Callable[[], Mapping[int, QueueDepth]],
        trained: Callable[[], int],
        schedule: Schedule,
        start_step: int,
        slot_bytes: int,
        put: Callable[[Sequence[Line]], None],
        every_seconds: float = 1.0,
    ) -> None:
        self._depths, self._trained, self._schedule, self._put = depths, trained, schedule, put
        self._start_step, self._slot_bytes, self._every_seconds = start_step, slot_bytes, every_seconds
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="queue-depths", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Sample for the last time. Idempotent."""
        if not self._closing.is_set():
            self._closing.set()
            self._thread.join()
            self._put(self._lines())

    def __enter__(self) -> QueueSampler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        while not self._closing.wait(self._every_seconds):
            self._put(self._lines())

    def _lines(self) -> list[Line]:
        now, trained = time.time(), self._trained()
        lines: list[Line] = []
        for rank, depth in sorted(self._depths().items()):
            ready = sum(self._is_new(pack_id, trained=trained) for pack_id in depth.ready)
            lines.append(
                {
                    "time": now,
                    "rank": rank,
                    "ready": ready,
                    "ready_bytes": ready * self._slot_bytes,
                    "held": len(depth.ready) - ready,
                    "issued": depth.issued,
                    "free": depth.free,
                    "slots": depth.slots,
                }
            )
        return lines

    def _is_new(self, pack_id: int, *, trained: int) -> bool:
        """Whether this start has not trained on a pack yet: one made again on resume counts until its first step is over."""
        return max(int(self._schedule.first_step[pack_id]), self._start_step) > trained
