"""Packing and shares: every document once, nothing above its budget, packs full."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_corpora import corpora

from slipstream.config.recipe import PlanSection
from slipstream.errors import PlanError
from slipstream.plan import CorpusIndex, make_schedule
from slipstream.plan.packing import pack_epoch, pack_in_order
from slipstream.plan.shares import share_out


def lognormal(count: int, *, seed: int = 0) -> np.ndarray:
    """Lengths with median 700, sigma 0.8, cut at 4,096."""
    return np.clip(np.random.default_rng(seed).lognormal(np.log(700), 0.8, count), 1, 4096).astype(np.int32)


@given(lengths=st.lists(st.integers(1, 128), max_size=80), window=st.integers(1, 40))
def test_every_document_is_packed_once_and_no_pack_overflows(lengths, window):
    num_tokens = np.array(lengths, dtype=np.int64)
    packed = pack_in_order(num_tokens=num_tokens, capacity_tokens=128, window=window)
    assert sorted(packed.document_ids.tolist()) == list(range(len(lengths)))
    assert (np.diff(packed.starts) > 0).all()
    for begin, end in zip(packed.starts[:-1], packed.starts[1:], strict=True):
        assert num_tokens[packed.document_ids[begin:end]].sum() <= 128


@given(lengths=st.lists(st.integers(1, 128), max_size=60), window=st.integers(1, 12))
def test_a_pack_takes_the_oldest_then_the_longest_that_fits(lengths, window):
    """Against the rule followed naively."""
    packed = pack_in_order(num_tokens=np.array(lengths, dtype=np.int64), capacity_tokens=128, window=window)
    coming, waiting, packs = list(range(len(lengths))), [], []
    while coming or waiting:
        waiting, coming = waiting + coming[: window - len(waiting)], coming[max(0, window - len(waiting)) :]
        row = [waiting.pop(0)]
        room = 128 - lengths[row[0]]
        while True:
            waiting, coming = waiting + coming[: window - len(waiting)], coming[max(0, window - len(waiting)) :]
            fitting = [document for document in waiting if lengths[document] <= room]
            if not fitting:
                break
            chosen = max(fitting, key=lambda document: (lengths[document], -document))
            waiting.remove(chosen)
            row.append(chosen)
            room -= lengths[chosen]
        packs.append(row)
    found = [packed.document_ids[a:b].tolist() for a, b in zip(packed.starts[:-1], packed.starts[1:], strict=True)]
    assert found == packs


def test_token_fill_on_lognormal_lengths():
    lengths = lognormal(30_000).astype(np.int64)
    for window in (64, 128, 256):
        packed = pack_epoch(
            document_ids=np.arange(len(lengths)), num_tokens=lengths, capacity_tokens=8192, window=window, seed=1, epoch=0
        )
        assert lengths.sum() / (packed.num_packs * 8192) >= 0.99


def test_epochs_and_seeds_pack_differently():
    ids, lengths = np.arange(200), lognormal(200).astype(np.int64)
    first, *others = [
        pack_epoch(document_ids=ids, num_tokens=lengths, capacity_tokens=8192, window=16, seed=seed, epoch=epoch)
        for seed, epoch in [(0, 0), (0, 1), (1, 0)]
    ]
    assert all(not np.array_equal(first.document_ids, other.document_ids) for other in others)


@given(
    packs=st.lists(st.lists(st.integers(1, 300), min_size=0, max_size=12), min_size=1, max_size=12),
    budget=st.integers(1, 600),
    limit=st.integers(1, 200),
)
def test_shares_fill_the_budget_wherever_caps_allow_and_never_break_one(packs, budget, limit):
    counts = np.array([count for pack in packs for count in pack], dtype=np.int64)
    starts = np.cumsum([0, *map(len, packs)])
    shares = share_out(counts=counts, starts=starts, budget=budget, limit=limit)
    caps = np.minimum(counts, limit)
    assert (shares >= 0).all()
    assert (shares <= caps).all()
    for begin, end in itertools.pairwise(starts):
        total, room = shares[begin:end].sum(), caps[begin:end].sum()
        assert total == min(budget, room)
        below = np.flatnonzero(shares[begin:end] < caps[begin:end])
        if room > budget and below.size:
            # In proportion: one level explains all shares, to within the rounding to whole anchors.
            level = shares[begin:end][below] / counts[begin:end][below]
            low = ((shares[begin:end] - 1) / counts[begin:end]).max()
            high = ((shares[begin:end][below] + 1) / counts[begin:end][below]).min()
            assert low <= high, level


@settings(max_examples=60)
@given(corpus=corpora(), window=st.integers(1, 20), epochs=st.integers(1, 3), columns=st.integers(1, 4))
def test_every_document_once_an_epoch_or_counted_as_refused(corpus, window, epochs, columns):
    index = corpus.index()
    too_long = set(np.flatnonzero(index.num_tokens > 128).tolist())
    no_anchor = set(np.flatnonzero(index.num_anchors == 0).tolist()) - too_long
    plan = PlanSection(pack_tokens=128, pack_anchors=32, packs_per_step=columns, epochs=epochs, window=window)
    expected = sorted(set(range(index.num_documents)) - too_long - no_anchor)
    if not expected:
        with pytest.raises(PlanError, match="no document is left"):
            make_schedule(index=index, plan=plan, block_size=4)
        return
    schedule = make_schedule(index=index, plan=plan, block_size=4)
    for epoch in range(epochs):
        packs = np.flatnonzero(schedule.epoch_of_pack == epoch)
        assert sorted(np.concatenate([schedule.documents_of_pack(int(pack)) for pack in packs]).tolist()) == expected
    summary = schedule.summary()
    assert summary.refused == {"too_long": len(too_long), "no_anchor": len(no_anchor)}
    assert summary.uses_of_documents + summary.cut_documents == epochs * (index.num_documents - sum(summary.refused.values()))
    assert summary.cut_documents == 0
    assert (schedule.arrays.tokens_of_pack <= 128).all()
    assert (schedule.arrays.anchors_of_pack <= 32).all()


def test_documents_cut_by_max_steps_are_counted():
    lengths = lognormal(500)
    index = CorpusIndex(num_tokens=lengths, num_anchors=lengths // 2, fingerprint="x")
    plan = PlanSection(packs_per_step=4, epochs=3, max_steps=21, replays=2, replay_distance=10)
    summary = make_schedule(index=index, plan=plan, block_size=16).summary()
    assert (summary.steps, summary.packs, summary.empty_packs) == (20, 40, 0)
    assert summary.uses_of_documents + summary.cut_documents == 3 * (500 - int((lengths // 2 == 0).sum()))
    assert summary.cut_documents > 0


def test_anchor_fill_is_one_where_caps_allow():
    lengths = lognormal(4000)
    index = CorpusIndex(num_tokens=lengths, num_anchors=lengths - 1, fingerprint="x")
    schedule = make_schedule(
        index=index, plan=PlanSection(pack_anchors=512, max_anchors_per_document=4096, epochs=1), block_size=16
    )
    full = schedule.arrays.anchors_of_pack == 512
    caps = np.array([(lengths - 1)[schedule.documents_of_pack(pack)].sum() for pack in range(schedule.num_packs)])
    assert np.array_equal(full, caps >= 512)
    assert schedule.summary().anchor_fill > 0.998


@pytest.mark.slow
def test_a_million_documents_are_planned_within_a_minute():
    lengths = lognormal(1_000_000)
    index = CorpusIndex(num_tokens=lengths, num_anchors=lengths // 2, fingerprint="x")
    began = time.process_time()
    schedule = make_schedule(index=index, plan=PlanSection(epochs=1, replays=3), block_size=16)
    assert len(schedule.digest) == 64
    assert time.process_time() - began < 60
    assert schedule.summary().token_fill >= 0.99
