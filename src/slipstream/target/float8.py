"""A target's large matrices in float8 (e4m3): how a weight is rounded, and the product that reads it.

Which scales, and why. A pack's documents must not change each other by a bit, so a scale of activations cannot be taken over
the pack: it is either one for each row, or fixed beforehand. Both kinds multiply whole rows of a product, so the product itself
needs no more than one number for each operand, which is cuBLASLt's fastest float8 kernel (row-wise kernels come to 0.5 to 1 of
its speed, by shape and version: pytorch issue 147971) and runs on every GPU from compute capability 8.9 on:

- what a norm gives is at most sqrt(D) before the norm's own weight, so it has one fixed step, and cannot overflow; the norm's
  weight is multiplied into the columns of the matrix that reads it, before that is rounded;
- what else is multiplied (attention's output, the MLP's) gets one scale a row, from the row's own maximum, in the kernel that
  computes the row; the product leaves it out, and the kernel that adds the product to the residual stream puts it back.

A weight is one byte and its matrix four more, against two bytes a weight in bfloat16. Norms, convolutions, the write strength
and decay of a delta net and the embedding stay what they are.

Not through torchao: its quantised modules round their own inputs, in a pass that only a compiler could join with the norm or
gate before it, and the layers here are kernels that are joined by hand. `torch.nn.functional.scaled_mm` is what it calls too.

Shape letters: T tokens · D columns of a matrix · P its rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from slipstream.errors import TargetError

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
"""Largest value of e4m3; the format has no infinity."""

LOWEST_CAPABILITY = (8, 9)
"""Compute capability from which a GPU multiplies e4m3."""

MULTIPLE = 16
"""What both sizes of a matrix must be a multiple of, for the product."""

_CHUNK_ROWS = 4096
"""Rows of a weight that are in fp32 at once while it is rounded."""

ScaledProduct = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(rows `[T, D]` e4m3, weight `[P, D]` e4m3, what 1 is worth in each, fp32 `[1]`) → their product `[T, P]`, bfloat16."""


def norm_step(size: int) -> float:
    """What 1 is worth in the e4m3 output of a norm over `size` values: their largest, sqrt(size), is e4m3's largest."""
    return math.sqrt(size) / E4M3_MAX


class Float8Weight(nn.Module):
    """A matrix `[P, D]` in e4m3. `weight_step` and `row_step`, fp32 `[1]`: what 1 is worth in it, and in the rows it meets."""

    weight_PD: Tensor
    weight_step: Tensor
    row_step: Tensor

    def __init__(self, weight_PD: Tensor, *, column_scale_D: Tensor | None = None, row_step: float = 1.0) -> None:
        """Round a matrix; with a `column_scale_D` (fp32) its columns are multiplied by that first. Raises `TargetError`."""
        super().__init__()
        if any(size % MULTIPLE for size in weight_PD.shape):
            raise TargetError(
                key="target.dtype",
                value="float8",
                rule=f"needs matrices whose sizes are multiples of {MULTIPLE}, and one is {list(weight_PD.shape)}",
                hint='use "bfloat16"',
            )
        rounded_PD, step = round_weight(weight_PD, column_scale_D=column_scale_D)
        self.register_buffer("weight_PD", rounded_PD)
        self.register_buffer("weight_step", step)
        self.register_buffer("row_step", torch.full_like(step, row_step))


def round_weight(weight_PD: Tensor, *, column_scale_D: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """A matrix in e4m3 and what 1 is worth in it, fp32 `[1]`: its largest magnitude becomes e4m3's largest."""
    scale = weight_PD.new_ones(1, dtype=torch.float32) if column_scale_D is None else column_scale_D

    def chunks() -> list[Tensor]:
        return list(weight_PD.split(_CHUNK_ROWS))

    largest = torch.stack([(chunk.float() * scale).abs().amax() for chunk in chunks()]).amax().clamp(min=1e-30)
    rounded_PD = torch.empty(weight_PD.shape, dtype=E4M3, device=weight_PD.device)
    for part, chunk in zip(rounded_PD.split(_CHUNK_ROWS), chunks(), strict=True):
        part.copy_(chunk.float() * scale * (E4M3_MAX / largest))
    return rounded_PD, (largest / E4M3_MAX).reshape(1)


def check_device(device: str) -> None:
    """Raise `TargetError` where float8 matrices cannot be multiplied."""
    at = torch.device(device)
    capability = torch.cuda.get_device_capability(at) if at.type == "cuda" else None
    if capability is None or capability < LOWEST_CAPABILITY:
        what = "the CPU" if capability is None else f"a GPU of compute capability {capability[0]}.{capability[1]}"
        raise TargetError(
            key="target.dtype",
            value="float8",
            rule=f"needs a GPU of compute capability {LOWEST_CAPABILITY[0]}.{LOWEST_CAPABILITY[1]} or more, and this is {what}",
            hint='use "bfloat16"',
        )


def cuda_product() -> ScaledProduct:
    """cuBLASLt's product with one scale an operand. Raises `TargetError` where torch does not have it.

    Sums are kept in the tensor cores' own registers (`use_fast_accum`), which the peak rate is of. Those hold fewer bits than
    fp32, so that a sum's error grows with its length (arXiv 2412.19437, 3.3.2); the operands' own rounding stays the larger.
    """
    try:
        from torch.nn.functional import ScalingType, scaled_mm
    except ImportError as error:
        raise TargetError(
            key="target.dtype",
            value="float8",
            rule=f"needs torch.nn.functional.scaled_mm, which torch {torch.__version__} does not have",
            hint="install torch 2.11 or newer",
        ) from error

    def product(rows_TD: Tensor, weight_PD: Tensor, row_step: Tensor, weight_step: Tensor) -> Tensor:
        return scaled_mm(
            rows_TD,
            weight_PD.t(),
            scale_a=row_step,
            scale_recipe_a=ScalingType.TensorWise,
            scale_b=weight_step,
            scale_recipe_b=ScalingType.TensorWise,
            output_dtype=torch.bfloat16,
            use_fast_accum=True,
        )

    return product
