"""The plan that the pipeline bench trains by: it has no end, one column, and a few packs that come back under new ids.

T context tokens, N anchors, R uses of a pack.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from slipstream.config import DrafterShape
from slipstream.launch.bench.target import mixed_pack
from slipstream.records import Pack, Step, Use
from slipstream.target.isolation import pack_documents
from slipstream.transport.planned import PlannedUse


@dataclass(frozen=True, slots=True)
class PipelineWork:
    """What is trained on: `packs` new packs in each of `rounds` turns, each used `replays` times; `chunk_rows` of logits.

    Documents have `document_tokens` each, or where that is none, lengths as mixed as the target bench's.
    """

    pack_tokens: int = 8192
    document_tokens: int | None = None
    anchors: int = 512
    packs: int = 6
    rounds: int = 3
    replays: int = 1
    chunk_rows: int = 3328


def make_packs(work: PipelineWork, *, vocab_size: int, count: int) -> list[Pack]:
    """Some packs of random tokens; documents of one length fill theirs as far as whole ones go."""
    if work.document_tokens is None:
        return [mixed_pack(work.pack_tokens, vocab_size=vocab_size, seed=seed) for seed in range(count)]
    packs = []
    for seed in range(count):
        rng = np.random.default_rng(seed)
        documents = work.pack_tokens // work.document_tokens
        tokens = [rng.integers(0, vocab_size, work.document_tokens).astype(np.int32) for _ in range(documents)]
        packs.append(pack_documents(tokens, capacity_tokens=work.pack_tokens))
    return packs


class StandingPlan:
    """A plan without an end: one column; in R steps running one new pack, and the R - 1 before it once more each."""

    def __init__(self, *, packs: list[Pack], shape: DrafterShape, work: PipelineWork) -> None:
        self._packs = [replace(pack, loss_mask=np.arange(pack.capacity_tokens) < pack.num_tokens) for pack in packs]
        self._work, self._block_size = work, shape.block_size

    def pack_of_step(self, step: int) -> tuple[int, int]:
        """Pack id and use number."""
        group, use = divmod(step, self._work.replays)
        return group + self._work.replays - 1 - use, use

    def pack(self, pack_id: int) -> Pack:
        """One of a few packs, under that id."""
        return replace(self._packs[pack_id % len(self._packs)], pack_id=pack_id)

    def step(self, step: int) -> Step:
        """N anchors drawn for this step, every slot of each supervised."""
        pack_id, number = self.pack_of_step(step)
        pack = self.pack(pack_id)
        anchors = draw_anchors(pack, count=self._work.anchors, block_size=self._block_size, seed=step)
        supervised = np.full(self._block_size, len(anchors), dtype=np.int64)
        supervised[0] = 0
        use = Use(
            step=step, pack_id=pack_id, use_number=number, anchors=anchors,
            anchor_valid=np.ones(len(anchors), dtype=np.bool_), supervised_per_slot=supervised,
            is_last=number == self._work.replays - 1,
        )  # fmt: skip
        return Step(index=step, epoch=0, uses=(use,), supervised_per_slot=supervised)

    def uses(self) -> Iterator[PlannedUse]:
        """What the loop takes, in order."""
        step = 0
        while True:
            pack_id, number = self.pack_of_step(step)
            yield PlannedUse(pack_id=pack_id, is_last=number == self._work.replays - 1)
            step += 1


def draw_anchors(pack: Pack, *, count: int, block_size: int, seed: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Sorted anchors whose whole blocks lie in their documents."""
    length = np.diff(pack.starts)
    places = [
        np.arange(start + 1, start + tokens - block_size)
        for start, tokens in zip(pack.starts[:-1], length, strict=True)
        if tokens > block_size + 1
    ]
    return np.sort(np.random.default_rng(seed).permutation(np.concatenate(places))[:count]).astype(np.int32)
