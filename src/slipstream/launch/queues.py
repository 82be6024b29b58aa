"""How many packs wait between targets and drafters, written about once a second while a run lasts. Torch-free.

Waits for: nothing. A disk that fails is reported once and the run goes on.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from slipstream.plan import Schedule
from slipstream.transport.ledger import QueueDepth

log = logging.getLogger(__name__)


class QueueLog:
    """Appends a line a rank about once a second to a file of JSON lines, from a thread of its own.

    `depths()` are the queues, `trained()` is the last step that was heard of, -1 before the first. Of the packs in slots,
    `ready` were not trained on yet, and `held` are kept for another use (`plan.replays`). Raises `OSError` when the file
    cannot be opened.
    """

    def __init__(
        self,
        *,
        path: Path,
        depths: Callable[[], Mapping[int, QueueDepth]],
        trained: Callable[[], int],
        schedule: Schedule,
        start_step: int,
        slot_bytes: int,
        every_seconds: float = 1.0,
    ) -> None:
        self._depths, self._trained, self._schedule = depths, trained, schedule
        self._start_step, self._slot_bytes, self._every_seconds = start_step, slot_bytes, every_seconds
        self._file = path.open("a", encoding="utf-8")
        self._closing = threading.Event()
        self._failed = False
        self._thread = threading.Thread(target=self._run, name="queue-depths", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write a last line and close the file. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._thread.join()
        self._write()
        try:
            self._file.close()
        except OSError:
            self._report()

    def __enter__(self) -> QueueLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        while not self._closing.wait(self._every_seconds):
            self._write()

    def _write(self) -> None:
        try:
            self._file.write("".join(json.dumps(line) + "\n" for line in self._lines()))
            self._file.flush()
        except OSError:
            self._report()

    def _lines(self) -> list[dict[str, float | int]]:
        now, trained = time.time(), self._trained()
        lines: list[dict[str, float | int]] = []
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

    def _report(self) -> None:
        if not self._failed:
            self._failed = True
            log.warning("queue depths cannot be written; the run goes on without them", exc_info=True)
