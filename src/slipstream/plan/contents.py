"""All packs of a run in order, epoch by epoch, with the anchors that each of their documents gets."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slipstream.config.recipe import PlanSection
from slipstream.errors import PlanError
from slipstream.plan.index import CorpusIndex
from slipstream.plan.packing import PackedDocuments, pack_epoch
from slipstream.plan.shares import share_out
from slipstream.records import Int64Array


@dataclass(frozen=True, slots=True, eq=False)
class Contents:
    """Packs before they have steps.

    `shares` and `offsets` int64 `[E]` by entry of `packed`; `epoch_of_pack` int64 `[P]`; `eligible` int64: the documents
    that were not refused; `cut_documents`: uses of documents that lie behind the last pack that is kept.
    """

    packed: PackedDocuments
    shares: Int64Array
    offsets: Int64Array
    epoch_of_pack: Int64Array
    eligible: Int64Array
    refused: dict[str, int]
    cut_documents: int


@dataclass(frozen=True, slots=True, eq=False)
class _Epoch:
    packed: PackedDocuments
    shares: Int64Array
    offsets: Int64Array


def fill_packs(*, index: CorpusIndex, plan: PlanSection) -> Contents:
    """Pack every epoch, or as many as `max_steps` needs, and share out the anchor slots.

    Raises `PlanError` when no document can be trained on, or `max_steps` leaves no whole set of uses.
    """
    eligible, refused = _eligible(index=index, plan=plan)
    wanted = _wanted_packs(plan)
    # Where each document's next segment of anchors begins: the sum of its shares so far.
    segment = np.zeros(index.num_documents, dtype=np.int64)
    epochs: list[_Epoch] = []
    while len(epochs) < plan.epochs and (wanted is None or sum(done.packed.num_packs for done in epochs) < wanted):
        epochs.append(_fill_epoch(index=index, plan=plan, eligible=eligible, epoch=len(epochs), segment=segment))
    epoch_of_pack = np.repeat(np.arange(len(epochs)), [done.packed.num_packs for done in epochs])[:wanted]
    sizes = np.concatenate([np.diff(done.packed.starts) for done in epochs])[:wanted]
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    entries = int(starts[-1])
    document_ids = np.concatenate([done.packed.document_ids for done in epochs])[:entries]
    return Contents(
        packed=PackedDocuments(document_ids=document_ids, starts=starts),
        shares=np.concatenate([done.shares for done in epochs])[:entries],
        offsets=np.concatenate([done.offsets for done in epochs])[:entries],
        epoch_of_pack=epoch_of_pack,
        eligible=eligible,
        refused=refused,
        cut_documents=plan.epochs * len(eligible) - entries,
    )


def _fill_epoch(*, index: CorpusIndex, plan: PlanSection, eligible: Int64Array, epoch: int, segment: Int64Array) -> _Epoch:
    packed = pack_epoch(
        document_ids=eligible,
        num_tokens=index.num_tokens[eligible].astype(np.int64),
        capacity_tokens=plan.pack_tokens,
        window=plan.window,
        seed=plan.seed,
        epoch=epoch,
    )
    documents = packed.document_ids
    valid = index.num_anchors[documents].astype(np.int64)
    shares = share_out(counts=valid, starts=packed.starts, budget=plan.pack_anchors, limit=plan.max_anchors_per_document)
    offsets = segment[documents] % valid
    segment[documents] += plan.replays * shares
    return _Epoch(packed=packed, shares=shares, offsets=offsets)


def _eligible(*, index: CorpusIndex, plan: PlanSection) -> tuple[Int64Array, dict[str, int]]:
    too_long = index.num_tokens > plan.pack_tokens
    no_anchor = ~too_long & (index.num_anchors == 0)
    refused = {"too_long": int(too_long.sum()), "no_anchor": int(no_anchor.sum())}
    eligible = np.flatnonzero(~too_long & ~no_anchor)
    if not len(eligible):
        raise PlanError(
            key="plan.pack_tokens",
            value=plan.pack_tokens,
            rule=f"no document is left to train on: of {index.num_documents}, {refused['too_long']} have more tokens than "
            f"a pack, {refused['no_anchor']} have no two supervised tokens in a row",
        )
    return eligible, refused


def _wanted_packs(plan: PlanSection) -> int | None:
    if plan.max_steps is None:
        return None
    if plan.max_steps < plan.replays:
        raise PlanError(
            key="plan.max_steps",
            value=plan.max_steps,
            rule=f"must be at least plan.replays ({plan.replays}), so that a pack is used so many times",
        )
    return plan.max_steps // plan.replays * plan.packs_per_step
