"""Which packs a consumer will take, in which order: what lets it copy ahead, past the end of an optimizer step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PlannedUse:
    """A pack is taken; `is_last` when it is for the last time, so that nothing needs its slot afterwards."""

    pack_id: int
    is_last: bool


def without_repeats(uses: Iterable[PlannedUse]) -> Iterator[PlannedUse]:
    """Uses of one pack that follow each other directly are one: it is still there."""
    before: PlannedUse | None = None
    for use in uses:
        if before is not None and before.pack_id != use.pack_id:
            yield before
        before = use
    if before is not None:
        yield before
