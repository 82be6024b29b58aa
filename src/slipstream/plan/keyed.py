"""Random bits that depend on their key alone, so that nothing drawn depends on who drew before.

Only the raw words of Philox are used, which NumPy guarantees never to change; the streams of `Generator` methods carry
no such promise, and a run must resume under another NumPy.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from slipstream.records import Int64Array


class Domain(IntEnum):
    """What is drawn. Two domains never share a stream, whatever their numbers."""

    DOCUMENT_ORDER = 1
    ANCHORS = 2


def keyed_permutation(*, seed: int, domain: Domain, number: int, size: int) -> Int64Array:
    """The permutation int64 `[size]` of `0 … size - 1` that belongs to (seed, domain, number).

    `seed` and `number` are below 2**64. Words of 64 bits are sorted; equal ones, if ever, keep their order.
    """
    words = np.random.Philox(key=_key(seed=seed, number=number), counter=[0, 0, 0, int(domain)]).random_raw(size)
    return np.argsort(words, kind="stable").astype(np.int64, copy=False)


def _key(*, seed: int, number: int) -> np.typing.NDArray[np.uint64]:
    return np.array([seed, number], dtype=np.uint64)
