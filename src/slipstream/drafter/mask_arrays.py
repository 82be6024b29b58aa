"""A drafter's masks in two halves: arrays made on the CPU, and the masks over the same arrays once they are on the device.

`DFlashDrafter.make_masks` does both at once, with copies of its own. In a training loop the arrays travel with the rest of
a use, in one copy, and are made in the thread that prepares steps.

Shape letters: T context tokens · Q = N * B slots.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch
from torch.nn.attention.flex_attention import BlockMask

from slipstream.drafter.attention import FlexAttention, SdpaAttention, SdpaTile
from slipstream.drafter.dflash import DFlashDrafter, Masks
from slipstream.drafter.masks import TILE, Spans, span_mask_mod, tile_indices
from slipstream.records import BlockBatch

Arrays = Mapping[str, torch.Tensor]
"""On the device."""

HostArrays = dict[str, npt.NDArray[Any]]
"""Of NumPy: every tensor that is made lets other threads have the interpreter, which they may keep for long."""

SPANS = ("context_from", "context_to", "own_from", "own_to")
SIDES = (("kv", "full_kv"), ("q", "full_q"))
"""Names that flex attention gives partial and full tiles, by queries and by keys."""


@dataclass(frozen=True, slots=True)
class MaskHalves:
    """`arrays(spans)` on the CPU; `mask(arrays, context_tokens)` over them on the device. Neither waits for the device."""

    arrays: Callable[[Spans], HostArrays]
    mask: Callable[[Arrays, int], Any]


def mask_arrays(drafter: DFlashDrafter, batch: BlockBatch) -> HostArrays:
    """The arrays of a batch on the CPU, for all kinds of layer, by name. Their types and shapes depend on T, N and B alone."""
    assert batch.anchors_N.device.type == "cpu", "masks are made from the batch on the CPU"
    anchors, starts, valid = (tensor.numpy() for tensor in (batch.anchors_N, batch.anchor_start_N, batch.anchor_valid_N))
    halves = HALVES[type(drafter.kernel)]
    found: HostArrays = {}
    layers = drafter.layer_spans(
        anchors=anchors,
        starts=starts,
        valid=valid,
        context_tokens=len(batch.context_positions_T),
        block_size=batch.positions_NB.shape[1],
    )
    for kind, spans in layers.items():
        found |= {f"{kind}.{name}": array for name, array in halves.arrays(spans).items()}
    return found


def masks_over(drafter: DFlashDrafter, arrays: Arrays, *, context_tokens: int) -> Masks:
    """The drafter's masks over arrays that `mask_arrays` made, wherever they are now. What else is in `arrays` is ignored."""
    halves = HALVES[type(drafter.kernel)]
    return {
        kind: halves.mask(
            {name.removeprefix(f"{kind}."): array for name, array in arrays.items() if name.startswith(f"{kind}.")},
            context_tokens,
        )
        for kind in dict.fromkeys(drafter.shape.layer_types)
    }


def _span_arrays(spans: Spans) -> HostArrays:
    return {name: getattr(spans, name) for name in SPANS}


def _flex_arrays(spans: Spans) -> HostArrays:
    arrays = _span_arrays(spans)
    for (partial, full), side in zip(SIDES, tile_indices(spans), strict=True):
        arrays[f"{partial}_num_blocks"] = side.num_partial[None, None]
        arrays[f"{partial}_indices"] = side.partial[None, None]
        arrays[f"{full}_num_blocks"] = side.num_full[None, None]
        arrays[f"{full}_indices"] = side.full[None, None]
    return arrays


def _flex_mask(arrays: Arrays, context_tokens: int) -> BlockMask:
    queries = len(arrays["own_to"])
    tiles: dict[str, Any] = {name: array for name, array in arrays.items() if name not in SPANS}
    return BlockMask(
        seq_lengths=(queries, context_tokens + queries),
        BLOCK_SIZE=(TILE, TILE),
        mask_mod=span_mask_mod(*(arrays[name] for name in SPANS)),
        **tiles,
    )


def _dense_mask(arrays: Arrays, context_tokens: int) -> tuple[SdpaTile, ...]:
    """One tile, the whole mask: evaluated where the arrays are, so that only spans travel."""
    context_from, context_to, own_from, own_to = (arrays[name][:, None] for name in SPANS)
    queries = len(own_to)
    keys = torch.arange(context_tokens + queries, dtype=torch.int32, device=own_to.device)
    visible = ((keys >= context_from) & (keys < context_to)) | ((keys >= own_from) & (keys < own_to))
    return (SdpaTile(slots=slice(0, queries), context=slice(0, context_tokens), visible=visible),)


HALVES: Mapping[type, MaskHalves] = {
    FlexAttention: MaskHalves(arrays=_flex_arrays, mask=_flex_mask),
    SdpaAttention: MaskHalves(arrays=_span_arrays, mask=_dense_mask),
}
"""By kind of attention."""
