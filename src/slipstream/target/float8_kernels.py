"""The two roundings of `float8_elementwise` that a compiler makes slow: each row's maximum is known only once all of it is.

It would compute every value twice with exact exponentials and divisions, which takes longer than memory does. Here `swiglu`
computes them twice with the fast ones, the second time out of the cache, and `gated_norm` holds a whole row in registers.
Both give e4m3 by the hardware's rounding to nearest, and a row that is not finite gives one that is not.

Shape letters: T tokens · F width of the MLP · H heads · E head size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGEST = tl.constexpr(448.0)
SMALLEST = tl.constexpr(1e-12)
"""Rows whose largest magnitude is below this are rounded as if it were this."""
BLOCK = 2048
"""Columns of a row that are in registers at once, in `swiglu`."""


@triton.jit
def _active(gates, ups, columns, inside, keep: tl.constexpr):  # type: ignore[no-untyped-def]
    gate = tl.load(gates + columns, mask=inside, other=0.0, eviction_policy=keep).to(tl.float32)
    up = tl.load(ups + columns, mask=inside, other=0.0, eviction_policy=keep).to(tl.float32)
    return gate * tl.sigmoid(gate) * up


@triton.jit
def _swiglu(gate_up, values, steps, width: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    gates = gate_up + row * (2 * width)
    largest = tl.zeros([block], tl.float32)
    for start in range(0, width, block):
        columns = start + tl.arange(0, block)
        active = _active(gates, gates + width, columns, columns < width, "evict_last")
        largest = tl.maximum(largest, tl.abs(active))
    top = tl.maximum(tl.max(largest, axis=0), SMALLEST)
    inverse = LARGEST / top
    for start in range(0, width, block):
        columns = start + tl.arange(0, block)
        inside = columns < width
        active = _active(gates, gates + width, columns, inside, "evict_first")
        tl.store(values + row * width + columns, (active * inverse).to(values.dtype.element_ty), mask=inside)
    tl.store(steps + row, top / LARGEST)


@triton.jit
def _gated_norm(  # type: ignore[no-untyped-def]
    mixed,
    gate,
    scale,
    values,
    steps,
    eps,
    gate_stride: tl.constexpr,
    heads: tl.constexpr,
    size: tl.constexpr,
    block_heads: tl.constexpr,
    block_size: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head, lane = tl.arange(0, block_heads)[:, None], tl.arange(0, block_size)[None, :]
    inside = (head < heads) & (lane < size)
    at = head * size + lane
    wide = tl.load(mixed + row * (heads * size) + at, mask=inside, other=0.0).to(tl.float32)
    opened = tl.load(gate + row * gate_stride + at, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(scale + lane, mask=lane < size, other=0.0)
    root = tl.rsqrt(tl.sum(wide * wide, axis=1) / size + eps)
    normed = wide * root[:, None] * weight * (opened * tl.sigmoid(opened))
    top = tl.maximum(tl.max(tl.max(tl.abs(normed), axis=1), axis=0), SMALLEST)
    rounded = (normed * (LARGEST / top)).to(values.dtype.element_ty)
    tl.store(values + row * (heads * size) + at, rounded, mask=inside)
    tl.store(steps + row, top / LARGEST)


def swiglu(gate_up_T2F: Tensor) -> tuple[Tensor, Tensor]:
    """Contract: `float8_elementwise.swiglu`."""
    rows, width = gate_up_T2F.shape[0], gate_up_T2F.shape[1] // 2
    assert gate_up_T2F.is_contiguous(), gate_up_T2F.stride()
    values_TF, step_T = _outputs(rows, width, device=gate_up_T2F.device)
    _swiglu[(rows,)](gate_up_T2F, values_TF, step_T, width=width, block=BLOCK, num_warps=4)
    return values_TF, step_T


def gated_norm(mixed_THE: Tensor, gate_THE: Tensor, scale_E: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Contract: `float8_elementwise.gated_norm`; `gate_THE` may be columns of a projection."""
    rows, heads, size = mixed_THE.shape
    assert mixed_THE.is_contiguous(), mixed_THE.stride()
    assert gate_THE.stride()[1:] == (size, 1), gate_THE.stride()
    values_TP, step_T = _outputs(rows, heads * size, device=mixed_THE.device)
    block_heads, block_size = triton.next_power_of_2(heads), triton.next_power_of_2(size)
    _gated_norm[(rows,)](
        mixed_THE,
        gate_THE,
        scale_E,
        values_TP,
        step_T,
        eps,
        gate_stride=gate_THE.stride(0),
        heads=heads,
        size=size,
        block_heads=block_heads,
        block_size=block_size,
        num_warps=max(1, min(8, block_heads * block_size // 1024)),
    )
    return values_TP, step_T


def _outputs(rows: int, columns: int, *, device: torch.device) -> tuple[Tensor, Tensor]:
    values = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=device)
    return values, torch.empty(rows, dtype=torch.float32, device=device)
