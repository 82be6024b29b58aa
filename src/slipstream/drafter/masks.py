"""Who sees whom: every slot of a block sees two intervals of keys, one of the context and one of its own block.

Keys are numbered as in attention: context rows 0 to T - 1, then the slots of all blocks, T to T + Q - 1. A context token
is seen only strictly before the anchor: the anchor's own hidden state does not exist yet when a server drafts.

Shape letters: T context tokens · N anchors · B block size · Q = N * B slots.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask

from slipstream.config.recipe import LayerType
from slipstream.drafter.blocks import Send, to_device
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
    lengths: IntArray | None = None,
) -> Spans:
    """Spans of one kind of layer; `anchors`, `starts` (first row of the anchor's document) and `valid` are `[N]`.

    A full layer sees all of the document before the anchor and the whole block, or its first `lengths` slots, 1 to B `[N]`: for
    them the block is then one that was cut to as many. A sliding layer sees what is less than `window` tokens before the slot,
    itself counted, and nothing after the slot: the served, token-level window.
    """
    anchor = np.repeat(np.where(valid, anchors, 0).astype(np.int32), block_size)
    lower = np.repeat(np.where(valid, starts, 0).astype(np.int32), block_size)
    if kind == "full":
        reach = None
    else:
        assert window is not None, "a sliding layer needs a window"
        reach = min(window, context_tokens + block_size) - 1
        oldest = np.add.outer(anchor[::block_size], np.arange(-reach, block_size - reach, dtype=np.int32)).ravel()
        lower = np.minimum(np.maximum(lower, oldest), anchor)
    own_from, own_to = _own_spans(len(anchors), block_size, context_tokens, reach)
    if lengths is not None and reach is None:
        own_to = own_from + np.repeat(lengths.astype(np.int32), block_size)
    return Spans(
        context_tokens=context_tokens,
        block_size=block_size,
        context_from=lower,
        context_to=anchor,
        own_from=own_from,
        own_to=own_to,
    )


@functools.lru_cache(maxsize=8)
def _own_spans(blocks: int, block_size: int, first_key: int, reach: int | None) -> tuple[Int32Array, Int32Array]:
    """What slots see of their blocks, the same for every use: all of it, or so many slots back and nothing ahead."""
    block = np.arange(first_key, first_key + blocks * block_size, block_size, dtype=np.int32)
    last = np.full(block_size, block_size - 1, dtype=np.int32) if reach is None else np.arange(block_size, dtype=np.int32)
    first = np.maximum(last - (block_size - 1 if reach is None else reach), 0)
    return np.add.outer(block, first).ravel(), np.add.outer(block, last + 1).ravel()


def dense_mask(
    spans: Spans,
    *,
    slots: slice = slice(None),
    context: slice | None = None,
    device: torch.device | str = "cpu",
    send: Send | None = None,
) -> torch.Tensor:
    """Bool `[slots, context + slots]`, true where seen: the part of the mask for a range of whole blocks and of context rows.

    `slots` covers whole blocks, `context` the rows whose keys are handed over; by default all of both. Spans go to the device
    by `send`, or else by `to_device`.
    """
    send = send or functools.partial(to_device, device=device)
    context = slice(0, spans.context_tokens) if context is None else context
    first, last, _ = slots.indices(len(spans.own_to))
    keys = torch.cat(
        (
            torch.arange(context.start, context.stop, dtype=torch.int32, device=device),
            torch.arange(first, last, dtype=torch.int32, device=device) + spans.context_tokens,
        )
    )
    context_from, context_to, own_from, own_to = (
        send(torch.from_numpy(span[slots]))[:, None]
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
    rows, columns = len(spans.own_to) // TILE, (spans.context_tokens + len(spans.own_to)) // TILE
    # Slots of one block and one tile see from the first one's first key to the last one's last: none starts before the slot
    # that it follows, none ends before it, and there is no gap. So a few slots stand for all.
    size = math.gcd(spans.block_size, TILE)
    begin, end = (spans.context_from, spans.own_from), (spans.context_to, spans.own_to)
    first, last = slice(0, None, size), slice(size - 1, None, size)
    partial = _touched(_at(begin, first), _at(end, last), rows=rows, columns=columns)
    full = _covered(_at(begin, last), _at(end, first), rows=rows)
    partial[:, : full.shape[1]] &= ~full
    by_queries, by_keys = (
        TileIndices(*_ordered(one, shape), *_ordered(two, shape))
        for one, two, shape in ((partial, full, (rows, columns)), (partial.T, full.T, (columns, rows)))
    )
    return by_queries, by_keys


def flex_block_mask(spans: Spans, *, device: torch.device | str = "cpu", send: Send | None = None) -> BlockMask:
    """Flex attention's `BlockMask`, equal to what `create_block_mask` finds by evaluating the whole mask.

    Its arrays go to the device by `send`, or else by `to_device`.
    """
    send = send or functools.partial(to_device, device=device)
    arrays: dict[str, Any] = {}
    for names, side in zip((("kv", "full_kv"), ("q", "full_q")), tile_indices(spans), strict=True):
        for name, count, indices in zip(names, (side.num_partial, side.num_full), (side.partial, side.full), strict=True):
            arrays[f"{name}_num_blocks"] = send(torch.from_numpy(count[None, None]))
            arrays[f"{name}_indices"] = send(torch.from_numpy(indices[None, None]))
    captured = (spans.context_from, spans.context_to, spans.own_from, spans.own_to)
    mask_mod = span_mask_mod(*(send(torch.from_numpy(span)) for span in captured))
    queries = len(spans.own_to)
    lengths = (queries, spans.context_tokens + queries)
    return BlockMask(seq_lengths=lengths, BLOCK_SIZE=(TILE, TILE), mask_mod=mask_mod, **arrays)


def _at(spans: tuple[Int32Array, Int32Array], slots: slice) -> Int32Array:
    return np.stack([span[slots] for span in spans])


def _touched(begin: Int32Array, end: Int32Array, *, rows: int, columns: int) -> BoolArray:
    """Tiles `[rows, columns]` in which some query of the row sees some key; intervals `[2, G]`, as many to each row."""
    width = columns + 1
    row = np.repeat(np.arange(0, rows * width, width), begin.shape[1] // rows)
    entry = row + begin // TILE
    leave = np.where(end > begin, row + (end - 1) // TILE + 1, entry)
    steps = np.bincount(entry.ravel(), minlength=rows * width)
    steps -= np.bincount(leave.ravel(), minlength=rows * width)
    touched: BoolArray = (np.cumsum(steps, out=steps) > 0).reshape(rows, width)[:, :columns]
    return touched


def _covered(begin: Int32Array, end: Int32Array, *, rows: int) -> BoolArray:
    """Tiles `[rows, columns]` in which every query of the row sees every key, up to the last column that has one."""
    first = -(-begin.reshape(2, rows, -1).max(axis=2, keepdims=True) // TILE)
    stop = np.maximum(end.reshape(2, rows, -1).min(axis=2, keepdims=True) // TILE, 0)
    column = np.arange(stop[stop > first].max(initial=0), dtype=np.int32)
    context, own = (column >= first) & (column < stop)
    covered: BoolArray = context | own
    return covered


def _ordered(tiles: BoolArray, shape: tuple[int, int]) -> tuple[Int32Array, Int32Array]:
    """How many tiles of each row are seen, and all columns, those first. Outside `tiles`, a corner of `shape`, none is seen."""
    rows, columns = tiles.shape
    numbers, order = np.zeros(shape[0], dtype=np.int32), _identity(*shape).copy()
    both = np.empty((rows, 2, columns), dtype=np.bool_)  # each row, then what is not in it
    both[:, 0] = tiles
    np.logical_not(tiles, out=both[:, 1])
    order[:rows, :columns] = _identity(2 * rows, columns).ravel().take(np.flatnonzero(both)).reshape(rows, columns)
    numbers[:rows] = both[:, 0].sum(axis=1, dtype=np.int32)
    return numbers, order


@functools.lru_cache(maxsize=32)
def _identity(rows: int, columns: int) -> Int32Array:
    """0 to `columns - 1` in every row."""
    identity: Int32Array = np.tile(np.arange(columns, dtype=np.int32), (rows, 1))
    return identity
