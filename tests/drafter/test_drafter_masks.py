"""Masks: spans against the visibility rules written out, and flex attention's analytic block mask against torch's own."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from block_cases import make_case
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask

from slipstream.config.recipe import LayerType
from slipstream.drafter.masks import TILE, Spans, dense_mask, flex_block_mask, make_spans, tile_indices
from slipstream.records import BlockBatch

KINDS: list[tuple[LayerType, int | None]] = [("full", None), ("sliding", 3), ("sliding", 9), ("sliding", 1000)]


def spans_of(batch: BlockBatch, kind: LayerType, window: int | None, lengths: np.ndarray | None = None) -> Spans:
    return make_spans(
        kind=kind,
        anchors=batch.anchors_N.numpy(),
        starts=batch.anchor_start_N.numpy(),
        valid=batch.anchor_valid_N.numpy(),
        block_size=batch.positions_NB.shape[1],
        context_tokens=len(batch.context_positions_T),
        window=window,
        lengths=lengths,
    )


def cut_at_random(batch: BlockBatch, seed: int = 0) -> np.ndarray:
    """So many slots of each block are left, 1 to B."""
    blocks, size = batch.positions_NB.shape
    return np.random.default_rng(seed).integers(1, size + 1, blocks)


def rules(batch: BlockBatch, kind: LayerType, window: int | None, lengths: np.ndarray | None = None) -> np.ndarray:
    """Who sees whom, from documents and positions as a server has them, pair by pair; of cut blocks nobody sees the rest."""
    context, (blocks, size) = len(batch.context_positions_T), batch.positions_NB.shape
    document = batch.context_document_T
    mask = np.zeros((blocks * size, context + blocks * size), dtype=bool)
    for n in range(blocks):
        for j in range(size):
            row, position = n * size + j, int(batch.positions_NB[n, j])
            if batch.anchor_valid_N[n]:
                for t in range(context):
                    same = document[t] == document[batch.anchors_N[n]]
                    earlier = batch.context_positions_T[t] < batch.positions_NB[n, 0]
                    near = kind == "full" or position - int(batch.context_positions_T[t]) < window
                    mask[row, t] = same and earlier and near
            for i in range(size):
                there = lengths is None or i < lengths[n]
                mask[row, context + n * size + i] = there if kind == "full" else i <= j and j - i < window
    return mask


@pytest.mark.parametrize(("kind", "window"), KINDS)
def test_spans_are_the_visibility_rules(kind: LayerType, window: int | None) -> None:
    batch = make_case(lengths=(30, 18), slots=16, capacity=64, num_anchors=12).batch
    spans = spans_of(batch, kind, window)
    assert np.array_equal(dense_mask(spans).numpy(), rules(batch, kind, window))
    assert (spans.own_to > spans.own_from).all()


@pytest.mark.parametrize(("kind", "window"), KINDS)
def test_slots_of_a_block_that_is_cut_see_what_is_left_of_it(kind: LayerType, window: int | None) -> None:
    batch = make_case(lengths=(30, 18), slots=16, capacity=64, num_anchors=12).batch
    lengths = cut_at_random(batch)
    found = dense_mask(spans_of(batch, kind, window, lengths)).numpy()
    left = (np.arange(batch.positions_NB.shape[1]) < lengths[:, None]).ravel()  # slots that exist when it is drafted
    assert np.array_equal(found[left], rules(batch, kind, window, lengths)[left])
    keys = np.concatenate((np.ones(64, dtype=bool), left))
    assert not found[left][:, ~keys].any()


@pytest.mark.parametrize(("kind", "window"), KINDS)
def test_a_part_of_the_dense_mask_is_that_part(kind: LayerType, window: int | None) -> None:
    batch = make_case().batch
    spans = spans_of(batch, kind, window)
    part = dense_mask(spans, slots=slice(8, 24), context=slice(5, 90))
    whole = dense_mask(spans)[8:24]
    assert torch.equal(part, torch.cat((whole[:, 5:90], whole[:, 128 + 8 : 128 + 24]), dim=1))


@pytest.mark.parametrize(("kind", "window"), [("full", None), ("sliding", 40), ("sliding", 300)])
@pytest.mark.parametrize("lengths", [(500,), (40, 300, 100), (130, 130, 130, 100), ()])
def test_the_flex_block_mask_is_what_torch_finds(kind: LayerType, window: int | None, lengths: tuple[int, ...]) -> None:
    batch = make_case(lengths=lengths, capacity=512, slots=96, num_anchors=None, block=8).batch
    spans = spans_of(batch, kind, window)
    ours = flex_block_mask(spans)
    theirs = create_block_mask(ours.mask_mod, None, None, *ours.seq_lengths, device="cpu")
    assert ours.shape == theirs.shape
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    for count, index in (("kv_num_blocks", "kv_indices"), ("full_kv_num_blocks", "full_kv_indices")):
        assert used(ours, count, index) == used(theirs, count, index)
    for count, index in (("q_num_blocks", "q_indices"), ("full_q_num_blocks", "full_q_indices")):
        assert used(ours, count, index) == used(theirs, count, index)
    rows, columns = (torch.arange(length) for length in ours.seq_lengths)
    zero = torch.zeros((), dtype=torch.int64)
    assert torch.equal(ours.mask_mod(zero, zero, rows[:, None], columns[None]), dense_mask(spans))


def used(mask: object, count: str, index: str) -> list[list[int]]:
    counts, indices = getattr(mask, count)[0, 0], getattr(mask, index)[0, 0]
    return [row[:number].tolist() for row, number in zip(indices, counts.tolist(), strict=True)]


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(3, 400), max_size=4),
    block=st.sampled_from([2, 7, 12, 16, 96, 128, 256, 384]),
    window=st.none() | st.integers(1, 700),
    seed=st.integers(0, 2**32 - 1),
    cut=st.booleans(),
)
def test_tiles_are_those_of_the_whole_mask(lengths: list[int], block: int, window: int | None, seed: int, cut: bool) -> None:
    """All of the arrays, the part that attention never reads included: they are what recorded digests are of."""
    capacity = -(-max(sum(lengths), 1) // TILE) * TILE
    slots = TILE // math.gcd(TILE, block) * (2 if block < TILE else 1)
    batch = make_case(lengths=lengths, capacity=capacity, slots=slots, block=block, seed=seed, holes=0.0).batch
    spans = spans_of(batch, "full" if window is None else "sliding", window, cut_at_random(batch, seed) if cut else None)
    tiles = dense_mask(spans).numpy().reshape(slots * block // TILE, TILE, -1, TILE)
    full = tiles.all(axis=(1, 3))
    partial = tiles.any(axis=(1, 3)) & ~full
    for side, some, every in zip(tile_indices(spans), (partial, partial.T), (full, full.T), strict=True):
        for count, order, wanted in ((side.num_partial, side.partial, some), (side.num_full, side.full, every)):
            assert count.dtype == order.dtype == np.int32
            assert count.tolist() == wanted.sum(axis=1).tolist()
            assert np.array_equal(order, np.argsort(~wanted, axis=1, kind="stable"))


def test_full_tiles_are_found_where_documents_are_long() -> None:
    batch = make_case(lengths=(1000,), capacity=1024, slots=32, block=8, holes=0.0, num_anchors=32).batch
    mask = flex_block_mask(spans_of(batch, "full", None))
    assert int(mask.full_kv_num_blocks.sum()) > 0
