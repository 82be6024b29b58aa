"""Attention of block slots over the context and their own block: one implementation for CPU and as oracle, one for CUDA.

An implementation turns `Spans` into its own kind of mask once for each use of a pack, then attends with it in every layer
of that kind.

Shape letters: T context tokens · B block size · Q = N * B slots · K = T + Q keys · H query heads · G key-value heads ·
C head width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention

from slipstream.drafter.blocks import Send
from slipstream.drafter.masks import Spans, dense_mask, flex_block_mask

TILE_SLOTS = 128
"""Slots that share one call of SDPA on a CPU: fewer make more calls, more look at more keys that are masked anyway."""


class AttentionKernel(Protocol):
    """An implementation of attention."""

    def mask(self, spans: Spans, *, device: torch.device, send: Send | None = None) -> Any:
        """What `attend` needs to know of who sees whom, brought to the device by `send` (or else by `to_device`)."""

    def attend(
        self,
        query_HQC: torch.Tensor,
        context_key_GTC: torch.Tensor,
        context_value_GTC: torch.Tensor,
        own_key_GQC: torch.Tensor,
        own_value_GQC: torch.Tensor,
        *,
        mask: Any,
    ) -> torch.Tensor:
        """Attention output `[Q, H, C]`, scaled by C ** -0.5."""

    def attend_joined(
        self, query_HQC: torch.Tensor, key_GKC: torch.Tensor, value_GKC: torch.Tensor, *, mask: Any
    ) -> torch.Tensor:
        """The same with keys and values of context and slots in one tensor, K = T + Q, the context's first."""


@dataclass(frozen=True, slots=True)
class SdpaTile:
    """Consecutive blocks and the only context rows that any of them sees; `visible` is None where all of it is seen."""

    slots: slice
    context: slice
    visible: torch.Tensor | None


class SdpaAttention:
    """SDPA with dense masks. On a CPU a pack is cut into tiles of blocks, so that most masked keys are never touched.

    Anchors ascend, so the context of neighbouring blocks is nearly one slice of rows: at 1,024 tokens and 256 blocks of
    8 the tiles hold about a tenth of the `[Q, T + Q]` mask. On CUDA there is one tile, the whole mask.
    """

    def mask(self, spans: Spans, *, device: torch.device, send: Send | None = None) -> tuple[SdpaTile, ...]:
        """Tiles in order of slots, covering all of them."""
        queries = len(spans.own_to)
        step = queries if device.type != "cpu" else max(1, TILE_SLOTS // spans.block_size) * spans.block_size
        parts = [slice(first, min(first + step, queries)) for first in range(0, queries, step)]
        return tuple(_tile(spans, slots, device=device, send=send) for slots in parts)

    def attend(
        self,
        query_HQC: torch.Tensor,
        context_key_GTC: torch.Tensor,
        context_value_GTC: torch.Tensor,
        own_key_GQC: torch.Tensor,
        own_value_GQC: torch.Tensor,
        *,
        mask: tuple[SdpaTile, ...],
    ) -> torch.Tensor:
        """Attention output `[Q, H, C]`."""
        sizes = [tile.slots.stop - tile.slots.start for tile in mask]
        outputs = []
        # split, not slices: its backward is one concatenation instead of one padded sum for each tile
        parts = zip(*(x.split(sizes, dim=1) for x in (query_HQC, own_key_GQC, own_value_GQC)), mask, strict=True)
        for query, own_key, own_value, tile in parts:
            key = torch.cat((context_key_GTC[:, tile.context], own_key), dim=1)
            value = torch.cat((context_value_GTC[:, tile.context], own_value), dim=1)
            outputs.append(
                F.scaled_dot_product_attention(query[None], key[None], value[None], attn_mask=tile.visible, enable_gqa=True)[0]
            )
        return torch.cat([output.transpose(0, 1) for output in outputs])

    def attend_joined(
        self, query_HQC: torch.Tensor, key_GKC: torch.Tensor, value_GKC: torch.Tensor, *, mask: tuple[SdpaTile, ...]
    ) -> torch.Tensor:
        """Attention output `[Q, H, C]`."""
        tokens = key_GKC.shape[1] - query_HQC.shape[1]
        context, own = (key_GKC[:, :tokens], value_GKC[:, :tokens]), (key_GKC[:, tokens:], value_GKC[:, tokens:])
        return self.attend(query_HQC, *context, *own, mask=mask)


def _tile(spans: Spans, slots: slice, *, device: torch.device, send: Send | None) -> SdpaTile:
    begin, end = spans.context_from[slots], spans.context_to[slots]
    seen = end > begin
    context = slice(int(begin[seen].min()), int(end[seen].max())) if seen.any() else slice(0, 0)
    if device.type != "cpu":
        visible = dense_mask(spans, slots=slots, context=context, device=device, send=send)
        return SdpaTile(slots=slots, context=context, visible=visible)
    visible = dense_mask(spans, slots=slots, context=context)
    return SdpaTile(slots=slots, context=context, visible=None if bool(visible.all()) else visible)


class FlexAttention:
    """Flex attention, compiled on CUDA. On a CPU it runs forward only (its backward raises), which tests use."""

    def mask(self, spans: Spans, *, device: torch.device, send: Send | None = None) -> Any:
        """The `BlockMask`, from arrays computed on the CPU."""
        return flex_block_mask(spans, device=device, send=send)

    def attend(
        self,
        query_HQC: torch.Tensor,
        context_key_GTC: torch.Tensor,
        context_value_GTC: torch.Tensor,
        own_key_GQC: torch.Tensor,
        own_value_GQC: torch.Tensor,
        *,
        mask: Any,
    ) -> torch.Tensor:
        """Attention output `[Q, H, C]`."""
        key = torch.cat((context_key_GTC, own_key_GQC), dim=1)
        value = torch.cat((context_value_GTC, own_value_GQC), dim=1)
        return self.attend_joined(query_HQC, key, value, mask=mask)

    def attend_joined(
        self, query_HQC: torch.Tensor, key_GKC: torch.Tensor, value_GKC: torch.Tensor, *, mask: Any
    ) -> torch.Tensor:
        """Attention output `[Q, H, C]`."""
        run = _compiled_flex() if query_HQC.is_cuda else cast(Callable[..., Any], flex_attention)
        output: torch.Tensor = run(query_HQC[None], key_GKC[None], value_GKC[None], block_mask=mask, enable_gqa=True)
        return output[0].transpose(0, 1)


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


KERNELS: Mapping[str, Callable[[], AttentionKernel]] = {"sdpa": SdpaAttention, "flex": FlexAttention}
"""Every implementation by the name a recipe gives it."""


def choose_attention(*, name: str, device: torch.device) -> AttentionKernel:
    """The implementation of that name; "auto" takes flex on CUDA and SDPA elsewhere."""
    if name == "auto":
        name = "flex" if device.type == "cuda" else "sdpa"
    return KERNELS[name]()
