"""Blocks: tokens, positions, labels and supervised rows against a token-by-token reading of the rules."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from block_cases import MASK_TOKEN, Case, make_case, make_embedding, make_pack, make_use

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
