"""How the documents of a pack share forward passes: pure bookkeeping in NumPy, a function of the pack alone.

Right padding needs no mask in a causal model: what comes after a token never reaches it, in attention, convolution or
recurrent state alike. (Left padding, in `generate`, does need one.)
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from slipstream.records import Int32Array, Int64Array, Pack

CHUNK_TOKENS = 64
"""Tokens in a chunk of the delta rule and of the convolution: FLA's block, which its kernels share."""


class Packing(StrEnum):
    """How documents share a forward pass."""

    PACKED = "packed"
    """One row holds all documents; attention tells them apart by their position ids."""
    PADDED = "padded"
    """One document a row, several rows a forward, padded on the right."""
    ALONE = "alone"
    """One forward for each document."""


@dataclass(frozen=True, slots=True)
class Span:
    """`length` tokens from the beginning of `row` of a forward, which are the pack's tokens from `start` on."""

    row: int
    length: int
    start: int


@dataclass(frozen=True, slots=True)
class Forward:
    """One forward pass: `token_ids` and `position_ids` int64 `[R, L]`, and where its rows belong in the pack.

    `cu_seqlens` int32 `[M + 1]` are the borders of its sequences when the rows are laid end to end; the last is R · L, so that
    no kernel leaves a token unwritten: padding is one more sequence, or the tail of its row.
    """

    token_ids: Int64Array
    position_ids: Int64Array
    spans: tuple[Span, ...]
    cu_seqlens: Int32Array

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return int(np.diff(self.cu_seqlens).max())


def lay_out(pack: Pack, *, packing: Packing) -> list[Forward]:
    """The forward passes that compute a pack. Padded ones hold at most as many tokens as the pack, padding counted."""
    if pack.num_tokens == 0:
        return []
    if packing is Packing.PACKED:
        row = pack.token_ids.astype(np.int64)[None], pack.position_ids.astype(np.int64)[None]
        return [Forward(*row, spans=(Span(row=0, length=pack.num_tokens, start=0),), cu_seqlens=pack.cu_seqlens())]
    return [_rows(pack, documents=group) for group in _groups(pack, packing=packing)]


def _groups(pack: Pack, *, packing: Packing) -> list[list[int]]:
    """Documents by falling length, as many to a group as fit the pack's own size: similar lengths waste little padding."""
    if packing is Packing.ALONE:
        return [[document] for document in range(pack.num_documents)]
    lengths = np.diff(pack.starts)
    groups: list[list[int]] = []
    for document in np.argsort(-lengths, kind="stable").tolist():
        if groups and (len(groups[-1]) + 1) * lengths[groups[-1][0]] <= pack.capacity_tokens:
            groups[-1].append(document)
        else:
            groups.append([document])
    return groups


def _rows(pack: Pack, *, documents: list[int]) -> Forward:
    starts, lengths = pack.starts[:-1], np.diff(pack.starts)
    longest = int(max(lengths[document] for document in documents))
    token_ids = np.zeros((len(documents), longest), dtype=np.int64)
    spans = []
    for row, document in enumerate(documents):
        start, length = int(starts[document]), int(lengths[document])
        token_ids[row, :length] = pack.token_ids[start : start + length]
        spans.append(Span(row=row, length=length, start=start))
    position_ids = np.tile(np.arange(longest, dtype=np.int64), (len(documents), 1))
    borders = np.arange(len(documents) + 1, dtype=np.int32) * np.int32(longest)
    return Forward(token_ids=token_ids, position_ids=position_ids, spans=tuple(spans), cu_seqlens=borders)


def chunk_indices(cu_seqlens: Int32Array, *, chunk_tokens: int = CHUNK_TOKENS) -> Int32Array:
    """Which sequence, and which chunk of it, each program of a chunked kernel computes: int32 `[C, 2]`, in row order.

    What FLA's `prepare_chunk_indices` computes on the device, where it would make the CPU wait.
    """
    counts = -(-np.diff(cu_seqlens) // chunk_tokens)
    sequences = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    firsts = np.repeat(np.cumsum(counts) - counts, counts)
    return np.stack((sequences, np.arange(len(sequences)) - firsts), axis=1).astype(np.int32)
