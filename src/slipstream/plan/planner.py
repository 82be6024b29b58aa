"""Packs, uses and steps with their tokens and anchors, drawn from a schedule when they are needed.

Shape letters: T context tokens · N anchors · B block size · M documents of a pack.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from slipstream.errors import PlanError
from slipstream.plan.anchors import count_supervised, draw_segments, run_lengths, valid_anchors
from slipstream.plan.rows import make_pack
from slipstream.plan.schedule import Schedule
from slipstream.records import Document, Int64Array, Pack, Step, Use

KEPT_STEPS = 4
"""Packs of so many steps are kept: a step's anchors, its blocks and, in one process, the target want the same ones."""


@dataclass(frozen=True, slots=True)
class IssueOrder:
    """One pack in the order that targets make them. `slot` is the planned slot within the column."""

    pack_id: int
    column: int
    slot: int
    first_step: int


class Planner:
    """Answers what is in a pack, a use or a step. Every answer is a pure function of schedule and corpus.

    `document` gives a document by its id; calls to it never overlap, so that a background thread may ask too.
    """

    def __init__(self, *, schedule: Schedule, document: Callable[[int], Document]) -> None:
        self.schedule = schedule
        self._document = document
        self._reading = threading.Lock()
        self._kept: dict[int, Pack] = {}

    def pack(self, pack_id: int) -> Pack:
        """The tokens of a pack; an empty pack is all padding. Raises `PlanError` if the corpus is not the planned one."""
        with self._reading:
            if pack_id not in self._kept:
                made = self._make(pack_id)
                if len(self._kept) >= KEPT_STEPS * self.schedule.num_columns:
                    del self._kept[next(iter(self._kept))]  # the oldest
                self._kept[pack_id] = made
            return self._kept[pack_id]

    def _make(self, pack_id: int) -> Pack:
        schedule = self.schedule
        documents = [self._document(int(number)) for number in schedule.documents_of_pack(pack_id)]
        found, planned = sum(len(item.token_ids) for item in documents), int(schedule.arrays.tokens_of_pack[pack_id])
        if found != planned:
            raise _other_corpus(f"the documents of pack {pack_id} have {found} tokens, the schedule planned {planned}")
        return make_pack(
            documents=documents,
            pack_id=pack_id,
            epoch=int(schedule.epoch_of_pack[pack_id]),
            column=int(schedule.column_of_pack[pack_id]),
            slot=int(schedule.slot_of_pack[pack_id]),
            pack_tokens=schedule.pack_tokens,
        )

    def use(self, step: int, column: int) -> Use:
        """The anchors that a step trains on in a column. Raises `PlanError` if the corpus is not the planned one."""
        schedule, arrays = self.schedule, self.schedule.arrays
        pack_id, number = int(arrays.pack_of_use[step, column]), int(arrays.use_number[step, column])
        pack = self.pack(pack_id)
        candidates = valid_anchors(pack.loss_mask, starts=pack.starts)
        num_valid = np.diff(np.searchsorted(candidates, pack.starts))
        entries = slice(int(arrays.pack_starts[pack_id]), int(arrays.pack_starts[pack_id + 1]))
        shares = arrays.shares[entries].astype(np.int64)
        _check_shares(shares, num_valid=num_valid, pack=pack)
        segments = draw_segments(
            seed=schedule.plan.seed,
            document_ids=pack.document_ids,
            num_valid=num_valid,
            offsets=arrays.offsets[entries] + number * shares,
            shares=shares,
        )
        chosen = candidates[segments]
        runs = run_lengths(pack.loss_mask, anchors=chosen, block_size=schedule.block_size, starts=pack.starts)
        anchors = np.zeros(schedule.pack_anchors, dtype=np.int32)
        anchors[: len(chosen)] = chosen
        return Use(
            step=step,
            pack_id=pack_id,
            use_number=number,
            anchors=anchors,
            anchor_valid=np.arange(len(anchors)) < len(chosen),
            supervised_per_slot=count_supervised(runs, block_size=schedule.block_size),
            is_last=number == schedule.replays - 1,
        )

    def step(self, step: int) -> Step:
        """All uses of a step, with the supervised counts of all columns. Its epoch is that of its newest pack."""
        uses = tuple(self.use(step, column) for column in range(self.schedule.num_columns))
        return Step(
            index=step,
            epoch=int(self.schedule.epoch_of_pack[self.schedule.pack_of_use[step]].max()),
            uses=uses,
            supervised_per_slot=np.sum([use.supervised_per_slot for use in uses], axis=0),
        )

    def issue_order(self, start_step: int = 0) -> list[IssueOrder]:
        """Packs in the order that targets make them: those alive at `start_step` (the refill), then the rest by first step."""
        schedule = self.schedule
        later = np.flatnonzero(schedule.first_step >= start_step)
        return [
            IssueOrder(
                pack_id=int(pack),
                column=int(schedule.column_of_pack[pack]),
                slot=int(schedule.slot_of_pack[pack]),
                first_step=int(schedule.first_step[pack]),
            )
            for pack in [*schedule.live_packs(start_step), *later]
        ]


def _check_shares(shares: Int64Array, *, num_valid: Int64Array, pack: Pack) -> None:
    for place in np.flatnonzero(shares > num_valid)[:1]:
        raise _other_corpus(
            f"document {pack.document_ids[place]} has {num_valid[place]} valid anchors, "
            f"the schedule takes {shares[place]} of them at once"
        )


def _other_corpus(rule: str) -> PlanError:
    return PlanError(key="corpus.path", value="this corpus", rule=rule, hint="it is not the corpus that was planned")
