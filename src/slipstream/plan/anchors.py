"""Where the blocks of a document may start, how far each is supervised, and which of them a use takes.

Shape letters: L tokens of a document, or of several in a row · A valid anchors · B block size · M documents of a row.
"""

from __future__ import annotations

import numpy as np

from slipstream.plan.keyed import Domain, keyed_permutations
from slipstream.records import BoolArray, Int32Array, Int64Array

ONE_DOCUMENT: Int32Array = np.zeros(1, dtype=np.int32)
"""Where documents start in a row that is one document."""


def valid_anchors(loss_mask: BoolArray, *, starts: Int32Array = ONE_DOCUMENT) -> Int32Array:
    """Valid anchors int32 `[A]` of a mask bool `[L]`, ascending: `a` with `mask[a] and mask[a + 1]`, both of one document.

    `starts` are the first tokens of the documents of a row, and the end of the last.
    """
    valid = np.zeros(len(loss_mask), dtype=np.bool_)
    np.logical_and(loss_mask[:-1], loss_mask[1:], out=valid[:-1])
    valid[starts - 1] = False  # of a start at 0 that is the row's last token, which is no anchor either
    anchors: Int32Array = np.flatnonzero(valid).astype(np.int32)
    return anchors


def run_lengths(loss_mask: BoolArray, *, anchors: Int32Array, block_size: int, starts: Int32Array = ONE_DOCUMENT) -> Int32Array:
    """How many slots after each anchor are supervised, int32 like `anchors`: the unbroken run of mask from `a + 1`.

    It ends at the first hole, at the end of the document (`starts` as in `valid_anchors`), or after `block_size - 1` slots.
    """
    is_end = np.ones(len(loss_mask) + 1, dtype=np.bool_)
    np.logical_not(loss_mask, out=is_end[:-1])
    is_end[starts] = True
    ends = np.flatnonzero(is_end)
    ends = ends[np.searchsorted(ends, anchors + 1)]
    runs: Int32Array = np.minimum(ends - anchors - 1, block_size - 1).astype(np.int32)
    return runs


def count_supervised(runs: Int32Array, *, block_size: int) -> Int64Array:
    """Anchors that supervise slot k, int64 `[B]`, from run lengths; entry 0 is 0, since the anchor itself is given."""
    ending = np.bincount(runs, minlength=block_size)[:block_size]
    supervised = np.cumsum(ending[::-1])[::-1].astype(np.int64)
    supervised[0] = 0
    return supervised


def draw_segments(
    *, seed: int, document_ids: Int64Array, num_valid: Int64Array, offsets: Int64Array, shares: Int64Array
) -> Int64Array:
    """Which of their valid anchors one use takes of documents in a row, all int64 `[M]`: indices int64, ascending.

    Of each they are the `share` entries from `offset`, cyclically, of the one permutation that belongs to (seed, document).
    Uses whose segments follow one another are therefore disjoint until every anchor was used once. An index counts the
    anchors of the documents before its own as well.
    """
    assert ((shares >= 0) & (shares <= num_valid)).all(), (shares, num_valid)
    numbers = zip(document_ids.tolist(), num_valid.tolist(), strict=True)
    orders = keyed_permutations(seed=seed, domain=Domain.ANCHORS, numbers=numbers)
    taken = [np.zeros(0, dtype=np.int64)]
    for order, offset, share in zip(orders, offsets.tolist(), shares.tolist(), strict=True):
        first = offset % max(1, len(order))
        taken += [order[first : first + share], order[: max(0, first + share - len(order))]]
    return np.sort(np.concatenate(taken) + np.repeat(np.cumsum(num_valid) - num_valid, shares))
