"""Documents into packs of T context tokens: oldest first, then whatever fills the rest best.

Pure Python over a sorted window, because each choice depends on the last; about 3 seconds for a million documents.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass

import numpy as np

from slipstream.plan.keyed import Domain, keyed_permutation
from slipstream.records import Int64Array

_POSITION_BITS = 40
_POSITION_MASK = (1 << _POSITION_BITS) - 1


@dataclass(frozen=True, slots=True, eq=False)
class PackedDocuments:
    """Documents by pack. `document_ids` int64 `[E]` in row order; pack p holds `starts[p] … starts[p + 1]`, int64 `[P + 1]`."""

    document_ids: Int64Array
    starts: Int64Array

    @property
    def num_packs(self) -> int:
        """P."""
        return len(self.starts) - 1

    def pack_of_entry(self) -> Int64Array:
        """Pack int64 `[E]` of each entry."""
        return np.repeat(np.arange(self.num_packs, dtype=np.int64), np.diff(self.starts))


def pack_epoch(
    *, document_ids: Int64Array, num_tokens: Int64Array, capacity_tokens: int, window: int, seed: int, epoch: int
) -> PackedDocuments:
    """Pack one epoch: permute by (seed, epoch), then `pack_in_order`. `num_tokens` int64 like `document_ids`."""
    order = keyed_permutation(seed=seed, domain=Domain.DOCUMENT_ORDER, number=epoch, size=len(document_ids))
    packed = pack_in_order(num_tokens=num_tokens[order], capacity_tokens=capacity_tokens, window=window)
    return PackedDocuments(document_ids=document_ids[order[packed.document_ids]], starts=packed.starts)


def pack_in_order(*, num_tokens: Int64Array, capacity_tokens: int, window: int) -> PackedDocuments:
    """Pack documents that come in this order; returns their positions in it.

    A window of `window` documents is kept filled. A pack starts with the oldest document in it and then takes, as long
    as one fits, the longest that does (the oldest of equals). No document is longer than `capacity_tokens`.
    """
    count = len(num_tokens)
    assert count == 0 or int(num_tokens.max()) <= capacity_tokens
    keys = ((num_tokens << _POSITION_BITS) | (_POSITION_MASK - np.arange(count, dtype=np.int64))).tolist()
    waiting = sorted(keys[:window])
    entering = len(waiting)
    taken = bytearray(count)
    row: list[int] = []
    starts = [0]
    oldest = 0
    while True:
        while oldest < count and taken[oldest]:
            oldest += 1
        if oldest == count:
            break
        chosen = bisect_left(waiting, keys[oldest])
        room = capacity_tokens
        while chosen >= 0:
            key = waiting.pop(chosen)
            position = _POSITION_MASK - (key & _POSITION_MASK)
            taken[position] = 1
            row.append(position)
            room -= key >> _POSITION_BITS
            if entering < count:
                insort(waiting, keys[entering])
                entering += 1
            chosen = bisect_right(waiting, (room << _POSITION_BITS) | _POSITION_MASK) - 1
        starts.append(len(row))
    return PackedDocuments(document_ids=np.array(row, dtype=np.int64), starts=np.array(starts, dtype=np.int64))
