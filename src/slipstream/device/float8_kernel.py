"""`float8` on CUDA: a kernel for each direction, a program a row, which reads it once and writes it once.

Everything is done on the bits of fp32, so that the bytes are those of the reference on every architecture, whether or not it
converts to e4m3 itself, and whatever it does with subnormal numbers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LARGEST_CODE = tl.constexpr(0x7E)
"""448; 0x7F is e4m3's NaN."""
SMALLEST_TOP = tl.constexpr(27 << 23)
"""2^-100."""
TO_E4M3 = tl.constexpr(120 << 3)
"""Exponents are biased by 127 in fp32 and by 7 in e4m3."""
HALVES = tl.constexpr(141 << 23)
"""Bits of 2^14, whose last place is 2^-9, e4m3's smallest step: adding it rounds to that step."""


@triton.jit(do_not_specialize_on_alignment=["scale", "bad", "num_tokens"])
def _quantise(  # type: ignore[no-untyped-def]
    hidden,
    values,
    scale,
    bad,
    num_tokens,
    width: tl.constexpr,
    hidden_stride: tl.constexpr,
    value_stride: tl.constexpr,
    scale_stride: tl.constexpr,
    limited: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, block)
    inside = lanes < width
    bits = tl.load(hidden + row * hidden_stride + lanes, mask=inside, other=0.0).to(tl.float32).to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    finite = size < 0x7F800000
    kept = inside & finite
    spoilt = inside & (size >= 0x7F800000)
    if limited:
        real = row < tl.load(num_tokens)
        kept = kept & real
        spoilt = spoilt & real
    top = tl.max(tl.where(kept, size, 0), axis=0)
    kept = kept & (top >= SMALLEST_TOP)
    size = tl.where(kept, size, 0)
    exponent = tl.minimum((tl.maximum(top, SMALLEST_TOP) + 0x1FFFFF) >> 23, 254)
    inverse = ((262 - exponent) << 23).to(tl.float32, bitcast=True)
    share = size.to(tl.float32, bitcast=True) * inverse
    code = share.to(tl.int32, bitcast=True)
    rounded = ((code + 0x7FFFF + ((code >> 20) & 1)) >> 20) - TO_E4M3
    stepped = (share + 16384.0).to(tl.int32, bitcast=True) - HALVES
    code = tl.minimum(tl.where(code < (121 << 23), stepped, rounded), LARGEST_CODE)
    code = tl.where(kept, code | ((bits >> 24) & 0x80), 0)
    tl.store(values + row * value_stride + lanes, code.to(tl.uint8), mask=inside)
    power = ((exponent - 8) << 23).to(tl.float32, bitcast=True)
    any_bad = tl.max(spoilt.to(tl.int32), axis=0) > 0
    tl.store(scale + row * scale_stride, tl.where(any_bad, float("nan"), tl.where(top >= SMALLEST_TOP, power, 0.0)))
    tl.store(bad + row, any_bad, mask=any_bad)


@triton.jit
def _dequantise(values, scale, out, width: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, block)
    inside = lanes < width
    code = tl.load(values + row * width + lanes, mask=inside, other=0).to(tl.int32)
    size = code & 0x7F
    normal = ((size + TO_E4M3) << 20).to(tl.float32, bitcast=True)
    value = tl.where(size < 8, size.to(tl.float32) * 0.001953125, normal) * tl.load(scale + row)
    value = tl.where(code > 127, -value, value)
    tl.store(out + row * width + lanes, value.to(out.dtype.element_ty), mask=inside)


def quantise_rows(
    hidden_RD: torch.Tensor,
    *,
    values_RD: torch.Tensor,
    scale_R: torch.Tensor,
    bad_R: torch.Tensor,
    num_tokens: torch.Tensor | None,
) -> None:
    """Contract: `float8.quantise_rows`. Enqueued on the current stream; allocates nothing."""
    rows, width = hidden_RD.shape
    assert hidden_RD.stride(1) == values_RD.stride(1) == 1, (hidden_RD.stride(), values_RD.stride())
    assert (scale_R.dtype, bad_R.dtype, bad_R.stride(0)) == (torch.float32, torch.bool, 1)
    block = triton.next_power_of_2(width)
    _quantise[(rows,)](
        hidden_RD,
        values_RD.view(torch.uint8),
        scale_R,
        bad_R,
        bad_R if num_tokens is None else num_tokens,
        width=width,
        hidden_stride=hidden_RD.stride(0),
        value_stride=values_RD.stride(0),
        scale_stride=scale_R.stride(0),
        limited=num_tokens is not None,
        block=block,
        num_warps=_warps(block),
    )


def dequantise(values_TKD: torch.Tensor, *, scale_TK: torch.Tensor, out_TKD: torch.Tensor) -> None:
    """Contract: `float8.dequantise`. Enqueued on the current stream; allocates nothing."""
    assert values_TKD.is_contiguous(), values_TKD.stride()
    assert scale_TK.is_contiguous(), scale_TK.stride()
    assert out_TKD.is_contiguous(), out_TKD.stride()
    width = values_TKD.shape[-1]
    block = triton.next_power_of_2(width)
    _dequantise[(scale_TK.numel(),)](
        values_TKD.view(torch.uint8), scale_TK, out_TKD, width=width, block=block, num_warps=_warps(block)
    )


def _warps(block: int) -> int:
    return max(1, min(8, block // 512))
