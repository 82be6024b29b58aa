"""Random bits that depend on their key alone, so that nothing drawn depends on who drew before.

Only the raw words of Philox are used, which NumPy guarantees never to change; the streams of `Generator` methods carry
no such promise, and a run must resume under another NumPy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
    return next(keyed_permutations(seed=seed, domain=domain, numbers=[(number, size)]))


def keyed_permutations(*, seed: int, domain: Domain, numbers: Iterable[tuple[int, int]]) -> Iterator[Int64Array]:
    """`keyed_permutation` for each (number, size), at a third of the time: one generator is set to one key after another."""
    generator = np.random.Philox(key=np.array([seed, 0], dtype=np.uint64), counter=[0, 0, 0, int(domain)])
    state = generator.state
    for number, size in numbers:
        state["state"]["key"][1] = number
        generator.state = state
        yield np.argsort(generator.random_raw(size), kind="stable").astype(np.int64, copy=False)
