"""The layers of a training pass as few large steps whose backward is written out: what runs on CUDA.

The same mathematics as the modules in `layers.py`, on their weights. What is cheap to make again is not kept for backward
(normed rows, the gated product, hidden states without the rows that nobody sees), gradients take the place of what was kept
for them, a residual's gradient is added where the norm's is made, context and slots share the products of keys and values,
and two facts of a block are used: slots after the anchor hold the same mask token, so the first layer projects it once;
slot 0 predicts nothing, so after the last attention it goes no further.

Shape letters: T context tokens · N anchors · B block size · Q = N * B slots · U = N + 1 distinct slot inputs · R rows ·
K = T + Q keys · D hidden · H query heads · G key-value heads · C head width. Of hidden states, K are the tapped layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from slipstream.drafter import elementwise as ew
from slipstream.drafter.layers import DecoderLayer, RMSNorm, Rope

Tensors = tuple[torch.Tensor | None, ...]

AttendJoined = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""`(query_HQC, key_GKC, value_GKC) -> output_QHC`, keys of the context first."""


@dataclass(frozen=True, slots=True)
class BlockRows:
    """What the slots start from: distinct inputs `[U, D]` (anchors' embeddings, then the mask token's), and the blocks."""

    distinct_UD: torch.Tensor
    num_blocks: int
    block_size: int


def fused_norm(x_RD: torch.Tensor, module: RMSNorm) -> torch.Tensor:
    """`module(x_RD)`."""
    normed: torch.Tensor = _Norm.apply(x_RD, module.weight, module.eps)
    return normed


def fused_context(hidden_TKD: torch.Tensor, seen_T: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Hidden states `[T, K, D]`, as 0 where `seen_T` (bool) says no, projected by `weight` `[D, K D]` in its type: `[T, D]`.

    They are kept for backward as they are, not the copy in which rows are 0: nobody may write to them until it is over.
    """
    projected: torch.Tensor = _Context.apply(hidden_TKD, seen_T, weight)
    return projected


def fused_layers(
    *,
    layers: Sequence[DecoderLayer],
    final_norm: RMSNorm,
    attends: Sequence[AttendJoined],
    rows: BlockRows,
    context_TD: torch.Tensor,
    context_rope: Rope,
    own_rope: Rope,
) -> torch.Tensor:
    """Hidden states `[N, B, D]` after the final norm; slot 0 is 0. `attends` has one entry for each layer."""
    blocks, size = rows.num_blocks, rows.block_size
    rope = (*own_rope, *(torch.cat(pair) for pair in zip(context_rope, own_rope, strict=True)))
    x_QD: torch.Tensor = ew.run(ew.spread, rows.distinct_UD, size)
    for index, (layer, attend) in enumerate(zip(layers, attends, strict=True)):
        mixer = layer.self_attn
        source, spread = (rows.distinct_UD, size) if index == 0 else (x_QD, 0)
        query, key, value, passed = _AttentionInputs.apply(
            source, context_TD, layer.input_layernorm.weight,
            mixer.q_proj.weight, mixer.k_proj.weight, mixer.v_proj.weight, mixer.q_norm.weight, mixer.k_norm.weight,
            *rope, mixer.q_norm.eps, layer.input_layernorm.eps, spread,
        )  # fmt: skip
        x_QD = x_QD if index == 0 else passed
        seen_QF = attend(query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)).flatten(1)
        x_QD = _OutputAndMlp.apply(
            x_QD, seen_QF, mixer.o_proj.weight, layer.post_attention_layernorm.weight,
            layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight, layer.mlp.down_proj.weight,
            layer.post_attention_layernorm.eps, size if index == len(layers) - 1 else 0,
        )  # fmt: skip
    return _with_anchors(fused_norm(x_QD, final_norm), size).view(blocks, size, -1)


def _predicting(rows_QF: torch.Tensor, size: int) -> torch.Tensor:
    """Rows of slots 1 to B - 1, copied; size 0 leaves all as they are."""
    if not size:
        return rows_QF
    width = rows_QF.shape[1]
    return rows_QF.reshape(-1, size, width)[:, 1:].reshape(-1, width)


def _with_anchors(rows_RF: torch.Tensor, size: int) -> torch.Tensor:
    """The other way round: rows of slots 1 to B - 1 with zeros at slot 0."""
    if not size:
        return rows_RF
    width = rows_RF.shape[1]
    return F.pad(rows_RF.reshape(-1, size - 1, width), (0, 0, 1, 0)).view(-1, width)


class _Context(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, seen: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden, seen)
        ctx.dtype = weight.dtype
        return _visible(hidden, seen, weight.dtype) @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Tensors:
        hidden, seen = ctx.saved_tensors
        return None, None, grad.t() @ _visible(hidden, seen, ctx.dtype)


def _visible(hidden: torch.Tensor, seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Hidden states `[T, K D]` in a type, rows that are not seen as 0 whatever they hold."""
    zero = torch.zeros((), dtype=hidden.dtype, device=hidden.device)
    return torch.where(seen[:, None, None], hidden, zero).to(dtype).flatten(1)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        normed: torch.Tensor = ew.run(ew.norm, x, weight, eps)
        return normed

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Tensors:
        x, weight = ctx.saved_tensors
        grad_x, grad_weight = ew.run(ew.norm_backward, grad.reshape(x.shape).contiguous(), x, weight, ctx.eps)
        return grad_x, grad_weight, None


class _AttentionInputs(torch.autograd.Function):
    """Input norm, projections, norms of heads, RoPE. With `spread` = B the input is `[U, D]` and spread after projecting.

    Returns queries `[Q, H, C]`, keys and values `[K, G, C]`, and the input itself: what leaves there is the residual, whose
    gradient then comes here.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, context: torch.Tensor, norm: torch.Tensor,
        wq: torch.Tensor, wk: torch.Tensor, wv: torch.Tensor, q_norm: torch.Tensor, k_norm: torch.Tensor,
        cos_q: torch.Tensor, sin_q: torch.Tensor, cos_k: torch.Tensor, sin_k: torch.Tensor,
        head_eps: float, eps: float, spread: int,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        tokens, width = len(context), len(q_norm)
        rows = ew.run(ew.joined_norm, context, x, norm, eps)
        query, key, value = rows[tokens:] @ wq.t(), rows @ wk.t(), rows @ wv.t()
        ctx.save_for_backward(x, context, norm, wq, wk, wv, q_norm, k_norm, cos_q, sin_q, cos_k, sin_k, query, key)
        ctx.head_eps, ctx.eps, ctx.spread = head_eps, eps, spread
        query, key, value = _spread(query, 0, spread), _spread(key, tokens, spread), _spread(value, tokens, spread)
        return (
            ew.run(ew.head_rope, query.view(len(query), -1, width), q_norm, cos_q, sin_q, head_eps),
            ew.run(ew.head_rope, key.view(len(key), -1, width), k_norm, cos_k, sin_k, head_eps),
            value.view(len(value), -1, width),
            x.view_as(x),
        )

    @staticmethod
    def backward(
        ctx: Any, grad_q: torch.Tensor, grad_k: torch.Tensor, grad_v: torch.Tensor, residual: torch.Tensor | None
    ) -> Tensors:
        x, context, norm, wq, wk, wv, q_norm, k_norm, cos_q, sin_q, cos_k, sin_k, query, key = ctx.saved_tensors
        tokens, spread, eps = len(context), ctx.spread, ctx.head_eps
        query, key = _spread(query, 0, spread), _spread(key, tokens, spread)
        heads, shared = (len(query), -1, len(q_norm)), (len(key), -1, len(k_norm))
        grad_q, grad_q_norm = ew.run(ew.head_rope_backward, grad_q.contiguous(), query.view(heads), q_norm, cos_q, sin_q, eps)
        grad_k, grad_k_norm = ew.run(ew.head_rope_backward, grad_k.contiguous(), key.view(shared), k_norm, cos_k, sin_k, eps)
        del query, key
        grad_q = _fold(grad_q.flatten(1), 0, spread)
        grad_k = _fold(grad_k.flatten(1), tokens, spread)
        grad_v = _fold(grad_v.flatten(1), tokens, spread)
        rows = ew.run(ew.joined_norm, context, x, norm, ctx.eps)
        grads = (grad_q.t() @ rows[tokens:], grad_k.t() @ rows, grad_v.t() @ rows)
        del rows
        grad_rows = grad_k @ wk
        grad_rows.addmm_(grad_v, wv)
        grad_rows[tokens:].addmm_(grad_q, wq)
        grad_context, grad_own = grad_rows[:tokens], grad_rows[tokens:]
        if spread:
            grad_x, grad_norm = None, ew.run(ew.norm_backward, grad_own, x, norm, ctx.eps)[1]
        else:
            grad_x, grad_norm = ew.run(ew.norm_backward_joined, grad_own, residual, x, norm, ctx.eps)
        return grad_x, grad_context, grad_norm, *grads, grad_q_norm, grad_k_norm, *(None,) * 7


class _OutputAndMlp(torch.autograd.Function):
    """Output projection, residual, norm, gated MLP, residual: `[R, D]` and `[R, H C]` to `[R, D]`.

    With `skip` = B all this is of slots 1 to B - 1 alone, which are picked out here, and again in backward. The gradients of
    gate and up take their place: there is no second backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, seen: torch.Tensor, wo: torch.Tensor, norm: torch.Tensor,
        w_gate: torch.Tensor, w_up: torch.Tensor, w_down: torch.Tensor, eps: float, skip: int,
    ) -> torch.Tensor:  # fmt: skip
        x = torch.addmm(_predicting(x, skip), _predicting(seen, skip), wo.t())
        normed = ew.run(ew.norm, x, norm, eps)
        gate, up = normed @ w_gate.t(), normed @ w_up.t()
        del normed
        ctx.save_for_backward(x, seen, wo, norm, w_gate, w_up, w_down, gate, up)
        ctx.eps, ctx.skip = eps, skip
        return torch.addmm(x, ew.run(ew.gated, gate, up), w_down.t())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Tensors:
        x, seen, wo, norm, w_gate, w_up, w_down, grad_gate, grad_up = ctx.saved_tensors
        grad, skip = grad.contiguous(), ctx.skip
        product = grad @ w_down
        ew.run(ew.gated_backward, product, grad_gate, grad_up)
        grad_w_down = grad.t() @ product
        del product
        normed = ew.run(ew.norm, x, norm, ctx.eps)
        grad_w_gate, grad_w_up = grad_gate.t() @ normed, grad_up.t() @ normed
        del normed
        grad_normed = grad_gate @ w_gate
        grad_normed.addmm_(grad_up, w_up)
        grad_x, grad_norm = ew.run(ew.norm_backward_joined, grad_normed, grad, x, norm, ctx.eps)
        del grad_normed
        grad_seen, grad_wo = _with_anchors(grad_x @ wo, skip), grad_x.t() @ _predicting(seen, skip)
        return _with_anchors(grad_x, skip), grad_seen, grad_wo, grad_norm, grad_w_gate, grad_w_up, grad_w_down, None, None


def _spread(rows: torch.Tensor, tokens: int, size: int) -> torch.Tensor:
    """Rows after the first `tokens` spread over slots; size 0 leaves all as they are."""
    if not size:
        return rows
    own: torch.Tensor = ew.run(ew.spread, rows[tokens:], size)
    return torch.cat((rows[:tokens], own)) if tokens else own


def _fold(grad: torch.Tensor, tokens: int, size: int) -> torch.Tensor:
    if not size:
        return grad
    own: torch.Tensor = ew.run(ew.fold, grad[tokens:], size)
    return torch.cat((grad[:tokens], own)) if tokens else own
