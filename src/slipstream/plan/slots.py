"""Which slot of its column a pack lies in, as a compiler gives registers to values."""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np

from slipstream.records import Int32Array, Int64Array


def hold_from(first_step: Int64Array, *, ahead_packs: int) -> Int64Array:
    """The step, int64 `[m]`, from which on a pack's slot is its own: the first step of the pack `ahead_packs` before it.

    `first_step` int64 `[m]` ascends over one column. The first `ahead_packs` packs hold theirs before the run, from -1 on.
    """
    return np.concatenate([np.full(min(ahead_packs, len(first_step)), -1, dtype=np.int64), first_step])[: len(first_step)]


def colour_slots(*, first_step: Int64Array, last_step: Int64Array, ahead_packs: int) -> Int32Array:
    """Slot int32 `[m]` of each pack of a column, with as few slots as intervals ever overlap.

    A slot is held through steps `hold_from … last_step`, both included, so it changes hands only after its pack's last
    use has ended. A target that produces packs by first step and waits for free slots cannot deadlock: what must end
    before pack i may be written are uses at steps before i's own first step, which only need packs before i.
    """
    held = hold_from(first_step, ahead_packs=ahead_packs).tolist()
    busy: list[tuple[int, int]] = []
    free: list[int] = []
    slots = np.empty(len(held), dtype=np.int32)
    opened = 0
    for pack, (begin, end) in enumerate(zip(held, last_step.tolist(), strict=True)):
        while busy and busy[0][0] < begin:
            heappush(free, heappop(busy)[1])
        if free:
            slot = heappop(free)
        else:
            slot, opened = opened, opened + 1
        slots[pack] = slot
        heappush(busy, (end, slot))
    return slots
