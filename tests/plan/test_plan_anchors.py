"""Anchors: validity, runs, counts, and segments of one keyed permutation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from plan_corpora import count_valid, make_corpus

from slipstream.config.recipe import PlanSection
from slipstream.plan.anchors import count_supervised, draw_segments, run_lengths, valid_anchors
from slipstream.plan.keyed import Domain, keyed_permutation, keyed_permutations

FROZEN = [5, 6, 2, 4, 1, 3, 7, 0]
masks = hnp.arrays(np.bool_, st.integers(1, 60))


def draw_segment(*, seed: int, document_id: int, num_valid: int, offset: int, share: int) -> np.ndarray:
    """The rule for one document, with a generator of its own."""
    generator = np.random.Philox(key=np.array([seed, document_id], dtype=np.uint64), counter=[0, 0, 0, int(Domain.ANCHORS)])
    order = np.argsort(generator.random_raw(num_valid), kind="stable")
    return np.sort(order[(offset + np.arange(share)) % num_valid]) if share else order[:0]


def draw_one(*, seed: int, document_id: int, num_valid: int, offset: int, share: int) -> np.ndarray:
    given = {"document_ids": document_id, "num_valid": num_valid, "offsets": offset, "shares": share}
    return draw_segments(seed=seed, **{name: np.array([number], dtype=np.int64) for name, number in given.items()})


@given(mask=masks)
def test_valid_anchors_have_this_and_the_next_token_supervised(mask):
    assert valid_anchors(mask).tolist() == [a for a in range(len(mask) - 1) if mask[a] and mask[a + 1]]
    assert len(valid_anchors(mask)) == count_valid(mask)


@given(mask=masks, block_size=st.integers(2, 16))
def test_a_run_ends_at_the_first_hole_the_end_or_the_block(mask, block_size):
    anchors = valid_anchors(mask)
    runs = run_lengths(mask, anchors=anchors, block_size=block_size)
    for anchor, run in zip(anchors, runs, strict=True):
        expected = 0
        while expected < block_size - 1 and anchor + 1 + expected < len(mask) and mask[anchor + 1 + expected]:
            expected += 1
        assert run == expected >= 1


@given(runs=st.lists(st.integers(1, 7)))
def test_supervised_counts_are_of_anchors_whose_run_reaches_the_slot(runs):
    counts = count_supervised(np.array(runs, dtype=np.int32), block_size=8)
    assert counts.dtype == np.int64
    assert counts.tolist() == [0] + [sum(run >= slot for run in runs) for slot in range(1, 8)]


@given(num_valid=st.integers(1, 200), share=st.integers(0, 200), offset=st.integers(0, 1000), seed=st.integers(0, 2**63 - 1))
def test_segments_are_disjoint_until_exhausted(num_valid, share, offset, seed):
    share = min(share, num_valid)
    segments = [
        draw_one(seed=seed, document_id=7, num_valid=num_valid, offset=offset + use * share, share=share)
        for use in range(num_valid // max(1, share))
    ]
    taken = np.concatenate([np.zeros(0, dtype=np.int64), *segments])
    assert len(np.unique(taken)) == len(taken)
    assert all((np.diff(segment) > 0).all() for segment in segments)
    assert taken.size == 0 or (taken.min() >= 0 and taken.max() < num_valid)


documents = st.lists(st.tuples(st.integers(0, 70), st.integers(0, 70), st.integers(0, 200)), max_size=6)


@given(documents=documents, seed=st.integers(0, 2**63 - 1))
def test_segments_of_a_row_of_documents_are_those_of_each(documents, seed):
    documents = [(number, num_valid, offset) for number, (num_valid, _, offset) in enumerate(documents)]
    shares = [num_valid // 2 if number % 2 else num_valid for number, num_valid, _ in documents]
    numbers, num_valid, offsets = np.array(documents, dtype=np.int64).reshape(-1, 3).T
    drawn = draw_segments(
        seed=seed, document_ids=numbers, num_valid=num_valid, offsets=offsets, shares=np.array(shares, dtype=np.int64)
    )
    before = np.concatenate(([0], np.cumsum(num_valid)))
    each = [
        before[number] + draw_segment(seed=seed, document_id=number, num_valid=count, offset=offset, share=share)
        for (number, count, offset), share in zip(documents, shares, strict=True)
    ]
    assert drawn.dtype == np.int64
    assert drawn.tolist() == [index for segment in each for index in segment.tolist()]


@given(rows=st.lists(masks, max_size=5), padding=st.integers(0, 20), block_size=st.integers(2, 16))
def test_anchors_and_runs_of_a_row_of_documents_are_those_of_each(rows, padding, block_size):
    starts = np.cumsum([0, *map(len, rows)]).astype(np.int32)
    row = np.concatenate([*rows, np.zeros(padding + (not rows), dtype=np.bool_)])
    anchors = valid_anchors(row, starts=starts)
    runs = run_lengths(row, anchors=anchors, block_size=block_size, starts=starts)
    each = [valid_anchors(mask) for mask in rows]
    assert anchors.tolist() == [a + start for start, found in zip(starts.tolist(), each, strict=False) for a in found.tolist()]
    lengths = [run_lengths(mask, anchors=found, block_size=block_size) for mask, found in zip(rows, each, strict=True)]
    assert runs.tolist() == [run for found in lengths for run in found.tolist()]
    assert (anchors.dtype, runs.dtype) == (np.int32, np.int32)


def test_permutations_one_after_another_are_those_of_each():
    numbers = [(5, 8), (2**64 - 1, 3), (0, 0), (5, 70)]
    found = keyed_permutations(seed=2**64 - 1, domain=Domain.ANCHORS, numbers=numbers)
    for (number, size), order in zip(numbers, found, strict=True):
        generator = np.random.Philox(key=np.array([2**64 - 1, number], dtype=np.uint64), counter=[0, 0, 0, int(Domain.ANCHORS)])
        assert order.tolist() == np.argsort(generator.random_raw(size), kind="stable").tolist()


def test_the_permutation_is_fixed_for_ever():
    """These words are Philox's own; if this fails, runs no longer resume."""
    assert keyed_permutation(seed=3, domain=Domain.ANCHORS, number=5, size=8).tolist() == FROZEN
    other = [
        keyed_permutation(seed=seed, domain=domain, number=number, size=8).tolist()
        for seed, domain, number in [(4, Domain.ANCHORS, 5), (3, Domain.DOCUMENT_ORDER, 5), (3, Domain.ANCHORS, 6)]
    ]
    assert FROZEN not in other


@pytest.mark.parametrize("replays", [1, 3])
def test_a_document_sees_all_its_anchors_before_any_twice_over_epochs_and_replays(replays):
    corpus = make_corpus(lengths=[90] * 40, seed=1)
    planner = corpus.planner(
        PlanSection(pack_tokens=128, pack_anchors=24, packs_per_step=2, epochs=4, replays=replays, replay_distance=10, window=8)
    )
    schedule = planner.schedule
    used = {document.document_id: np.zeros(len(document.loss_mask), dtype=np.int64) for document in corpus.documents}
    by_number = sorted(
        (int(schedule.epoch_of_pack[schedule.pack_of_use[step, column]]), int(schedule.use_number[step, column]), step, column)
        for step in range(schedule.num_steps)
        for column in range(schedule.num_columns)
    )
    for _, _, step, column in by_number:
        use = planner.use(step, column)
        pack = planner.pack(use.pack_id)
        owner = pack.document_of_token()
        for anchor in use.anchors[use.anchor_valid]:
            used[int(pack.document_ids[owner[anchor]])][pack.position_ids[anchor]] += 1
        for document in pack.document_ids.tolist():
            times = used[document][valid_anchors(corpus.documents[document].loss_mask)]
            assert times.max() - times.min() <= 1
    assert sum(times.sum() for times in used.values()) == schedule.summary().anchors
    assert max(times.max() for times in used.values()) > 1
