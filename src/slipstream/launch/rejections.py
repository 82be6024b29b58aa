"""Packs of hidden states whose seal was refused, told in a line of metrics as they come. Torch-free; waits for nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from slipstream.transport.ends import SourceStats

KIND = "rejected_seals"
"""Kind of the line."""


class Rejections:
    """Looks at what a source counted, and hands a line to `put` when refusals came since it looked last.

    `step()` is the plan's step that is under way. A line names the worker, how many were refused and the packs, each once:
    of very many the newest.
    """

    def __init__(
        self,
        *,
        worker: str,
        stats: Callable[[], SourceStats],
        step: Callable[[], int],
        put: Callable[[Mapping[str, object]], None],
    ) -> None:
        self._worker, self._stats, self._step, self._put = worker, stats, step, put
        self._seen = 0

    def look(self) -> None:
        """After each take."""
        stats = self._stats()
        new = stats.seals_rejected - self._seen
        if not new:
            return
        self._seen = stats.seals_rejected
        packs = sorted(set(stats.rejected_packs[-new:]))
        self._put({"kind": KIND, "step": self._step(), "worker": self._worker, "rejected": new, "packs": packs})
