"""Exact greedy acceptance lengths without a decode loop: one teacher-forced pass, all anchors at once, then a scan.

Greedy speculation is lossless, so what a drafter meets is fixed by the target's own greedy answer: at any anchor it sees the
hidden states of the tokens before, and its drafts stand as far as they equal the answer. `score_pack` finds that length at
every position of every answer under the training mask; `walk` then jumps along the positions that decoding would visit.
It holds for any target, recurrent layers included. Capturing the hidden states is the caller's.

Exact to the last step: near the longest answer allowed, decoding cuts its blocks, and a bidirectional block that is cut
drafts otherwise than a whole one; those few anchors are drafted again in decode mode, only where the path steps on them.

Shape letters: T context tokens · N anchors · B block size · K tapped layers · D hidden · V vocabulary · M rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.drafter.blocks import make_block_batch, place_batch
from slipstream.evaluate.summary import AcceptancePath
from slipstream.records import BlockBatch, Int32Array, Pack, Use

if TYPE_CHECKING:
    from slipstream.config import DrafterShape
    from slipstream.drafter.dflash import DFlashDrafter
    from slipstream.target.ends import FrozenEnds

CutMatch = Callable[[int, int], int]
"""`(position, slots)` → drafts that stand when the block at that position of the document is cut to so many slots."""


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
) -> list[DocumentPath]:
    """The decode path of every document of a pack, a prompt and the target's greedy answer each.

    Of an embedding that lies elsewhere than the drafter, in host memory, only the rows that blocks read are copied to it.
    `uses` cover every anchor once (`plan_validation`). `max_lengths[document_id]` is the length in tokens, prompt included,
    that decoding would stop at (prompt + `max_new_tokens`).
    """
    found = score_pack(
        drafter=drafter, ends=ends, shape=shape, hidden_TKD=hidden_TKD, pack=pack, uses=uses, chunk_rows=chunk_rows
    )
    paths = []
    for matches in found:
        cut = CutBlocks(drafter=drafter, ends=ends, shape=shape, hidden_TKD=hidden_TKD, matches=matches)
        max_length = max_lengths[matches.document_id]
        path = walk(matches, block_size=shape.block_size, max_length=max_length, cut=cut.match)
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
    match_T = np.zeros(pack.capacity_tokens, dtype=np.int32)
    seen_T = np.zeros(pack.capacity_tokens, dtype=np.bool_)
    for use in uses:
        batch = make_block_batch(
            pack=pack, use=use, block_size=shape.block_size, mask_token_id=shape.mask_token_id, chunk_rows=chunk_rows
        )
        masks = drafter.make_masks(batch)
        batch, embedding_VD = place_batch(batch, ends.embedding_VD, device=drafter.device)
        hidden_NBD = drafter(hidden_TKD=hidden_TKD, batch=batch, embedding_VD=embedding_VD, masks=masks)
        match_N = _match_lengths(hidden_NBD, head_VD=ends.head_VD, batch=batch, chunk_rows=chunk_rows)
        anchors = use.anchors[use.anchor_valid]
        assert not seen_T[anchors].any(), "plan_validation covers every anchor once"
        seen_T[anchors] = True
        match_T[anchors] = match_N[use.anchor_valid]
    return [_document(pack, number, match_T=match_T, seen_T=seen_T) for number in range(pack.num_documents)]


def walk(matches: DocumentMatches, *, block_size: int, max_length: int, cut: CutMatch) -> AcceptancePath:
    """Follow the positions that greedy decoding visits, from the answer's first token to its last.

    A step from position s produces `min(match + 1, last - s)` tokens. Where fewer than B positions are left before
    `max_length`, the block is cut and `cut` says what stands of it.
    """
    lengths, accepted = [], []
    start, last = matches.answer_start, len(matches.match_L) - 1
    assert last < max_length, "an answer is not longer than it may be"
    while start < last:
        slots = min(block_size, max_length - start)
        match = int(matches.match_L[start]) if slots == block_size else cut(start, slots)
        length = min(match + 1, last - start)
        lengths.append(length)
        accepted.append(min(match, length))
        start += length
    return AcceptancePath(lengths=tuple(lengths), accepted=tuple(accepted))


class CutBlocks:
    """Drafts shorter blocks of one document in decode mode. Positions must be asked for in ascending order."""

    def __init__(
        self, *, drafter: DFlashDrafter, ends: FrozenEnds, shape: DrafterShape, hidden_TKD: Tensor, matches: DocumentMatches
    ) -> None:
        self._drafter, self._ends, self._mask_token_id = drafter, ends, shape.mask_token_id
        self._matches = matches
        self._hidden_LKD = hidden_TKD[matches.row : matches.row + len(matches.match_L)]
        self._context: Any = None
        self._written = 0

    @torch.no_grad()
    def match(self, position: int, slots: int) -> int:
        """Leading drafts that equal the document's tokens, of a block of `slots` slots anchored at `position`."""
        if self._context is None:
            self._context = self._drafter.new_context()
        self._drafter.extend_context(self._context, self._hidden_LKD[self._written : position], self._written)
        self._written = position
        block, embedding_VD = self._block(int(self._matches.token_ids[position]), slots)
        hidden_BD = self._drafter.draft(self._context, block, position, embedding_VD)
        drafted = _argmax(hidden_BD[1:], head_VD=self._ends.head_VD).cpu().numpy()
        truth = self._matches.token_ids[position + 1 : position + slots]
        return int((drafted[: len(truth)] == truth).cumprod().sum())

    def _block(self, token_id: int, slots: int) -> tuple[Tensor, Tensor]:
        """Token ids `[slots]` of a block, and the embedding that they number rows of: two rows of one that lies elsewhere."""
        embedding_VD, device, mask_token_id = self._ends.embedding_VD, self._hidden_LKD.device, self._mask_token_id
        if embedding_VD.device.type != device.type:
            # not through pinned memory, of which a late first block would need more; drafting one waits anyway
            embedding_VD = embedding_VD[torch.tensor([token_id, mask_token_id])].to(device)
            token_id, mask_token_id = 0, 1
        block = torch.full((slots,), mask_token_id, dtype=torch.long, device=device)
        block[0] = token_id
        return block, embedding_VD


def _match_lengths(hidden_NBD: Tensor, *, head_VD: Tensor, batch: BlockBatch, chunk_rows: int) -> Int32Array:
    """Leading runs of hits int32 `[N]` over the supervised slots of each anchor."""
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
