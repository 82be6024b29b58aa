"""The pipeline bench's plan: packs come back as often as they should, in slots that are free, with blocks that count."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

from slipstream.drafter import make_block_batch
from slipstream.launch.bench import SHAPES
from slipstream.launch.bench.standing_plan import PipelineWork, StandingPlan, draw_anchors, make_packs
from slipstream.launch.bench.target import mixed_pack
from slipstream.trainer.loop import PREPARED_STEPS

SHAPE = SHAPES["smollm2"]


def standing_plan(replays: int) -> StandingPlan:
    work = PipelineWork(pack_tokens=1024, anchors=64, replays=replays)
    packs = [mixed_pack(1024, vocab_size=SHAPE.mask_token_id, seed=seed) for seed in (0, 1)]
    return StandingPlan(packs=packs, shape=SHAPE, work=work)


@pytest.mark.parametrize("replays", [1, 2, 3])
def test_every_pack_is_used_as_often_and_slots_suffice(replays: int) -> None:
    plan, steps = standing_plan(replays), 30 * replays
    uses = list(itertools.islice(plan.uses(), steps))
    counted = Counter(use.pack_id for use in uses)
    whole = [pack_id for pack_id in counted if replays - 1 <= pack_id < 30]
    assert {counted[pack_id] for pack_id in whole} == {replays}
    held: dict[int, int] = {}
    for use in uses:
        slot = use.pack_id % (replays + 1)
        assert held.setdefault(slot, use.pack_id) == use.pack_id, "the slot is still held by another pack"
        if use.is_last:
            del held[slot]
    for step, use in enumerate(uses[:6]):
        (planned,) = plan.step(step).uses
        assert (planned.pack_id, planned.is_last) == (use.pack_id, use.is_last)


def test_blocks_lie_in_their_documents_and_change_with_the_step() -> None:
    plan = standing_plan(2)
    drawn = []
    for step in range(2 + PREPARED_STEPS):
        planned = plan.step(step)
        (use,) = planned.uses
        batch = make_block_batch(
            pack=plan.pack(use.pack_id), use=use, block_size=SHAPE.block_size, mask_token_id=SHAPE.mask_token_id, chunk_rows=64
        )  # asserts that every slot is supervised
        assert batch.num_rows == 64 * (SHAPE.block_size - 1)
        drawn.append(use.anchors.tolist())
    assert len({tuple(anchors) for anchors in drawn}) == len(drawn)


def test_documents_of_one_length() -> None:
    packs = make_packs(PipelineWork(pack_tokens=1024, document_tokens=300), vocab_size=1000, count=2)
    assert [np.diff(pack.starts).tolist() for pack in packs] == [[300] * 3] * 2
    assert not np.array_equal(packs[0].token_ids, packs[1].token_ids)


def test_anchors_are_all_different() -> None:
    pack = mixed_pack(1024, vocab_size=1000, seed=3)
    anchors = draw_anchors(pack, count=200, block_size=16, seed=1)
    assert len(np.unique(anchors)) == 200
    assert (np.diff(anchors) > 0).all()
