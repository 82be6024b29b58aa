"""Packs, uses and steps, drawn from the schedule."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_corpora import ToyCorpus, corpora, make_corpus

from slipstream.config.recipe import PlanSection
from slipstream.errors import PlanError
from slipstream.plan import Planner
from slipstream.records import Document

PLAN = {"pack_tokens": 128, "pack_anchors": 32, "packs_per_step": 2, "window": 8, "replay_distance": 10}


@settings(max_examples=60, deadline=None)
@given(corpus=corpora(min_documents=4), block_size=st.integers(2, 9), limit=st.integers(1, 40), epochs=st.integers(1, 2))
def test_anchors_lie_in_their_documents_and_masks_and_budgets_hold(corpus, block_size, limit, epochs):
    plan = PlanSection(**PLAN, epochs=epochs, max_anchors_per_document=limit)
    try:
        planner = corpus.planner(plan, block_size=block_size)
    except PlanError:
        assert not ((corpus.index().num_tokens <= 128) & (corpus.index().num_anchors > 0)).any()
        return
    schedule = planner.schedule
    for index in range(schedule.num_steps):
        step = planner.step(index)
        total = np.zeros(block_size, dtype=np.int64)
        assert len(step.uses) == 2
        for column, use in enumerate(step.uses):
            pack = planner.pack(use.pack_id)
            assert (pack.column, use.step, use.use_number, use.is_last) == (column, index, 0, True)
            total += check_use(corpus, pack=pack, use=use, block_size=block_size, limit=limit)
        assert step.supervised_per_slot.tolist() == total.tolist()
        assert step.epoch == max(planner.pack(use.pack_id).epoch for use in step.uses)


def check_use(corpus: ToyCorpus, *, pack, use, block_size: int, limit: int) -> np.ndarray:
    """Everything a use promises; returns its supervised counts, counted slowly."""
    owner = pack.document_of_token()
    anchors = use.anchors[use.anchor_valid]
    assert use.anchors.shape == use.anchor_valid.shape == (32,)
    assert use.anchors.dtype == np.int32
    assert (np.diff(anchors) > 0).all()
    assert not use.anchors[len(anchors) :].any()
    assert not use.anchor_valid[len(anchors) :].any()
    counts = np.zeros(block_size, dtype=np.int64)
    for anchor in anchors:
        document = corpus.documents[pack.document_ids[owner[anchor]]]
        local = int(pack.position_ids[anchor])
        assert pack.token_ids[anchor] == document.token_ids[local]
        assert document.loss_mask[local]
        assert document.loss_mask[local + 1]
        for slot in range(1, block_size):
            if local + slot >= len(document.loss_mask) or not document.loss_mask[local + slot]:
                break
            counts[slot] += 1
    assert use.supervised_per_slot.tolist() == counts.tolist()
    caps = [min(limit, int(corpus.index().num_anchors[document])) for document in pack.document_ids]
    assert len(anchors) == min(32, sum(caps)), "slots are full wherever the caps allow"
    assert (np.bincount(owner[anchors], minlength=len(caps))[: len(caps)] <= caps).all()
    return counts


def test_a_pack_is_its_documents_then_padding():
    corpus = make_corpus(lengths=[50, 60, 128], supervised=1.0)
    planner = corpus.planner(PlanSection(**PLAN, epochs=1))
    packs = [planner.pack(pack) for pack in range(planner.schedule.num_packs)]
    pack = next(pack for pack in packs if pack.num_documents == 2)
    assert sorted(pack.document_ids.tolist()) == [0, 1]
    documents = [corpus.documents[number] for number in pack.document_ids]
    assert pack.starts.tolist() == [0, len(documents[0].token_ids), 110]
    assert pack.cu_seqlens().tolist() == [*pack.starts.tolist(), 128]
    assert pack.token_ids.tolist() == [*documents[0].token_ids, *documents[1].token_ids, *[0] * 18]
    assert pack.position_ids.tolist() == [*range(pack.starts[1]), *range(110 - pack.starts[1]), *range(18)]
    assert pack.loss_mask.tolist() == [True] * 110 + [False] * 18
    assert {array.dtype for array in (pack.starts, pack.token_ids, pack.position_ids)} == {np.dtype(np.int32)}
    assert pack.document_ids.dtype == np.int64


def test_an_empty_pack_is_padding_and_its_use_neutral():
    planner = make_corpus(lengths=[128], supervised=1.0).planner(PlanSection(**PLAN, epochs=1))
    assert planner.schedule.num_packs == 2
    pack, use = planner.pack(1), planner.use(0, 1)
    assert (pack.num_documents, pack.num_tokens, pack.cu_seqlens().tolist()) == (0, 0, [0, 128])
    assert pack.position_ids.tolist() == list(range(128))
    assert pack.document_of_token().tolist() == [0] * 128
    assert not use.anchor_valid.any()
    assert use.supervised_per_slot.tolist() == [0, 0, 0, 0]
    assert planner.step(0).supervised_per_slot.tolist() == planner.use(0, 0).supervised_per_slot.tolist()


def test_another_corpus_is_refused():
    corpus, other = make_corpus(lengths=[60] * 8), make_corpus(lengths=[61] * 8)
    schedule = corpus.planner(PlanSection(**PLAN, epochs=1)).schedule
    with pytest.raises(PlanError, match="not the corpus that was planned"):
        Planner(schedule=schedule, document=other.document).pack(0)
    unmasked = make_corpus(lengths=[60] * 8, supervised=0.0)
    with pytest.raises(PlanError, match="valid anchors"):
        Planner(schedule=schedule, document=unmasked.document).use(0, 0)


def test_a_pack_wanted_several_times_in_a_row_is_read_once():
    corpus = make_corpus(lengths=[40 + i % 30 for i in range(60)])
    schedule = corpus.planner(PlanSection(**PLAN, epochs=1)).schedule
    read: list[int] = []

    def document(number: int) -> Document:
        read.append(number)
        return corpus.document(number)

    planner = Planner(schedule=schedule, document=document)
    for index in range(schedule.num_steps):
        for use in planner.step(index).uses:
            planner.pack(use.pack_id)
    assert schedule.num_steps > 10
    assert sorted(read) == sorted(schedule.arrays.document_ids.tolist())
    planner.pack(0)
    assert len(read) > len(schedule.arrays.document_ids), "not all packs of a run are kept"


def test_the_answers_do_not_depend_on_what_was_asked_before():
    corpus = make_corpus(lengths=[30 + i % 60 for i in range(80)])
    plan = PlanSection(**PLAN, epochs=2, replays=2)
    once = [corpus.planner(plan).step(index) for index in range(10)]
    planner = corpus.planner(plan)
    for index in reversed(range(10)):
        for ours, theirs in zip(planner.step(index).uses, once[index].uses, strict=True):
            assert ours.anchors.tolist() == theirs.anchors.tolist()
