"""Packs, uses and small drafters that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from slipstream.config import DrafterShape
from slipstream.config.recipe import LayerType
from slipstream.drafter import make_block_batch
from slipstream.records import BlockBatch, Pack, Use

MASK_TOKEN = 250


@dataclass(frozen=True)
class Case:
    """A pack, the anchors of one use, and the batch made of them."""

    pack: Pack
    use: Use
    batch: BlockBatch
    hidden_TKD: torch.Tensor


def make_shape(
    *, layer_types: Sequence[LayerType] = ("full", "full"), window: int | None = None, block: int = 4
) -> DrafterShape:
    """Two taps, hidden 32, four query heads on two key-value heads of width 16."""
    return DrafterShape(
        num_layers=len(layer_types),
        block_size=block,
        mask_token_id=MASK_TOKEN,
        tap_layers=(1, 3),
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=256,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        max_position_embeddings=512,
        layer_types=tuple(layer_types),
        sliding_window=window,
        num_target_layers=6,
        initializer_range=0.2,
    )


def make_pack(*, lengths: Sequence[int], capacity: int, seed: int = 0, holes: float = 0.0) -> Pack:
    """Documents of these lengths; the loss mask leaves out the first two tokens of each, and holes at random."""
    rng = np.random.default_rng(seed)
    starts = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    mask = np.zeros(capacity, dtype=bool)
    positions = np.zeros(capacity, dtype=np.int32)
    for start, end in zip(starts, [*starts[1:], capacity], strict=True):
        positions[start:end] = np.arange(end - start)
        mask[start + 2 : end] = rng.random(max(0, end - start - 2)) >= holes
    mask[starts[-1] :] = False
    tokens = rng.integers(1, MASK_TOKEN, capacity).astype(np.int32)
    tokens[starts[-1] :] = 0
    return Pack(
        pack_id=7,
        epoch=0,
        column=0,
        slot=0,
        document_ids=np.arange(len(lengths), dtype=np.int64),
        starts=starts,
        token_ids=tokens,
        position_ids=positions,
        loss_mask=mask,
    )


def make_use(*, pack: Pack, anchors: Sequence[int], slots: int, block: int) -> Use:
    """These anchors, then empty slots; the supervised counts are computed token by token."""
    document = pack.document_of_token()
    counts = np.zeros(block, dtype=np.int64)
    for anchor in anchors:
        for k in range(1, block):
            at = anchor + k
            if at >= pack.capacity_tokens or document[at] != document[anchor] or not pack.loss_mask[at]:
                break
            counts[k] += 1
    padded = np.zeros(slots, dtype=np.int32)
    padded[: len(anchors)] = anchors
    return Use(
        step=3,
        pack_id=pack.pack_id,
        use_number=1,
        anchors=padded,
        anchor_valid=np.arange(slots) < len(anchors),
        supervised_per_slot=counts,
        is_last=False,
    )


def valid_anchors(pack: Pack) -> np.ndarray:
    """Positions whose own and next token are in the loss mask and in one document."""
    document, mask = pack.document_of_token(), pack.loss_mask
    return np.flatnonzero(mask[:-1] & mask[1:] & (document[:-1] == document[1:]))


def make_case(
    *,
    lengths: Sequence[int] = (40, 25, 37),
    capacity: int = 128,
    slots: int = 32,
    block: int = 4,
    seed: int = 0,
    holes: float = 0.1,
    num_anchors: int | None = None,
    chunk_rows: int = 16,
) -> Case:
    """A pack with as many anchors as it can fill (overlapping blocks among them), and random hidden states."""
    pack = make_pack(lengths=lengths, capacity=capacity, seed=seed, holes=holes)
    rng = np.random.default_rng(seed + 1)
    candidates = valid_anchors(pack)
    count = min(slots, len(candidates)) if num_anchors is None else num_anchors
    anchors = np.sort(rng.permutation(candidates)[:count]).tolist()
    use = make_use(pack=pack, anchors=anchors, slots=slots, block=block)
    batch = make_block_batch(pack=pack, use=use, block_size=block, mask_token_id=MASK_TOKEN, chunk_rows=chunk_rows)
    hidden = torch.randn(capacity, 2, 32, generator=torch.Generator().manual_seed(seed))
    return Case(pack=pack, use=use, batch=batch, hidden_TKD=hidden)


def make_embedding(seed: int = 5) -> torch.Tensor:
    """A frozen embedding `[256, 32]`."""
    return torch.randn(256, 32, generator=torch.Generator().manual_seed(seed))
