"""Batches of random blocks for the tests of this folder."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slipstream.records import BlockBatch


@dataclass(frozen=True)
class LossCase:
    """A batch with the drafter's output on it and a frozen head. Some labels are the head's own argmax."""

    batch: BlockBatch
    hidden_NBD: torch.Tensor
    head_VD: torch.Tensor


def make_loss_case(
    *, lengths: list[int], block: int = 5, chunk_rows: int = 16, dtype: torch.dtype = torch.float32, valid: int | None = None
) -> LossCase:
    """Block n supervises slots 1 to `lengths[n]`; the first `valid` anchors are valid."""
    blocks, size, hidden, vocabulary = len(lengths), block, 24, 97
    generator = torch.Generator().manual_seed(sum(lengths) + block)
    hidden_NBD = torch.randn(blocks, size, hidden, generator=generator).to(dtype)
    head_VD = (torch.randn(vocabulary, hidden, generator=generator) * 0.3).to(dtype)
    slot = torch.arange(size)
    supervised = (slot >= 1) & (slot <= torch.tensor(lengths)[:, None])
    likely = (hidden_NBD.float() @ head_VD.float().t()).argmax(dim=-1)
    chance = torch.rand(blocks, size, generator=generator) < 0.6
    labels = torch.where(chance, likely, torch.randint(vocabulary, (blocks, size), generator=generator))
    rows = torch.nonzero(supervised.flatten())[:, 0]
    padded = torch.zeros(-(-len(rows) // chunk_rows) * chunk_rows, dtype=torch.int64)
    padded[: len(rows)] = rows
    anchors = torch.arange(blocks)
    batch = BlockBatch(
        pack_id=0,
        use_number=0,
        step=0,
        context_positions_T=torch.arange(128),
        context_document_T=torch.zeros(128, dtype=torch.int64),
        anchors_N=anchors,
        anchor_start_N=torch.zeros(blocks, dtype=torch.int64),
        anchor_valid_N=anchors < (blocks if valid is None else valid),
        block_token_ids_NB=torch.zeros(blocks, size, dtype=torch.int64),
        positions_NB=anchors[:, None] + slot,
        labels_NB=torch.where(supervised, labels, 0),
        supervised_NB=supervised,
        rows_M=padded,
        num_rows=len(rows),
    )
    return LossCase(batch=batch, hidden_NBD=hidden_NBD, head_VD=head_VD)
