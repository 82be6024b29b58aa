"""Where the blocks of a document may start, how far each is supervised, and which of them a use takes.

Shape letters: L tokens of a document · A its valid anchors · B block size.
"""

from __future__ import annotations

import numpy as np

from slipstream.plan.keyed import Domain, keyed_permutation
from slipstream.records import BoolArray, Int32Array, Int64Array


def valid_anchors(loss_mask: BoolArray) -> Int32Array:
    """Valid anchors int32 `[A]` of a document's mask bool `[L]`, ascending: `a` with `mask[a] and mask[a + 1]`."""
    return np.flatnonzero(loss_mask[:-1] & loss_mask[1:]).astype(np.int32)


def run_lengths(loss_mask: BoolArray, *, anchors: Int32Array, block_size: int) -> Int32Array:
    """How many slots after each anchor are supervised, int32 like `anchors`: the unbroken run of mask from `a + 1`.

    It ends at the first hole, at the end of the document, or after `block_size - 1` slots.
    """
    holes = np.append(np.flatnonzero(~loss_mask), len(loss_mask))
    ends = holes[np.searchsorted(holes, anchors + 1)]
    return np.minimum(ends - anchors - 1, block_size - 1).astype(np.int32)


def count_supervised(runs: Int32Array, *, block_size: int) -> Int64Array:
    """Anchors that supervise slot k, int64 `[B]`, from run lengths; entry 0 is 0, since the anchor itself is given."""
    ending = np.bincount(runs, minlength=block_size)[:block_size]
    supervised = np.cumsum(ending[::-1])[::-1].astype(np.int64)
    supervised[0] = 0
    return supervised


def draw_segment(*, seed: int, document_id: int, num_valid: int, offset: int, share: int) -> Int64Array:
    """Which of a document's valid anchors one use takes: indices int64 `[share]` into them, ascending.

    They are the `share` entries from `offset`, cyclically, of the one permutation that belongs to (seed, document).
    Uses whose segments follow one another are therefore disjoint until every anchor was used once.
    """
    assert 0 <= share <= num_valid, (share, num_valid)
    order = keyed_permutation(seed=seed, domain=Domain.ANCHORS, number=document_id, size=num_valid)
    return np.sort(order[(offset + np.arange(share)) % num_valid]) if share else order[:0]
