"""Packs, uses and steps with their tokens and anchors, drawn from a schedule when they are needed.

Shape letters: T context tokens · N anchors · B block size · M documents of a pack.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from slipstream.errors import PlanError
from slipstream.plan.anchors import count_supervised, draw_segment, run_lengths, valid_anchors
from slipstream.plan.rows import make_pack
from slipstream.plan.schedule import Schedule
from slipstream.records import Document, Int32Array, Pack, Step, Use


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

    def pack(self, pack_id: int) -> Pack:
        """The tokens of a pack; an empty pack is all padding. Raises `PlanError` if the corpus is not the planned one."""
        schedule = self.schedule
        return make_pack(
            documents=self._documents(pack_id),
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
        begin = int(arrays.pack_starts[pack_id])
        rows: list[Int32Array] = [np.zeros(0, dtype=np.int32)]
        runs: list[Int32Array] = [np.zeros(0, dtype=np.int32)]
        start = 0
        for entry, document in enumerate(self._documents(pack_id), start=begin):
            share = int(arrays.shares[entry])
            chosen = self._draw(document, share=share, offset=int(arrays.offsets[entry]) + number * share)
            rows.append(chosen + np.int32(start))
            runs.append(run_lengths(document.loss_mask, anchors=chosen, block_size=schedule.block_size))
            start += len(document.token_ids)
        anchors = np.zeros(schedule.pack_anchors, dtype=np.int32)
        valid = np.concatenate(rows)
        anchors[: len(valid)] = valid
        return Use(
            step=step,
            pack_id=pack_id,
            use_number=number,
            anchors=anchors,
            anchor_valid=np.arange(len(anchors)) < len(valid),
            supervised_per_slot=count_supervised(np.concatenate(runs), block_size=schedule.block_size),
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

    def _documents(self, pack_id: int) -> list[Document]:
        with self._reading:
            documents = [self._document(int(number)) for number in self.schedule.documents_of_pack(pack_id)]
        found, planned = sum(len(item.token_ids) for item in documents), int(self.schedule.arrays.tokens_of_pack[pack_id])
        if found != planned:
            raise _other_corpus(f"the documents of pack {pack_id} have {found} tokens, the schedule planned {planned}")
        return documents

    def _draw(self, document: Document, *, share: int, offset: int) -> Int32Array:
        valid = valid_anchors(document.loss_mask)
        if share > len(valid):
            raise _other_corpus(
                f"document {document.document_id} has {len(valid)} valid anchors, the schedule takes {share} of them at once"
            )
        segment = draw_segment(
            seed=self.schedule.plan.seed,
            document_id=document.document_id,
            num_valid=len(valid),
            offset=offset,
            share=share,
        )
        return valid[segment]


def _other_corpus(rule: str) -> PlanError:
    return PlanError(key="corpus.path", value="this corpus", rule=rule, hint="it is not the corpus that was planned")
