"""The work between a target's matrix products and attention kernels: norms, rotations, gates. Bound by memory, not arithmetic.

Pure functions with the weights as arguments, so that one compilation serves all layers of a model (a layer that reads its own
attributes would be compiled once for each). Everything is computed in fp32 and rounded once, at the end.

Shape letters: T tokens · D hidden size · F width of the MLP · H query heads · G key heads · E head size · P columns of a merged
projection.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def rms_norm(hidden_TD: Tensor, scale_D: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension, times `scale_D` (fp32), in the type of `hidden_TD`."""
    return (normed(hidden_TD, eps) * scale_D).to(hidden_TD.dtype)


def swiglu(gate_up_T2F: Tensor) -> Tensor:
    """`silu(gate) * up` of a merged projection: `[T, 2F]` → `[T, F]`."""
    return activated(gate_up_T2F).to(gate_up_T2F.dtype)


def rotate_heads(heads_THE: Tensor, cos_TR: Tensor, sin_TR: Tensor, scale_E: Tensor | None, eps: float) -> Tensor:
    """Norm each head (with a `scale_E`), then rotate its first R dimensions: `[T, H, E]`, contiguous whatever came in."""
    heads = heads_THE.float() if scale_E is None else normed(heads_THE, eps) * scale_E
    num_rotated = cos_TR.shape[-1]
    rotated, passed = heads[..., :num_rotated], heads[..., num_rotated:]
    first, second = rotated.chunk(2, dim=-1)
    cos, sin = cos_TR.float()[:, None], sin_TR.float()[:, None]
    turned = rotated * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((turned, passed), dim=-1).to(heads_THE.dtype)


def rotate_both(
    query_THE: Tensor,
    key_TGE: Tensor,
    cos_TR: Tensor,
    sin_TR: Tensor,
    query_scale_E: Tensor | None,
    key_scale_E: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """`rotate_heads` of queries and of keys, in one call."""
    return rotate_heads(query_THE, cos_TR, sin_TR, query_scale_E, eps), rotate_heads(key_TGE, cos_TR, sin_TR, key_scale_E, eps)


def gate_heads(attended_THE: Tensor, gate_THE: Tensor) -> Tensor:
    """`attended * sigmoid(gate)` as rows `[T, H * E]`."""
    return gated(attended_THE, gate_THE).to(attended_THE.dtype).flatten(1)


def delta_gates(beta_TH: Tensor, step_TH: Tensor, decay_H: Tensor, bias_H: Tensor) -> tuple[Tensor, Tensor]:
    """The gated delta rule's log decay (fp32) and write strength: `decay * softplus(step + bias)` and `sigmoid(beta)`."""
    log_decay_TH = decay_H * functional.softplus(step_TH.float() + bias_H)
    return log_decay_TH, torch.sigmoid(beta_TH.float()).to(beta_TH.dtype)


def gated_norm(mixed_THE: Tensor, gate_THE: Tensor, scale_E: Tensor, eps: float) -> Tensor:
    """Norm each head, times `scale_E`, times `silu(gate)`, as rows `[T, H * E]`."""
    return normed_gated(mixed_THE, gate_THE, scale_E, eps).to(mixed_THE.dtype).flatten(1)


def keep_rows(hidden_TD: Tensor, slot_TD: Tensor, bad_T: Tensor, num_tokens: Tensor) -> None:
    """Write a layer's output into a slot in one pass, padding as 0, and flag rows that are not finite in `bad_T` (bool).

    Padding is chosen by selection: 0 · NaN is NaN. `num_tokens` `[1]` int32 on the device.
    """
    cast_TD = hidden_TD.to(slot_TD.dtype)
    real_T = torch.arange(hidden_TD.shape[0], device=hidden_TD.device, dtype=torch.int32) < num_tokens
    slot_TD.copy_(torch.where(real_T[:, None], cast_TD, 0.0))
    bad_T.copy_(bad_T | (real_T & ~torch.isfinite(cast_TD).all(dim=-1)))


def normed(values: Tensor, eps: float) -> Tensor:
    """Values over the root of their mean square in the last dimension, fp32."""
    wide = values.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)


def activated(gate_up_T2F: Tensor) -> Tensor:
    """`silu(gate) * up`, fp32 `[T, F]`."""
    gate_TF, up_TF = gate_up_T2F.float().chunk(2, dim=-1)
    return functional.silu(gate_TF) * up_TF


def gated(attended_THE: Tensor, gate_THE: Tensor) -> Tensor:
    """`attended * sigmoid(gate)`, fp32 `[T, H, E]`."""
    return attended_THE.float() * torch.sigmoid(gate_THE.float())


def normed_gated(mixed_THE: Tensor, gate_THE: Tensor, scale_E: Tensor, eps: float) -> Tensor:
    """Each head normed, times `scale_E`, times `silu(gate)`, fp32 `[T, H, E]`."""
    return normed(mixed_THE, eps) * scale_E * functional.silu(gate_THE.float())


@dataclass(frozen=True, slots=True)
class Elementwise:
    """The functions of this module, as they are or compiled."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    swiglu: Callable[[Tensor], Tensor]
    rotate_both: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, float], tuple[Tensor, Tensor]]
    gate_heads: Callable[[Tensor, Tensor], Tensor]
    delta_gates: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    gated_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    keep_rows: Callable[[Tensor, Tensor, Tensor, Tensor], None]


EAGER = Elementwise(
    rms_norm=rms_norm,
    swiglu=swiglu,
    rotate_both=rotate_both,
    gate_heads=gate_heads,
    delta_gates=delta_gates,
    gated_norm=gated_norm,
    keep_rows=keep_rows,
)


@cache
def compiled() -> Elementwise:
    """Each function compiled for the exact shapes it meets, once in a process. More shapes than Dynamo's limit raise."""
    return Elementwise(**{field.name: compile_exact(getattr(EAGER, field.name)) for field in fields(Elementwise)})


def elementwise(*, compile_it: bool) -> Elementwise:
    """The compiled functions, or the plain ones where a shape is too small or too rare to be worth compiling."""
    return compiled() if compile_it else EAGER


def compile_exact(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function compiled whole, for the exact shapes it meets."""
    return torch.compile(function, fullgraph=True, dynamic=False)
