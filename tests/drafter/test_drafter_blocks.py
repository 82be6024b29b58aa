"""Blocks: tokens, positions, labels and supervised rows against a token-by-token reading of the rules."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from block_cases import MASK_TOKEN, Case, make_case, make_embedding, make_pack, make_use
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.drafter import batch_to, embedding_rows, make_block_batch


def expected_labels(case: Case, n: int, block: int) -> list[int | None]:
    """Labels of one block, None where not supervised, walked token by token."""
    pack, anchor = case.pack, int(case.use.anchors[n])
    labels: list[int | None] = [None] * block
    end = int(pack.starts[pack.starts > anchor][0])
    for k in range(1, block):
        if anchor + k >= end or not pack.loss_mask[anchor + k]:
            break
        labels[k] = int(pack.token_ids[anchor + k])
    return labels


@pytest.mark.parametrize("block", [2, 4, 7])
@pytest.mark.parametrize("seed", range(4))
def test_labels_follow_the_contiguous_prefix(block: int, seed: int) -> None:
    case = make_case(block=block, seed=seed, holes=0.25, slots=64)
    batch, valid = case.batch, case.use.anchor_valid
    for n in np.flatnonzero(valid):
        labels = expected_labels(case, n, block)
        assert batch.supervised_NB[n].tolist() == [label is not None for label in labels]
        assert batch.labels_NB[n].tolist() == [0 if label is None else label for label in labels]
        anchor = int(case.use.anchors[n])
        assert batch.block_token_ids_NB[n].tolist() == [int(case.pack.token_ids[anchor])] + [MASK_TOKEN] * (block - 1)
        assert batch.positions_NB[n].tolist() == [int(case.pack.position_ids[anchor]) + k for k in range(block)]
    assert not batch.supervised_NB[torch.from_numpy(~valid)].any()


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), max_size=5),
    padding=st.integers(0, 9),
    block=st.integers(2, 9),
    holes=st.floats(0, 1),
    empty=st.integers(0, 12),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_array_is_what_the_rules_say(
    lengths: list[int], padding: int, block: int, holes: float, empty: int, seed: int
) -> None:
    capacity = sum(lengths) + padding + (not lengths)
    pack = make_pack(lengths=lengths, capacity=capacity, seed=seed, holes=holes)
    chosen = np.flatnonzero(np.random.default_rng(seed).random(capacity) < 0.3)
    anchors = [anchor for anchor in chosen.tolist() if anchor < pack.starts[-1]]
    use = make_use(pack=pack, anchors=anchors, slots=len(anchors) + empty + 1, block=block)
    batch = make_block_batch(pack=pack, use=use, block_size=block, mask_token_id=MASK_TOKEN, chunk_rows=16)
    document = pack.document_of_token()
    starts, tokens, positions, labels, rows = [], [], [], [], []
    for n, (anchor, valid) in enumerate(zip(use.anchors.tolist(), use.anchor_valid.tolist(), strict=True)):
        starts.append(int(pack.starts[document[anchor]]) if valid else 0)
        tokens.append([int(pack.token_ids[anchor]) if valid else MASK_TOKEN] + [MASK_TOKEN] * (block - 1))
        positions.append([(int(pack.position_ids[anchor]) if valid else 0) + k for k in range(block)])
        labels.append([0] * block)
        for k in range(1, block if valid else 0):
            if anchor + k >= capacity or document[anchor + k] != document[anchor] or not pack.loss_mask[anchor + k]:
                break
            labels[n][k] = int(pack.token_ids[anchor + k])
            rows.append(n * block + k)
    wanted = {
        "context_positions_T": pack.position_ids.tolist(),
        "context_document_T": document.tolist(),
        "anchors_N": use.anchors.tolist(),
        "anchor_start_N": starts,
        "block_token_ids_NB": tokens,
        "positions_NB": positions,
        "labels_NB": labels,
        "rows_M": rows + [0] * (-len(rows) % 16),
    }
    for name, values in wanted.items():
        assert getattr(batch, name).dtype == torch.int64, name
        assert getattr(batch, name).tolist() == values, name
    assert batch.anchor_valid_N.tolist() == use.anchor_valid.tolist()
    assert torch.nonzero(batch.supervised_NB.flatten())[:, 0].tolist() == rows
    assert (batch.num_rows, batch.supervised_NB.shape) == (len(rows), (len(starts), block))


@pytest.mark.parametrize("chunk_rows", [16, 64])
def test_rows_are_the_supervised_slots_padded_to_whole_chunks(chunk_rows: int) -> None:
    batch = make_case(chunk_rows=chunk_rows).batch
    real = torch.nonzero(batch.supervised_NB.flatten())[:, 0]
    assert batch.num_rows == len(real) > 0
    assert torch.equal(batch.rows_M[: batch.num_rows], real)
    assert len(batch.rows_M) % chunk_rows == 0
    assert len(batch.rows_M) - batch.num_rows < chunk_rows
    assert not batch.rows_M[batch.num_rows :].any()
    assert not batch.supervised_NB[0, 0]


def test_a_block_ends_with_its_document_where_the_next_is_supervised_at_once() -> None:
    pack = make_pack(lengths=(10, 10), capacity=128)
    pack.loss_mask[:20] = True
    use = make_use(pack=pack, anchors=[8], slots=32, block=4)
    batch = make_block_batch(pack=pack, use=use, block_size=4, mask_token_id=MASK_TOKEN, chunk_rows=16)
    assert batch.supervised_NB[0].tolist() == [False, True, False, False]


def test_a_document_that_ends_with_the_pack() -> None:
    pack = make_pack(lengths=(128,), capacity=128)
    use = make_use(pack=pack, anchors=[126], slots=32, block=4)
    batch = make_block_batch(pack=pack, use=use, block_size=4, mask_token_id=MASK_TOKEN, chunk_rows=16)
    assert batch.supervised_NB[0].tolist() == [False, True, False, False]
    assert batch.labels_NB[0, 1] == int(pack.token_ids[127])


def test_a_count_that_differs_from_the_plan_is_refused() -> None:
    case = make_case()
    case.use.supervised_per_slot[2] += 1
    with pytest.raises(AssertionError, match="the plan counted"):
        make_block_batch(pack=case.pack, use=case.use, block_size=4, mask_token_id=MASK_TOKEN, chunk_rows=16)


def test_an_empty_pack_makes_an_empty_batch() -> None:
    pack = make_pack(lengths=(), capacity=128)
    use = make_use(pack=pack, anchors=[], slots=32, block=4)
    batch = make_block_batch(pack=pack, use=use, block_size=4, mask_token_id=MASK_TOKEN, chunk_rows=16)
    assert batch.num_rows == 0
    assert len(batch.rows_M) == 0
    assert (batch.block_token_ids_NB == MASK_TOKEN).all()


def test_batch_to_keeps_every_field() -> None:
    batch = make_case().batch
    moved = batch_to(batch, device="meta")
    assert moved.num_rows == batch.num_rows
    assert {getattr(moved, name).device.type for name in ("rows_M", "labels_NB", "anchor_valid_N")} == {"meta"}


def test_embedding_rows_read_what_the_whole_embedding_holds() -> None:
    case, embedding = make_case(num_anchors=20), make_embedding()
    batch, rows = embedding_rows(case.batch, embedding)
    assert len(rows) == len(case.batch.anchors_N) + 1
    assert torch.equal(rows[batch.block_token_ids_NB], embedding[case.batch.block_token_ids_NB])
    assert torch.equal(batch.labels_NB, case.batch.labels_NB)
