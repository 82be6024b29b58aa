"""From a corpus' figures and the recipe's plan to a `Schedule`."""

from __future__ import annotations

import numpy as np

from slipstream.config.recipe import PlanSection
from slipstream.errors import PlanError
from slipstream.plan.contents import Contents, fill_packs
from slipstream.plan.figures import Float32Array, PlanSummary, mixing_figure
from slipstream.plan.index import CorpusIndex
from slipstream.plan.schedule import Schedule, ScheduleArrays
from slipstream.plan.timetable import Timetable, time_packs
from slipstream.records import Int32Array, Int64Array


def make_schedule(*, index: CorpusIndex, plan: PlanSection, block_size: int) -> Schedule:
    """Plan a whole run. A pure function of its arguments.

    Raises `PlanError` when nothing can be packed, or when the run is too short for its replays.
    """
    if plan.seed >= 2**63:
        raise PlanError(key="plan.seed", value=plan.seed, rule="must be below 2**63")
    contents = fill_packs(index=index, plan=plan)
    # The last step is filled up with empty packs: every column has a pack in every step.
    timetable = time_packs(plan=plan, packs_per_column=-(-contents.packed.num_packs // plan.packs_per_step))
    arrays = _arrays(index=index, contents=contents, timetable=timetable)
    mixing = mixing_figure(
        lengths=index.num_tokens[arrays.document_ids].astype(np.int64),
        corpus_lengths=index.num_tokens[contents.eligible].astype(np.int64),
        pack_starts=arrays.pack_starts,
        pack_of_use=arrays.pack_of_use,
    )
    return Schedule(
        plan=plan,
        block_size=block_size,
        fingerprint=index.fingerprint,
        arrays=arrays,
        mixing=mixing,
        figures=_summary(index=index, plan=plan, contents=contents, timetable=timetable, arrays=arrays, mixing=mixing),
    )


def _arrays(*, index: CorpusIndex, contents: Contents, timetable: Timetable) -> ScheduleArrays:
    packed, num_packs = contents.packed, len(timetable.first_step)
    empty = num_packs - packed.num_packs
    pack = packed.pack_of_entry()
    return ScheduleArrays(
        document_ids=packed.document_ids,
        pack_starts=np.append(packed.starts, np.full(empty, packed.starts[-1])),
        shares=contents.shares.astype(np.int32),
        offsets=contents.offsets.astype(np.int32),
        tokens_of_pack=_per_pack(index.num_tokens[packed.document_ids], pack=pack, num_packs=num_packs),
        anchors_of_pack=_per_pack(contents.shares, pack=pack, num_packs=num_packs),
        epoch_of_pack=np.append(contents.epoch_of_pack, np.full(empty, contents.epoch_of_pack[-1])).astype(np.int32),
        column_of_pack=timetable.column_of_pack,
        slot_of_pack=timetable.slot_of_pack,
        first_step=timetable.first_step,
        last_step=timetable.last_step,
        pack_of_use=timetable.pack_of_use,
        use_number=timetable.use_number,
    )


def _per_pack(values: Int32Array | Int64Array, *, pack: Int64Array, num_packs: int) -> Int32Array:
    return np.bincount(pack, weights=values, minlength=num_packs).astype(np.int32)


def _summary(
    *,
    index: CorpusIndex,
    plan: PlanSection,
    contents: Contents,
    timetable: Timetable,
    arrays: ScheduleArrays,
    mixing: Float32Array,
) -> PlanSummary:
    packs = contents.packed.num_packs
    tokens, anchors = int(arrays.tokens_of_pack.sum()), int(arrays.anchors_of_pack.sum())
    # A step that holds nothing but empty packs says nothing of mixing.
    filled = mixing[arrays.tokens_of_pack[arrays.pack_of_use].sum(axis=1) > 0]
    return PlanSummary(
        steps=len(mixing),
        columns=plan.packs_per_step,
        epochs=int(contents.epoch_of_pack[-1]) + 1,
        packs=packs,
        empty_packs=len(timetable.first_step) - packs,
        documents=index.num_documents,
        refused=contents.refused,
        uses_of_documents=len(contents.shares),
        cut_documents=contents.cut_documents,
        target_tokens=tokens,
        trained_tokens=tokens * plan.replays,
        anchors=anchors * plan.replays,
        token_fill=tokens / (packs * plan.pack_tokens),
        anchor_fill=anchors / (packs * plan.pack_anchors),
        replays=plan.replays,
        replay_distance=plan.replay_distance,
        steady_distance=timetable.steady_distance,
        smallest_distance=timetable.smallest_distance,
        ramp_packs=timetable.ramp_packs,
        slots_per_column=int(timetable.slot_of_pack.max()) + 1,
        mixing_mean=float(filled.mean()),
        mixing_worst=float(filled.max()),
    )
