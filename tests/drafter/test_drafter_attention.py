"""Attention: the tiles of SDPA against one dense call, forward and backward, and flex attention against both."""

from __future__ import annotations

import pytest
import torch
from block_cases import make_case
from test_drafter_masks import spans_of
from torch.nn import functional as F

from slipstream.config.recipe import LayerType
from slipstream.drafter.attention import TILE_SLOTS, FlexAttention, SdpaAttention, choose_attention
from slipstream.drafter.masks import dense_mask
from slipstream.records import BlockBatch

CPU = torch.device("cpu")
KINDS: list[tuple[LayerType, int | None]] = [("full", None), ("sliding", 20)]


def random_inputs(batch: BlockBatch, *, grad: bool = False) -> list[torch.Tensor]:
    """Query, context key, context value, own key, own value: four heads on two, width 16."""
    queries, context = batch.positions_NB.numel(), len(batch.context_positions_T)
    generator = torch.Generator().manual_seed(3)
    shapes = [(4, queries, 16), (2, context, 16), (2, context, 16), (2, queries, 16), (2, queries, 16)]
    return [torch.randn(shape, generator=generator).requires_grad_(grad) for shape in shapes]


def dense_attend(inputs: list[torch.Tensor], mask: torch.Tensor) -> torch.Tensor:
    """Plain attention with the whole mask, in fp64."""
    query, context_key, context_value, own_key, own_value = (x.double() for x in inputs)
    key = torch.cat((context_key, own_key), dim=1)
    value = torch.cat((context_value, own_value), dim=1)
    return F.scaled_dot_product_attention(query[None], key[None], value[None], attn_mask=mask, enable_gqa=True)[0].transpose(
        0, 1
    )


@pytest.mark.parametrize(("kind", "window"), KINDS)
@pytest.mark.parametrize(("block", "slots"), [(4, 96), (7, 96), (64, 10)])
def test_sdpa_tiles_equal_one_dense_call(kind: LayerType, window: int | None, block: int, slots: int) -> None:
    batch = make_case(lengths=(100, 60, 80), capacity=256, slots=slots, block=block).batch
    spans = spans_of(batch, kind, window)
    kernel = SdpaAttention()
    mask = kernel.mask(spans, device=CPU)
    assert len(mask) == -(-slots // (TILE_SLOTS // block))
    ours, theirs = random_inputs(batch, grad=True), random_inputs(batch, grad=True)
    output, wanted = kernel.attend(*ours, mask=mask), dense_attend(theirs, dense_mask(spans))
    torch.testing.assert_close(output.double(), wanted, rtol=1e-5, atol=1e-6)
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(4))
    output.backward(upstream)
    wanted.backward(upstream.double())
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-5)


def test_tiles_leave_out_context_that_none_of_their_blocks_sees() -> None:
    batch = make_case(lengths=(100, 60, 80), capacity=256, slots=96, block=8).batch
    tiles = SdpaAttention().mask(spans_of(batch, "sliding", 20), device=CPU)
    sizes = [tile.context.stop - tile.context.start for tile in tiles]
    assert max(sizes) < 256
    assert sum(sizes) < 0.5 * 256 * len(tiles)


@pytest.mark.parametrize(("kind", "window"), KINDS)
def test_flex_equals_sdpa(kind: LayerType, window: int | None) -> None:
    batch = make_case(lengths=(100, 60, 80), capacity=256, slots=64, block=8).batch
    spans, inputs = spans_of(batch, kind, window), random_inputs(batch)
    flex, sdpa = FlexAttention(), SdpaAttention()
    output = flex.attend(*inputs, mask=flex.mask(spans, device=CPU))
    wanted = sdpa.attend(*inputs, mask=sdpa.mask(spans, device=CPU))
    torch.testing.assert_close(output, wanted, rtol=1e-5, atol=1e-6)


def test_auto_goes_by_device() -> None:
    assert isinstance(choose_attention(name="auto", device=CPU), SdpaAttention)
    assert isinstance(choose_attention(name="auto", device=torch.device("cuda")), FlexAttention)
    assert isinstance(choose_attention(name="flex", device=CPU), FlexAttention)
    with pytest.raises(KeyError):
        choose_attention(name="other", device=CPU)
