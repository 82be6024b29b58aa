"""Exact greedy acceptance lengths without a decode loop: one teacher-forced pass, all anchors at once, then a scan.

Greedy speculation is lossless, so what a drafter meets is fixed by the target's own greedy answer: at any anchor it sees the
hidden states of the tokens before, and its drafts stand as far as they equal the answer. `score_pack` finds that length at
every position of every answer under the training mask; `walk` then jumps along the positions that decoding would visit.
It holds for any target, recurrent layers included. Capturing the hidden states is the caller's.

Exact to the last step: near the longest answer allowed, decoding cuts its blocks, and a bidirectional block that is cut
drafts otherwise than a whole one. Those few anchors of a pack are scored once more, under a mask that ends where the cut is.

Shape letters: T context tokens · N anchors · B block size · K tapped layers · D hidden · V vocabulary · M rows.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.device.finite import not_finite
from slipstream.device.sender import BatchSender
from slipstream.drafter.attention import FlexAttention
from slipstream.drafter.blocks import make_block_batch, place_batch
from slipstream.evaluate.summary import AcceptancePath
from slipstream.plan.evaluation import cover_rows
from slipstream.records import BlockBatch, Int32Array, Pack, Use

if TYPE_CHECKING:
    from slipstream.config import DrafterShape
    from slipstream.drafter.dflash import DFlashDrafter
    from slipstream.target.ends import FrozenEnds

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DocumentMatches:
    """Drafts that stand at each position of one prompt and answer.

    `match_L` int32 `[L]`: length of the leading run of drafts that equal the document's tokens, for a whole block anchored
    there; 0 outside the answer. `answer_start` is the position of the answer's first token. `row` is where the document
    starts in its pack.
    """

    document_id: int
    row: int
    answer_start: int
    token_ids: Int32Array
    match_L: Int32Array


@dataclass(frozen=True, slots=True)
class DocumentPath:
    """The path of one answer."""

    document_id: int
    path: AcceptancePath


@torch.no_grad()
def simulate_pack(
    *,
    drafter: DFlashDrafter,
    ends: FrozenEnds,
    shape: DrafterShape,
    hidden_TKD: Tensor,
    pack: Pack,
    uses: Sequence[Use],
    max_lengths: Mapping[int, int],
    chunk_rows: int = 1024,
    send: BatchSender | None = None,
) -> list[DocumentPath]:
    """The decode path of every document of a pack, a prompt and the target's greedy answer each.

    Of an embedding that lies elsewhere than the drafter, in host memory, only the rows that blocks read are copied to it.
    `uses` cover every anchor once (`plan_validation`). `max_lengths[document_id]` is the length in tokens, prompt included,
    that decoding would stop at (prompt + `max_new_tokens`). Hidden states that are not finite count as 0, and are told. Who
    calls again and again keeps a `send`: then nothing is allocated that the first calls had not.
    """
    scoring = _Scoring(
        drafter=drafter,
        ends=ends,
        shape=shape,
        hidden_TKD=_finite(hidden_TKD, pack=pack),
        pack=pack,
        chunk_rows=chunk_rows,
        send=send or BatchSender(drafter.device),
    )
    found = scoring.whole_blocks(uses)
    cut_T = scoring.cut_blocks(found, max_lengths=max_lengths, pack_anchors=len(uses[0].anchors) if uses else 0)
    paths = []
    for matches in found:
        cut_L = cut_T[matches.row : matches.row + len(matches.match_L)]
        path = walk(matches, block_size=shape.block_size, max_length=max_lengths[matches.document_id], cut_L=cut_L)
        paths.append(DocumentPath(document_id=matches.document_id, path=path))
    return paths


@torch.no_grad()
def score_pack(
    *,
    drafter: DFlashDrafter,
    ends: FrozenEnds,
    shape: DrafterShape,
    hidden_TKD: Tensor,
    pack: Pack,
    uses: Sequence[Use],
    chunk_rows: int = 1024,
) -> list[DocumentMatches]:
    """Match lengths at every anchor of a pack, whole blocks. `hidden_TKD` lies where the drafter does.

    Each use is one forward of the drafter under the training mask; logits are held `chunk_rows` rows at a time.
    """
    send = BatchSender(drafter.device)
    scoring = _Scoring(
        drafter=drafter, ends=ends, shape=shape, hidden_TKD=hidden_TKD, pack=pack, chunk_rows=chunk_rows, send=send
    )
    return scoring.whole_blocks(uses)


@dataclass(frozen=True, slots=True)
class _Scoring:
    """Drafts the blocks of one pack, a use at a time, and compares them with its tokens."""

    drafter: DFlashDrafter
    ends: FrozenEnds
    shape: DrafterShape
    hidden_TKD: Tensor
    pack: Pack
    chunk_rows: int
    send: BatchSender

    def whole_blocks(self, uses: Sequence[Use]) -> list[DocumentMatches]:
        """By document, from uses that cover every anchor once."""
        match_T, seen_T = self._nothing(), np.zeros(self.pack.capacity_tokens, dtype=np.bool_)
        for use in uses:
            anchors = use.anchors[use.anchor_valid]
            assert not seen_T[anchors].any(), "plan_validation covers every anchor once"
            seen_T[anchors] = True
            match_T[anchors] = self._matches(use)[use.anchor_valid]
        numbers = range(self.pack.num_documents)
        return [_document(self.pack, number, match_T=match_T, seen_T=seen_T) for number in numbers]

    def cut_blocks(self, found: Sequence[DocumentMatches], *, max_lengths: Mapping[int, int], pack_anchors: int) -> Int32Array:
        """Matches int32 `[T]` at every position at which a block would be cut, 0 elsewhere; `pack_anchors` a use."""
        size, slots_T, cut_T = self.shape.block_size, self._nothing(), self._nothing()
        for matches in found:
            last, limit = len(matches.match_L) - 1, max_lengths[matches.document_id]
            positions = np.arange(max(matches.answer_start, limit - size + 1), last, dtype=np.int32)
            slots_T[matches.row + positions] = limit - positions
        rows = np.flatnonzero(slots_T).astype(np.int32)
        # flex attention in the shape of the other uses, which it is compiled for; SDPA no larger than it has to be
        fixed = isinstance(self.drafter.kernel, FlexAttention)
        room = pack_anchors if fixed else max(1, min(len(rows), pack_anchors))
        for use in cover_rows(rows, pack=self.pack, pack_anchors=room, block_size=size):
            valid = use.anchor_valid
            lengths = np.where(valid, slots_T[use.anchors], np.int32(size))
            match_N = np.minimum(self._matches(use, lengths=lengths), lengths - 1)
            cut_T[use.anchors[valid]] = match_N[valid]
        return cut_T

    def _nothing(self) -> Int32Array:
        return np.zeros(self.pack.capacity_tokens, dtype=np.int32)

    def _matches(self, use: Use, *, lengths: Int32Array | None = None) -> Int32Array:
        """Drafts that stand at each anchor int32 `[N]`, of blocks that are cut to `lengths` slots `[N]`, or of whole ones."""
        shape, drafter = self.shape, self.drafter
        batch = make_block_batch(
            pack=self.pack,
            use=use,
            block_size=shape.block_size,
            mask_token_id=shape.mask_token_id,
            chunk_rows=self.chunk_rows,
        )
        masks = drafter.make_masks(batch, lengths=lengths, send=self.send)
        batch, embedding_VD = place_batch(batch, self.ends.embedding_VD, device=drafter.device, send=self.send)
        hidden_NBD = drafter(hidden_TKD=self.hidden_TKD, batch=batch, embedding_VD=embedding_VD, masks=masks)
        match_N = _match_lengths(hidden_NBD, head_VD=self.ends.head_VD, batch=batch, chunk_rows=self.chunk_rows)
        self.send.arrived()
        return match_N


def walk(matches: DocumentMatches, *, block_size: int, max_length: int, cut_L: Int32Array) -> AcceptancePath:
    """Follow the positions that greedy decoding visits, from the answer's first token to its last.

    A step from position s produces `min(match + 1, last - s)` tokens. Where fewer than B positions are left before
    `max_length`, the block is cut and `cut_L` int32 `[L]` says what stands of it.
    """
    lengths, accepted = [], []
    start, last = matches.answer_start, len(matches.match_L) - 1
    assert last < max_length, "an answer is not longer than it may be"
    while start < last:
        slots = min(block_size, max_length - start)
        match = int((matches.match_L if slots == block_size else cut_L)[start])
        length = min(match + 1, last - start)
        lengths.append(length)
        accepted.append(min(match, length))
        start += length
    return AcceptancePath(lengths=tuple(lengths), accepted=tuple(accepted))


def _match_lengths(hidden_NBD: Tensor, *, head_VD: Tensor, batch: BlockBatch, chunk_rows: int) -> Int32Array:
    """Leading runs of hits int32 `[N]` over the supervised slots of each anchor. Waits for the device."""
    hidden_QD = hidden_NBD.flatten(0, 1)
    rows_M = batch.rows_M[: batch.num_rows]
    labels_M = batch.labels_NB.flatten()[rows_M]
    hits_Q = torch.zeros(len(hidden_QD), dtype=torch.bool, device=hidden_QD.device)
    for chunk in range(0, batch.num_rows, chunk_rows):
        rows = rows_M[chunk : chunk + chunk_rows]
        hits_Q[rows] = _argmax(hidden_QD[rows], head_VD=head_VD) == labels_M[chunk : chunk + chunk_rows]
    hits_NB = hits_Q.view(batch.labels_NB.shape)[:, 1:]
    match_N: Int32Array = hits_NB.int().cumprod(dim=1).sum(dim=1).cpu().numpy().astype(np.int32)
    return match_N


def _finite(hidden_TKD: Tensor, *, pack: Pack) -> Tensor:
    """The states, or a copy with 0 for what is not finite: a masked NaN would spoil the figures of all other documents."""
    bad = int(not_finite(hidden_TKD[: pack.num_tokens]).sum())
    if not bad:
        return hidden_TKD
    log.warning("pack %d: %d hidden-state rows are not finite; acceptance is measured with 0 there", pack.pack_id, bad)
    return hidden_TKD.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def _argmax(hidden_MD: Tensor, *, head_VD: Tensor) -> Tensor:
    return F.linear(hidden_MD.to(head_VD.dtype), head_VD).argmax(dim=-1)


def _document(pack: Pack, number: int, *, match_T: Int32Array, seen_T: np.ndarray[Any, np.dtype[np.bool_]]) -> DocumentMatches:
    row, end = int(pack.starts[number]), int(pack.starts[number + 1])
    mask = pack.loss_mask[row:end]
    answer_start = int(mask.argmax())
    assert mask[answer_start:].all(), "a validation document is a prompt and one answer up to its end"
    assert seen_T[row + answer_start : end - 1].all(), "every position of an answer has its anchor"
    return DocumentMatches(
        document_id=int(pack.document_ids[number]),
        row=row,
        answer_start=answer_start,
        token_ids=pack.token_ids[row:end],
        match_L=match_T[row:end],
    )
