"""Proof of an exported folder: the `dflash` package reads it and computes what our drafter computes.

Both load the folder in fp32 and draft the same blocks after the same context: ours in one training pass and in decode mode,
theirs block by block. Hidden states are random; embedding and head are the target's own where the caller has them.

Shape letters: T context tokens · N anchors · B block size · K tapped layers · D hidden · V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.utils import logging as transformers_logging

from slipstream.config import DrafterShape
from slipstream.drafter import build_drafter, make_block_batch
from slipstream.drafter.dflash import DFlashDrafter
from slipstream.errors import ExportError
from slipstream.export.dflash_format import CONFIG, WEIGHTS, read_dflash
from slipstream.records import Pack, Use

TOLERANCE = 1e-4
"""Largest difference of logits, as a share of the largest logit."""
ANCHORS = (2, 9, 33, 90)
"""Row positions of the blocks that are compared; drafters that slide get one more, where the window leaves context out."""
TILE = 128


@dataclass(frozen=True, slots=True)
class Verified:
    """How far the two were apart: largest difference of logits as a share of the largest logit, and slots compared."""

    largest_difference: float
    slots: int


@torch.no_grad()
def verify_export(folder: Path, *, embedding_VD: Tensor, head_VD: Tensor) -> Verified:
    """Compare an exported folder with the `dflash` package's reading of it, on the CPU in fp32.

    Raises `ExportError` when that package is missing or misses a key, when logits differ by more than `TOLERANCE` of the
    largest, or when any slot's argmax differs.
    """
    shape, state = read_dflash(folder)
    drafter = build_drafter(shape=shape, dtype="float32", device="cpu", seed=None, attention="sdpa")
    drafter.load_state_dict(state)
    embedding_VD, head_VD = embedding_VD.float().cpu(), head_VD.float().cpu()
    generator = torch.Generator().manual_seed(0)
    anchors = _anchors(shape)
    count = -(-(anchors[-1] + shape.block_size) // TILE) * TILE
    hidden_TKD = torch.randn(count, shape.num_taps, shape.hidden_size, generator=generator)
    tokens = torch.randint(0, shape.vocab_size, (count,), generator=generator).numpy().astype(np.int32)
    theirs_NBD = _theirs(_load_theirs(folder), shape=shape, tokens=tokens, hidden_TKD=hidden_TKD, embedding_VD=embedding_VD)
    worst = 0.0
    for mode, compute in (("training", _ours_trained), ("decode", _ours_decoded)):
        ours_NBD = compute(drafter, tokens=tokens, hidden_TKD=hidden_TKD, embedding_VD=embedding_VD)
        worst = max(worst, _compare(ours_NBD, theirs_NBD, head_VD=head_VD, mode=mode))
    return Verified(largest_difference=worst, slots=len(anchors) * (shape.block_size - 1))


def _compare(ours_NBD: Tensor, theirs_NBD: Tensor, *, head_VD: Tensor, mode: str) -> float:
    # Slot 0 is the anchor itself: nobody reads its prediction.
    ours, theirs = (F.linear(hidden[:, 1:], head_VD) for hidden in (ours_NBD, theirs_NBD))
    difference = float((ours - theirs).abs().max() / theirs.abs().max())
    if not difference <= TOLERANCE:  # so that NaN is refused too
        rule = f"logits of the dflash package differ from ours ({mode} mode) by more than {TOLERANCE} of the largest"
        raise ExportError(key=WEIGHTS, value=difference, rule=rule)
    apart = int((ours.argmax(dim=-1) != theirs.argmax(dim=-1)).sum())
    if apart:
        rule = f"the dflash package drafts other tokens than our drafter ({mode} mode)"
        raise ExportError(key=WEIGHTS, value=f"{apart} slots", rule=rule)
    return difference


def _ours_trained(drafter: DFlashDrafter, *, tokens: np.ndarray[Any, Any], hidden_TKD: Tensor, embedding_VD: Tensor) -> Tensor:
    pack, use = _one_document(tokens, shape=drafter.shape)
    shape = drafter.shape
    batch = make_block_batch(pack=pack, use=use, block_size=shape.block_size, mask_token_id=shape.mask_token_id, chunk_rows=16)
    hidden_NBD: Tensor = drafter(hidden_TKD=hidden_TKD, batch=batch, embedding_VD=embedding_VD)
    return hidden_NBD


def _ours_decoded(drafter: DFlashDrafter, *, tokens: np.ndarray[Any, Any], hidden_TKD: Tensor, embedding_VD: Tensor) -> Tensor:
    context, written, blocks = drafter.new_context(), 0, []
    for anchor in _anchors(drafter.shape):
        drafter.extend_context(context, hidden_TKD[written:anchor], written)
        written = anchor
        block = _block(drafter.shape, token=int(tokens[anchor]))
        blocks.append(drafter.draft(context, block, anchor, embedding_VD))
    return torch.stack(blocks)


def _theirs(
    model: Any, *, shape: DrafterShape, tokens: np.ndarray[Any, Any], hidden_TKD: Tensor, embedding_VD: Tensor
) -> Tensor:
    blocks = []
    for anchor in _anchors(shape):
        noise = F.embedding(_block(shape, token=int(tokens[anchor])), embedding_VD)
        positions = torch.arange(anchor + shape.block_size)
        context = hidden_TKD[:anchor].flatten(1)
        blocks.append(model(position_ids=positions[None], noise_embedding=noise[None], target_hidden=context[None])[0])
    return torch.stack(blocks)


def _load_theirs(folder: Path) -> Any:
    try:
        from dflash.model import DFlashDraftModel
    except ImportError as error:
        raise ExportError(
            key="dflash",
            value=str(error),
            rule="the package that reads the export back cannot be imported; nothing is exported unread",
            hint="pip install --no-deps dflash",
        ) from error
    with _no_bar():
        model, report = DFlashDraftModel.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if report.get(kind):
            raise ExportError(key=WEIGHTS, value=sorted(report[kind]), rule=f"the dflash package reports {kind}")
    shape, _ = read_dflash(folder)
    for key, read, ours in (
        ("dflash_config.target_layer_ids", list(model.target_layer_ids), list(shape.tap_layers)),
        ("block_size", model.block_size, shape.block_size),
        ("mask_token_id", model.mask_token_id, shape.mask_token_id),
    ):
        if read != ours:
            raise ExportError(key=f"{CONFIG}: {key}", value=read, rule=f"the dflash package reads that, we wrote {ours}")
    return model.eval()


@contextmanager
def _no_bar() -> Iterator[None]:
    """Loading takes a blink; transformers' progress bar would be the only thing seen of it."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def _anchors(shape: DrafterShape) -> list[int]:
    return sorted({*ANCHORS, *([shape.sliding_window + 7] if shape.sliding_window else [])})


def _block(shape: DrafterShape, *, token: int) -> Tensor:
    block = torch.full((shape.block_size,), shape.mask_token_id, dtype=torch.long)
    block[0] = token
    return block


def _one_document(tokens: np.ndarray[Any, Any], *, shape: DrafterShape) -> tuple[Pack, Use]:
    """A pack of one document that is all answer, and a use of it with the compared blocks."""
    count, anchors = len(tokens), _anchors(shape)
    supervised = np.array([0] + [len(anchors)] * (shape.block_size - 1), dtype=np.int64)
    pack = Pack(
        pack_id=0,
        epoch=0,
        column=0,
        slot=0,
        document_ids=np.zeros(1, dtype=np.int64),
        starts=np.array([0, count], dtype=np.int32),
        token_ids=tokens,
        position_ids=np.arange(count, dtype=np.int32),
        loss_mask=np.ones(count, dtype=np.bool_),
    )
    use = Use(
        step=0,
        pack_id=0,
        use_number=0,
        anchors=np.array(anchors, dtype=np.int32),
        anchor_valid=np.ones(len(anchors), dtype=np.bool_),
        supervised_per_slot=supervised,
        is_last=True,
    )
    return pack, use
