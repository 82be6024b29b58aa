"""What a target worker compiles or allocates after its first packs: as `trainer.late_work` for the processes that train."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slipstream.trainer.late_work import WorkCounter

FIRST_PACKS = 3
"""Packs that warm-up lasts for: as many as are under way at once, so that each device slot was used."""

log = logging.getLogger(__name__)


class LateTarget:
    """Warns by name when a count of `work` grows after the first packs, and hands what grew to `put`. Waits for nothing."""

    def __init__(self, work: WorkCounter, *, put: Callable[[Mapping[str, object]], None]) -> None:
        self._work, self._put = work, put
        self._seen: Mapping[str, int] = {}
        self._packs = 0

    def look(self, pack_id: int) -> None:
        """After each pack."""
        self._packs += 1
        if self._packs < FIRST_PACKS:
            return
        now = dict(self._work.counts())
        grown = {name: count - self._seen[name] for name, count in now.items() if count > self._seen.get(name, count)}
        self._seen = now
        names = self._work.names()
        if grown:
            shown = ", ".join(f"{count} {name}" for name, count in grown.items())
            log.warning("work after warm-up, by pack %d: %s%s", pack_id, shown, f" ({'; '.join(names)})" if names else "")
            self._put({"pack": pack_id, **grown, "names": names})

    def close(self) -> None:
        """Look no more."""
        self._work.close()
