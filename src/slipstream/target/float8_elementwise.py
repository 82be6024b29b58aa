"""What lies between a float8 target's products: what comes before one rounds to e4m3, what comes after puts scales back.

Pure functions, compiled as those of `elementwise`, or with a kernel of their own (`float8_kernels`), so that rounding costs no
pass of its own. A scale belongs to one row alone: documents that share a pack cannot change each other's. A row that is not
finite gives one that is not, and stays so through the product, where `capture` finds it.

Shape letters: T tokens · D hidden size · F width of the MLP · H heads · E head size · P columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from torch import Tensor

from slipstream.target.elementwise import activated, compile_exact, gated, normed, normed_gated
from slipstream.target.float8 import E4M3, E4M3_MAX, norm_step

SMALLEST = 1e-12
"""Rows whose largest magnitude is below this are rounded as if it were this."""

Rounded = tuple[Tensor, Tensor]
"""Rows `[T, P]` in e4m3, and what 1 is worth in each, fp32 `[T]`."""


def norm(hidden_TD: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm without a weight, in e4m3 where 1 is worth `norm_step(D)`."""
    return (normed(hidden_TD, eps) * (1 / norm_step(hidden_TD.shape[-1]))).to(E4M3)


def norm_twice(hidden_TD: Tensor, scale_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`norm`, and the norm times `scale_D` (fp32) in the type of `hidden_TD`, for products that are not rounded."""
    normed_TD = normed(hidden_TD, eps)
    return (normed_TD * (1 / norm_step(hidden_TD.shape[-1]))).to(E4M3), (normed_TD * scale_D).to(hidden_TD.dtype)


def swiglu(gate_up_T2F: Tensor) -> Rounded:
    """`silu(gate) * up` of a merged projection."""
    return rounded(activated(gate_up_T2F))


def gate_heads(attended_THE: Tensor, gate_THE: Tensor) -> Rounded:
    """`attended * sigmoid(gate)`."""
    return rounded(gated(attended_THE, gate_THE).flatten(1))


def gated_norm(mixed_THE: Tensor, gate_THE: Tensor, scale_E: Tensor, eps: float) -> Rounded:
    """Norm each head, times `scale_E`, times `silu(gate)`."""
    return rounded(normed_gated(mixed_THE, gate_THE, scale_E, eps).flatten(1))


def rounded(rows_TP: Tensor) -> Rounded:
    """Rows in e4m3, each by its own largest magnitude."""
    wide_TP = rows_TP.float()
    largest_T1 = wide_TP.abs().amax(dim=-1, keepdim=True).clamp(min=SMALLEST)
    return (wide_TP * (E4M3_MAX / largest_T1)).to(E4M3), (largest_T1 / E4M3_MAX).squeeze(-1)


def add_rows(residual_TD: Tensor, product_TD: Tensor, step_T: Tensor) -> None:
    """Add a product to the residual stream, in place, each row times what 1 was worth in the row that was multiplied."""
    residual_TD.copy_(residual_TD.float() + product_TD.float() * step_T[:, None])


@dataclass(frozen=True, slots=True)
class Float8Elementwise:
    """The functions of this module, as they are, or compiled."""

    norm: Callable[[Tensor, float], Tensor]
    norm_twice: Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]
    swiglu: Callable[[Tensor], Rounded]
    gate_heads: Callable[[Tensor, Tensor], Rounded]
    gated_norm: Callable[[Tensor, Tensor, Tensor, float], Rounded]
    rounded: Callable[[Tensor], Rounded]
    add_rows: Callable[[Tensor, Tensor, Tensor], None]


EAGER = Float8Elementwise(
    norm=norm,
    norm_twice=norm_twice,
    swiglu=swiglu,
    gate_heads=gate_heads,
    gated_norm=gated_norm,
    rounded=rounded,
    add_rows=add_rows,
)


@cache
def compiled() -> Float8Elementwise:
    """Each function compiled for the exact shapes it meets, once in a process; two are kernels. Needs a CUDA device."""
    from slipstream.target import float8_kernels  # here, not above: there is no Triton without a GPU

    own: dict[str, Any] = {"swiglu": float8_kernels.swiglu, "gated_norm": float8_kernels.gated_norm}
    names = [field.name for field in fields(Float8Elementwise)]
    return Float8Elementwise(**{name: own.get(name) or compile_exact(getattr(EAGER, name)) for name in names})


def float8_elementwise(*, compile_it: bool) -> Float8Elementwise:
    """The compiled functions, or the plain ones where a shape is too small or too rare to be worth compiling."""
    return compiled() if compile_it else EAGER
