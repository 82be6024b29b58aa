"""A made-up step for benches: packs of equal documents, all slots of all anchors supervised, and what it is worth in FLOP.

T context tokens, N anchors, B block size, D hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slipstream.config import DrafterShape
from slipstream.drafter import make_block_batch
from slipstream.plan.flops import drafter_flops
from slipstream.records import Pack, Use
from slipstream.trainer.prefetch import PreparedColumn


@dataclass(frozen=True, slots=True)
class DrafterWork:
    """What a step trains on: `packs` packs of `documents` documents, all slots of all anchors supervised."""

    documents: int = 2
    document_tokens: int = 2048
    anchors: int = 1024
    packs: int = 1
    chunk_rows: int = 3328
    steps: int = 12
    cuda_graphs: str = "auto"


def useful_tflop(*, shape: DrafterShape, pack: Pack, use: Use, num_rows: int) -> float:
    """Useful floating-point operations, in 1e12, of one pack: `drafter_flops`, on the pairs that its anchors see."""
    starts = pack.starts[np.searchsorted(pack.starts, use.anchors, side="right") - 1]
    pairs = float(((use.anchors - starts) + shape.block_size).sum()) * shape.block_size
    work = drafter_flops(shape=shape, tokens=pack.capacity_tokens, anchors=len(use.anchors), visible_pairs=pairs, rows=num_rows)
    return work / 1e12


def make_columns(*, shape: DrafterShape, work: DrafterWork, seed: int = 0) -> tuple[list[PreparedColumn], float]:
    """The step's packs with sorted random anchors, each followed by B - 1 tokens of its document; their useful TFLOP."""
    columns, worth, size, length = [], 0.0, shape.block_size, work.document_tokens
    tokens = work.documents * length
    for index in range(work.packs):
        rng = np.random.default_rng((seed, index))
        each = work.anchors // work.documents
        drawn = [np.sort(rng.permutation(length - size)[:each]) + length * place for place in range(work.documents)]
        anchors = np.concatenate(drawn).astype(np.int32)
        pack = Pack(
            pack_id=index, epoch=0, column=index, slot=0,
            document_ids=np.arange(work.documents, dtype=np.int64),
            starts=(np.arange(work.documents + 1) * length).astype(np.int32),
            token_ids=rng.integers(0, shape.mask_token_id, tokens).astype(np.int32),
            position_ids=np.tile(np.arange(length, dtype=np.int32), work.documents),
            loss_mask=np.ones(tokens, dtype=bool),
        )  # fmt: skip
        counts = np.full(size, len(anchors), dtype=np.int64)
        counts[0] = 0
        use = Use(
            step=0, pack_id=index, use_number=0, anchors=anchors, anchor_valid=np.ones(len(anchors), dtype=bool),
            supervised_per_slot=counts, is_last=False,
        )  # fmt: skip
        batch = make_block_batch(
            pack=pack, use=use, block_size=size, mask_token_id=shape.mask_token_id, chunk_rows=work.chunk_rows
        )
        columns.append(PreparedColumn(use=use, batch=batch, context_tokens=tokens, unique_tokens=tokens))
        worth += useful_tflop(shape=shape, pack=pack, use=use, num_rows=batch.num_rows)
    return columns, worth
