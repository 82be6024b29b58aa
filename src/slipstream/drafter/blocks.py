"""From a pack and its anchors to what the drafter computes on: block tokens, positions, labels and supervised rows.

Slot 0 holds the anchor token and predicts nothing; slot k predicts the token k places after the anchor (fill-in layout).

Shape letters: T context tokens · N anchors · B block size · M supervised rows, padded to whole chunks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from slipstream.records import BlockBatch, BoolArray, Int64Array, Pack, Use

Send = Callable[[torch.Tensor], torch.Tensor]
"""Brings a tensor of the CPU to the drafter's device."""


def make_block_batch(*, pack: Pack, use: Use, block_size: int, mask_token_id: int, chunk_rows: int) -> BlockBatch:
    """The blocks of one use, as CPU tensors.

    Slot k is supervised as long as the loss mask is true on every token from the anchor's next to its own and these lie
    in the anchor's document: the first hole ends the block. Rows are padded to a multiple of `chunk_rows`.
    """
    valid = use.anchor_valid
    anchors = np.where(valid, use.anchors, 0).astype(np.int64)
    document = np.searchsorted(pack.starts, anchors, side="right") - 1
    starts = np.where(valid, pack.starts[document], 0).astype(np.int64)
    slots = _supervised_slots(pack=pack, anchors=anchors, valid=valid, block_size=block_size)
    counts = [0, *(len(slots) - np.cumsum(np.bincount(slots, minlength=block_size))[:-1]).tolist()]
    assert counts == use.supervised_per_slot.tolist(), (
        f"pack {pack.pack_id}, use {use.use_number}: the plan counted {use.supervised_per_slot.tolist()} supervised slots, "
        f"the blocks have {counts}"
    )
    supervised = np.tri(block_size, dtype=np.bool_).take(slots, axis=0)
    supervised[:, 0] = False
    tokens = np.full((len(anchors), block_size), mask_token_id, dtype=np.int64)
    tokens[:, 0] = np.where(valid, pack.token_ids[anchors], mask_token_id)
    positions = np.where(valid, pack.position_ids[anchors], 0).astype(np.int64)[:, None] + np.arange(block_size)
    following = np.zeros(pack.capacity_tokens + block_size, dtype=np.int64)
    following[: pack.capacity_tokens] = pack.token_ids
    labels = np.lib.stride_tricks.sliding_window_view(following, block_size)[anchors]
    np.multiply(labels, supervised, out=labels)
    real = np.flatnonzero(supervised)
    return BlockBatch(
        pack_id=pack.pack_id,
        use_number=use.use_number,
        step=use.step,
        context_positions_T=torch.from_numpy(pack.position_ids.astype(np.int64)),
        context_document_T=torch.from_numpy(pack.document_of_token().astype(np.int64)),
        anchors_N=torch.from_numpy(anchors),
        anchor_start_N=torch.from_numpy(starts),
        anchor_valid_N=torch.from_numpy(valid.copy()),
        block_token_ids_NB=torch.from_numpy(tokens),
        positions_NB=torch.from_numpy(positions),
        labels_NB=torch.from_numpy(labels),
        supervised_NB=torch.from_numpy(supervised),
        rows_M=torch.from_numpy(_padded(real, chunk_rows)),
        num_rows=len(real),
    )


def batch_to(batch: BlockBatch, *, device: torch.device | str) -> BlockBatch:
    """The same batch with its tensors on a device. On CUDA they go through pinned memory, so that no copy waits."""
    return _sent(batch, partial(to_device, device=device))


def _sent(batch: BlockBatch, send: Send) -> BlockBatch:
    moved: dict[str, Any] = {
        field.name: send(value)
        for field in dataclasses.fields(batch)
        if isinstance(value := getattr(batch, field.name), torch.Tensor)
    }
    return dataclasses.replace(batch, **moved)


def to_device(tensor: torch.Tensor, *, device: torch.device | str) -> torch.Tensor:
    """A CPU tensor on a device, through pinned memory on CUDA: a pageable copy would wait for all that was launched before."""
    pinned = torch.device(device).type == "cuda"
    return (tensor.pin_memory() if pinned else tensor).to(device, non_blocking=True)


def place_batch(
    batch: BlockBatch, embedding_VD: torch.Tensor, *, device: torch.device | str, send: Send | None = None
) -> tuple[BlockBatch, torch.Tensor]:
    """A CPU batch on a device, and the embedding that it reads there: of one that lies elsewhere only the batch's own rows.

    Sent by `send`, or else by `to_device`.
    """
    send = send or partial(to_device, device=device)
    if embedding_VD.device.type != torch.device(device).type:
        batch, rows_UD = embedding_rows(batch, embedding_VD)
        embedding_VD = send(rows_UD)
    return _sent(batch, send), embedding_VD


def embedding_rows(batch: BlockBatch, embedding_VD: torch.Tensor) -> tuple[BlockBatch, torch.Tensor]:
    """A batch whose block tokens number the rows of a small embedding `[N + 1, D]` that comes with it: all on the CPU.

    For an embedding that is kept in host memory: anchors read row n, all other slots row N, the mask token's.
    """
    blocks, size = batch.block_token_ids_NB.shape
    tokens_U = torch.cat((batch.block_token_ids_NB[:, 0], batch.block_token_ids_NB[0, 1:2]))
    rows_UD = torch.empty(blocks + 1, embedding_VD.shape[1], dtype=embedding_VD.dtype)
    torch.index_select(embedding_VD, 0, tokens_U, out=rows_UD)
    numbers_NB = torch.full((blocks, size), blocks, dtype=torch.int64)
    numbers_NB[:, 0] = torch.arange(blocks)
    return dataclasses.replace(batch, block_token_ids_NB=numbers_NB), rows_UD


def _supervised_slots(*, pack: Pack, anchors: Int64Array, valid: BoolArray, block_size: int) -> Int64Array:
    """How many slots of each block are supervised, int64 `[N]`: the tokens between the anchor and the next unsupervised one."""
    ends_block = np.ones(pack.capacity_tokens + 1, dtype=np.bool_)
    np.logical_not(pack.loss_mask, out=ends_block[:-1])
    ends_block[pack.starts] = True
    ends = np.flatnonzero(ends_block)
    ends = ends[np.searchsorted(ends, anchors + 1)]
    slots: Int64Array = np.where(valid, np.minimum(ends - anchors - 1, block_size - 1), 0)
    return slots


def _padded(rows: Int64Array, chunk_rows: int) -> Int64Array:
    """Rows followed by 0s up to a multiple of the chunk: row 0 is slot 0 of block 0, which is never supervised."""
    padded = np.zeros(-(-len(rows) // chunk_rows) * chunk_rows, dtype=np.int64)
    padded[: len(rows)] = rows
    return padded
