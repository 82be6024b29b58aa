"""What lies between the drafter's matrix products, forward and backward, as pure functions of tensors.

On CUDA each is compiled once for each shape and shared by all layers: they see neither modules nor autograd, so that
training, validation and layer number make no variants. On a CPU they run as they stand, which is what tests compare.

Shape letters: R rows · T context tokens · N anchors · B block size · Q = N * B slots · U = N + 1 distinct slot inputs ·
D hidden · F any width · H heads · C head width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F


def run(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of this module, compiled if the first argument is on CUDA. No gradient flows through it."""
    plain = [argument.detach() if isinstance(argument, torch.Tensor) else argument for argument in arguments]
    chosen = _compiled(function) if plain[0].is_cuda else function
    with torch.no_grad():
        return chosen(*plain)


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False, fullgraph=True)


def norm(x_RD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm, as `RMSNorm` computes it."""
    unit, _ = _unit(x_RD, eps)
    return weight_D * unit.to(x_RD.dtype)


def norm_backward(
    grad_RD: torch.Tensor, x_RD: torch.Tensor, weight_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of `norm` by its input and its weight."""
    grad, scale = _norm_gradients(grad_RD, x_RD, weight_D, eps)
    return grad.to(x_RD.dtype), scale.sum(dim=0).to(weight_D.dtype)


def norm_backward_joined(
    grad_RD: torch.Tensor, residual_RD: torch.Tensor, x_RD: torch.Tensor, weight_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same where the input also goes on past the norm, and a gradient comes back from there."""
    grad, scale = _norm_gradients(grad_RD, x_RD, weight_D, eps)
    return (grad + residual_RD.float()).to(x_RD.dtype), scale.sum(dim=0).to(weight_D.dtype)


def joined_norm(context_TD: torch.Tensor, x_RD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """Context rows as they are, then normed rows: `[T + R, D]`, one operand for the products of both."""
    return torch.cat((context_TD, norm(x_RD, weight_D, eps)))


def head_rope(
    x_RHC: torch.Tensor, weight_C: torch.Tensor, cos_RC: torch.Tensor, sin_RC: torch.Tensor, eps: float
) -> torch.Tensor:
    """Heads normed, then rotated by their rows' positions."""
    heads = norm(x_RHC, weight_C, eps)
    first, second = heads.chunk(2, dim=-1)
    return heads * cos_RC[:, None] + torch.cat((-second, first), dim=-1) * sin_RC[:, None]


def head_rope_backward(
    grad_RHC: torch.Tensor,
    x_RHC: torch.Tensor,
    weight_C: torch.Tensor,
    cos_RC: torch.Tensor,
    sin_RC: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of `head_rope` by heads and weight."""
    grad = grad_RHC.float()
    first, second = (grad * sin_RC[:, None].float()).chunk(2, dim=-1)
    turned = grad * cos_RC[:, None].float() + torch.cat((second, -first), dim=-1)
    grad, scale = _norm_gradients(turned, x_RHC, weight_C, eps)
    return grad.to(x_RHC.dtype), scale.sum(dim=(0, 1)).to(weight_C.dtype)


def gated(gate_RF: torch.Tensor, up_RF: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up`."""
    return F.silu(gate_RF) * up_RF


def gated_backward(grad_RF: torch.Tensor, gate_RF: torch.Tensor, up_RF: torch.Tensor) -> None:
    """Gradients by gate and up in the place of both, and in that of `grad_RF` the product itself, which need not be kept.

    On CUDA one kernel, which allocates nothing: an MLP is the widest that there is.
    """
    grad, gate, up = grad_RF.float(), gate_RF.float(), up_RF.float()
    share = torch.sigmoid(gate)
    silu = gate * share
    by_gate, by_up, product = grad * up * (share + silu * (1.0 - share)), grad * silu, silu * up
    gate_RF.copy_(by_gate)
    up_RF.copy_(by_up)
    grad_RF.copy_(product)


def spread(rows_UF: torch.Tensor, block_size: int) -> torch.Tensor:
    """From the N anchors' rows and the one row of the mask token to a row for each slot, `[N * B, F]`."""
    anchors, mask = rows_UF[:-1, None], rows_UF[-1:, None]
    count, width = len(rows_UF) - 1, rows_UF.shape[1]
    return torch.cat((anchors, mask.expand(count, block_size - 1, width)), dim=1).reshape(count * block_size, width)


def fold(grad_QF: torch.Tensor, block_size: int) -> torch.Tensor:
    """Gradient of `spread`: slots 1 to B - 1 of all blocks add up to the mask token's row."""
    blocks = grad_QF.reshape(-1, block_size, grad_QF.shape[1])
    mask = blocks[:, 1:].sum(dim=(0, 1), dtype=torch.float32).to(grad_QF.dtype)
    return torch.cat((blocks[:, 0], mask[None]))


def _unit(x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    wide = x.float()
    inverse = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return wide * inverse, inverse


def _norm_gradients(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """In fp32: the gradient by the input, and what summed over rows is the one by the weight."""
    unit, inverse = _unit(x, eps)
    wide = grad.float()
    inner = wide * weight.float()
    return inverse * (inner - unit * (inner * unit).mean(dim=-1, keepdim=True)), wide * unit
