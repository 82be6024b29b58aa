"""Who sees whom: every slot of a block sees two intervals of keys, one of the context and one of its own block.

Keys are numbered as in attention: context rows 0 to T - 1, then the slots of all blocks, T to T + Q - 1. A context token
is seen only strictly before the anchor: the anchor's own hidden state does not exist yet when a server drafts.

Shape letters: T context tokens · N anchors · B block size · Q = N * B slots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask

from slipstream.config.recipe import LayerType
from slipstream.drafter.blocks import to_device
from slipstream.records import BoolArray, Int32Array, Int64Array

TILE = 128
"""Rows and columns of a tile of flex attention's block mask."""

IntArray = Int32Array | Int64Array

MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Spans:
    """Keys that each slot sees: `[context_from, context_to)` and `[own_from, own_to)`, all int32 `[Q]`, own ones from T on.

    `context_tokens` is T. An anchor that is not valid has an empty context span; no own span is ever empty.
    """

    context_tokens: int
    block_size: int
    context_from: Int32Array
    context_to: Int32Array
    own_from: Int32Array
    own_to: Int32Array


def make_spans(
    *,
    kind: LayerType,
    anchors: IntArray,
    starts: IntArray,
    valid: BoolArray,
    block_size: int,
    context_tokens: int,
    window: int | None,
) -> Spans:
    """Spans of one kind of layer; `anchors`, `starts` (first row of the anchor's document) and `valid` are `[N]`.

    A full layer sees all of the document before the anchor and the whole block. A sliding layer sees what is less than
    `window` tokens before the slot, itself counted, and nothing after the slot: the served, token-level window.
    """
    slot = np.tile(np.arange(block_size, dtype=np.int32), len(anchors))
    anchor = np.repeat(np.where(valid, anchors, 0), block_size)
    start = np.repeat(np.where(valid, starts, 0), block_size)
    block = context_tokens + np.repeat(np.arange(len(anchors), dtype=np.int32) * block_size, block_size)
    lower, first, last = start, np.zeros_like(slot), np.full_like(slot, block_size - 1)
    if kind == "sliding":
        assert window is not None, "a sliding layer needs a window"
        lower = np.minimum(np.maximum(start, anchor + slot - window + 1), anchor)
        first, last = np.maximum(slot - window + 1, 0), slot
    return Spans(
        context_tokens=context_tokens,
        block_size=block_size,
        context_from=lower.astype(np.int32),
        context_to=anchor.astype(np.int32),
        own_from=(block + first).astype(np.int32),
        own_to=(block + last + 1).astype(np.int32),
    )


def dense_mask(
    spans: Spans, *, slots: slice = slice(None), context: slice | None = None, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Bool `[slots, context + slots]`, true where seen: the part of the mask for a range of whole blocks and of context rows.

    `slots` covers whole blocks, `context` the rows whose keys are handed over; by default all of both.
    """
    context = slice(0, spans.context_tokens) if context is None else context
    first, last, _ = slots.indices(len(spans.own_to))
    keys = torch.cat(
        (
            torch.arange(context.start, context.stop, dtype=torch.int32, device=device),
            torch.arange(first, last, dtype=torch.int32, device=device) + spans.context_tokens,
        )
    )
    context_from, context_to, own_from, own_to = (
        torch.from_numpy(span[slots]).to(device)[:, None]
        for span in (spans.context_from, spans.context_to, spans.own_from, spans.own_to)
    )
    return ((keys >= context_from) & (keys < context_to)) | ((keys >= own_from) & (keys < own_to))


def span_mask_mod(
    context_from: torch.Tensor, context_to: torch.Tensor, own_from: torch.Tensor, own_to: torch.Tensor
) -> MaskMod:
    """Flex attention's mask function of all kinds of layer; only tensors are captured, so a new pack recompiles nothing."""

    def sees(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        before = (key >= context_from[query]) & (key < context_to[query])
        own = (key >= own_from[query]) & (key < own_to[query])
        return before | own

    return sees


@dataclass(frozen=True, slots=True)
class TileIndices:
    """The tiles of one side (for each row of tiles, its columns): how many, and which, ascending, seen ones first.

    int32 `[rows]` and `[rows, columns]`; partial tiles need the mask function, full ones do not.
    """

    num_partial: Int32Array
    partial: Int32Array
    num_full: Int32Array
    full: Int32Array


def tile_indices(spans: Spans) -> tuple[TileIndices, TileIndices]:
    """The block mask's arrays by queries and by keys, from interval arithmetic alone: no `[Q, T + Q]` mask is ever made.

    T and Q must be multiples of 128, so that no tile holds keys of both spans.
    """
    assert spans.context_tokens % TILE == 0, "flex attention needs T to be a multiple of 128"
    assert len(spans.own_to) % TILE == 0, "flex attention needs N * B to be a multiple of 128"
    columns = (spans.context_tokens + len(spans.own_to)) // TILE
    some = np.zeros((len(spans.own_to) // TILE, columns), dtype=bool)
    every = np.zeros_like(some)
    for begin, end in ((spans.context_from, spans.context_to), (spans.own_from, spans.own_to)):
        some |= _touched(begin, end, columns)
        every |= _covered(begin, end, columns)
    partial = some & ~every
    return _indices(partial=partial, full=every), _indices(partial=partial.T, full=every.T)


def flex_block_mask(spans: Spans, *, device: torch.device | str = "cpu") -> BlockMask:
    """Flex attention's `BlockMask`, equal to what `create_block_mask` finds by evaluating the whole mask."""
    arrays: dict[str, Any] = {}
    for names, side in zip((("kv", "full_kv"), ("q", "full_q")), tile_indices(spans), strict=True):
        for name, count, indices in zip(names, (side.num_partial, side.num_full), (side.partial, side.full), strict=True):
            arrays[f"{name}_num_blocks"] = _on(count[None, None], device)
            arrays[f"{name}_indices"] = _on(indices[None, None], device)
    captured = (spans.context_from, spans.context_to, spans.own_from, spans.own_to)
    mask_mod = span_mask_mod(*(_on(span, device) for span in captured))
    queries = len(spans.own_to)
    lengths = (queries, spans.context_tokens + queries)
    return BlockMask(seq_lengths=lengths, BLOCK_SIZE=(TILE, TILE), mask_mod=mask_mod, **arrays)


def _on(array: Int32Array, device: torch.device | str) -> torch.Tensor:
    return to_device(torch.from_numpy(array), device=device)


def _touched(begin: Int32Array, end: Int32Array, columns: int) -> BoolArray:
    """Tiles `[rows, columns]` in which some query of the row sees some key."""
    rows = len(begin) // TILE
    row = np.repeat(np.arange(rows), TILE)
    seen = end > begin
    entry = (row * (columns + 1) + begin // TILE)[seen]
    leave = (row * (columns + 1) + (end - 1) // TILE + 1)[seen]
    size = rows * (columns + 1)
    steps = np.bincount(entry, minlength=size) - np.bincount(leave, minlength=size)
    touched: BoolArray = np.cumsum(steps.reshape(rows, columns + 1), axis=1)[:, :columns] > 0
    return touched


def _covered(begin: Int32Array, end: Int32Array, columns: int) -> BoolArray:
    """Tiles `[rows, columns]` in which every query of the row sees every key."""
    latest = begin.reshape(-1, TILE).max(axis=1)[:, None]
    earliest = end.reshape(-1, TILE).min(axis=1)[:, None]
    edges = np.arange(columns)[None] * TILE
    covered: BoolArray = (latest <= edges) & (earliest >= edges + TILE)
    return covered


def _indices(*, partial: BoolArray, full: BoolArray) -> TileIndices:
    def order(tiles: BoolArray) -> Int32Array:
        return np.argsort(~tiles, axis=1, kind="stable").astype(np.int32)

    return TileIndices(
        num_partial=partial.sum(axis=1).astype(np.int32),
        partial=order(partial),
        num_full=full.sum(axis=1).astype(np.int32),
        full=order(full),
    )
