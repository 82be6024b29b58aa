"""The optimizer's passes over its flat buffers as Triton kernels, at the speed of memory.

AdamW's update is clip, decay, moments, master and compute copy in one: 16 bytes read and 14 written for each parameter in bf16
(12 written in fp32); a step that is not good moves nothing. A gradient of bf16 comes to its fp32 sum in 6 bytes for each
parameter, or in 10 after the first: torch's own copies and sums of mixed types take twice as long.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096


@triton.jit
def _adamw(  # type: ignore[no-untyped-def]
    master,
    exp_avg,
    exp_avg_sq,
    gradient,
    compute,
    scalars,
    size,
    num_decayed,
    rest1,
    beta2,
    rest2,
    eps,
    has_copy: tl.constexpr,
    block: tl.constexpr,
):
    clip, step_size, root, decay = tl.load(scalars), tl.load(scalars + 1), tl.load(scalars + 2), tl.load(scalars + 4)
    if tl.load(scalars + 3) != 0:
        at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
        there = at < size
        grad = tl.load(gradient + at, mask=there, other=0.0) * clip
        average = tl.load(exp_avg + at, mask=there, other=0.0)
        average += rest1 * (grad - average)
        square = tl.load(exp_avg_sq + at, mask=there, other=0.0) * beta2 + rest2 * grad * grad
        weight = tl.load(master + at, mask=there, other=0.0) * tl.where(at < num_decayed, decay, 1.0)
        weight -= average / (tl.sqrt(square) / root + eps) * step_size
        tl.store(master + at, weight, mask=there)
        tl.store(exp_avg + at, average, mask=there)
        tl.store(exp_avg_sq + at, square, mask=there)
        if has_copy:
            tl.store(compute + at, weight.to(compute.dtype.element_ty), mask=there)


@triton.jit
def _accumulate(total, gradient, size, overwrite: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    there = at < size
    value = tl.load(gradient + at, mask=there, other=0.0).to(tl.float32)
    if not overwrite:
        value += tl.load(total + at, mask=there, other=0.0)
    tl.store(total + at, value, mask=there)


def accumulate(total: torch.Tensor, gradient: torch.Tensor, *, overwrite: bool) -> None:
    """Add a gradient of any floating type to its fp32 sum of the same shape, or put it in its place: bits as torch's."""
    assert total.is_contiguous(), total.stride()
    size = total.numel()
    _accumulate[(triton.cdiv(size, BLOCK),)](
        total, gradient.contiguous(), size, overwrite=overwrite, block=BLOCK, num_warps=8
    )  # fmt: skip


def update(
    *,
    master: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    gradient: torch.Tensor,
    compute: torch.Tensor,
    scalars: torch.Tensor,
    num_decayed: int,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """One update of flat fp32 buffers and, if it is another buffer than `master`, of the compute weights.

    `scalars` fp32 `[5]` on the device: the factor that clips gradients, the bias-corrected rate, the root of the second
    moment's correction, whether the step is good (1) or changes nothing (0), and the factor of the first `num_decayed`.
    """
    size = len(master)
    _adamw[(triton.cdiv(size, BLOCK),)](
        master, exp_avg, exp_avg_sq, gradient, compute, scalars, size, num_decayed,
        1.0 - betas[0], betas[1], 1.0 - betas[1], eps,
        has_copy=compute is not master, block=BLOCK, num_warps=8,
    )  # fmt: skip
