"""The N anchor slots of each pack, shared out among its documents."""

from __future__ import annotations

import numpy as np

from slipstream.records import Int64Array


def share_out(*, counts: Int64Array, starts: Int64Array, budget: int, limit: int) -> Int64Array:
    """Anchors int64 `[E]` that each document gets, in proportion to its valid anchors `counts` int64 `[E]`.

    Pack p holds the entries `starts[p] … starts[p + 1]`. No document gets more than `counts` or `limit`; a pack gets
    exactly `budget` wherever those caps allow it, else the sum of its caps. Whole numbers by largest remainder, the
    first of equals. All packs at once.
    """
    num_packs = len(starts) - 1
    pack = np.repeat(np.arange(num_packs, dtype=np.int64), np.diff(starts))
    caps = np.minimum(counts, limit)
    capped = _sum(caps, pack=pack, num_packs=num_packs)[pack] <= budget
    # Water filling. A document above the level of its pack is capped, which raises the level for the rest: it only grows.
    while True:
        left = budget - _sum(np.where(capped, caps, 0), pack=pack, num_packs=num_packs)[pack]
        free = _sum(np.where(capped, 0, counts), pack=pack, num_packs=num_packs)[pack]
        above = ~capped & (counts * left > limit * free)
        if not above.any():
            break
        capped |= above
    free = np.maximum(free, 1)
    whole, remainder = np.divmod(np.where(capped, 0, counts * left), free)
    shares = np.where(capped, caps, whole)
    missing = np.where(capped, 0, left - _sum(whole, pack=pack, num_packs=num_packs)[pack])
    order = np.lexsort((-remainder, pack))
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order)) - starts[pack[order]]
    return (shares + (~capped & (rank < missing))).astype(np.int64)


def _sum(values: Int64Array, *, pack: Int64Array, num_packs: int) -> Int64Array:
    # Sums of whole numbers below 2**53 are exact in the float64 that bincount adds in.
    return np.bincount(pack, weights=values, minlength=num_packs).astype(np.int64)
