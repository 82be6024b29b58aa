"""Attention of packed rows: as a function that transformers' own layers call, and as the mixer of our fused layers.

Shape letters: T tokens of a row · D hidden size · P columns of a merged projection · H query heads · G key heads · E head size
· R rotated dimensions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

from slipstream.errors import TargetError
from slipstream.target.elementwise import Elementwise
from slipstream.target.frame import Frame
from slipstream.target.kernels import Kernels

PACKED_ATTENTION = "slipstream_packed"
"""Name of our function among transformers' attention functions. No mask is built for a name that it does not know."""

REFUSED = ("softcap", "s_aux", "position_bias")
"""What some models ask of an attention function, and the kernels cannot do."""


def attend_packed(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    frame: Frame | None = None,
    kernels: Kernels | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention function for our frames: `[R, H, L, E]` in, `[R, L, H, E]` out, no mask, no dropout.

    `frame` and `kernels` travel through the model's keyword arguments. Raises `TargetError` when a model lost them on the way,
    or asks for something that the kernels would leave out.
    """
    refused = [name for name in REFUSED if others.get(name) is not None]
    if frame is None or kernels is None or attention_mask is not None or refused:
        raise TargetError(
            key="target.model",
            value=type(module).__name__,
            rule=f"its attention asks for {', '.join(refused) or 'a mask of its own'}: packed rows have none on this device",
            hint='use target.dtype = "float32", which runs the model as transformers has it',
        )
    rows, heads, length, size = query.shape
    query_THE, key_TGE, value_TGE = (part.transpose(1, 2).flatten(0, 1) for part in (query, key, value))
    scale = size**-0.5 if scaling is None else scaling
    attended_THE = kernels.attend(query_THE, key_TGE, value_TGE, frame=frame, scale=scale, window=sliding_window)
    return attended_THE.view(rows, length, heads, -1), None


AttentionInterface.register(PACKED_ATTENTION, attend_packed)


class AttentionMixer(nn.Module):
    """Attention of a Llama-like layer with one merged projection: queries (each with its gate, where there are gates), keys,
    values; the output is added to the residual stream inside the matrix product.
    """

    weight_in_PD: Tensor
    weight_out_DP: Tensor
    q_norm_scale: Tensor | None
    k_norm_scale: Tensor | None

    def __init__(self, attention: Any, *, norm_offset: float) -> None:
        super().__init__()
        config = attention.config
        self.head_size: int = attention.head_dim
        self.num_heads: int = config.num_attention_heads
        self.num_key_heads: int = config.num_key_value_heads
        self.gated = attention.q_proj.out_features == 2 * self.num_heads * self.head_size
        self.scale: float = attention.scaling
        self.window = sliding_window_of(attention)
        self.eps: float = config.rms_norm_eps
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        self.register_buffer("weight_in_PD", torch.cat([projection.weight.detach() for projection in projections]))
        self.register_buffer("weight_out_DP", attention.o_proj.weight.detach())
        for name in ("q_norm", "k_norm"):
            norm = getattr(attention, name, None)
            self.register_buffer(f"{name}_scale", None if norm is None else norm.weight.detach().float() + norm_offset)

    def add_to(
        self, residual_TD: Tensor, normed_TD: Tensor, *, rotation: Any, frame: Frame, kernels: Kernels, ops: Elementwise
    ) -> None:
        """Add the attention of the normed rows to the residual stream, in place. `rotation` is cosine and sine `[R, L, E]`."""
        projected_TP = functional.linear(normed_TD, self.weight_in_PD)
        attended_THE, gate_THE = self.attend(projected_TP, rotation=rotation, frame=frame, kernels=kernels, ops=ops)
        rows_TP = attended_THE.flatten(1) if gate_THE is None else ops.gate_heads(attended_THE, gate_THE)
        residual_TD.addmm_(rows_TP, self.weight_out_DP.t())

    def attend(
        self, projected_TP: Tensor, *, rotation: Any, frame: Frame, kernels: Kernels, ops: Elementwise
    ) -> tuple[Tensor, Tensor | None]:
        """What lies between the two products: attended values `[T, H, E]` and, where there are gates, theirs."""
        heads, key_heads, size = self.num_heads, self.num_key_heads, self.head_size
        query_width = heads * size * (2 if self.gated else 1)
        query, key, value = projected_TP.split((query_width, key_heads * size, key_heads * size), dim=1)
        query, key, value = (
            query.unflatten(1, (heads, -1)),
            key.unflatten(1, (key_heads, -1)),
            value.unflatten(1, (key_heads, -1)),
        )
        cos_TR, sin_TR = (part.expand(*frame.token_ids_RL.shape, -1).flatten(0, 1) for part in rotation)
        query_THE, key_TGE = ops.rotate_both(
            query[..., :size], key, cos_TR, sin_TR, self.q_norm_scale, self.k_norm_scale, self.eps
        )
        attended_THE = kernels.attend(query_THE, key_TGE, value, frame=frame, scale=self.scale, window=self.window)
        return attended_THE, query[..., size:] if self.gated else None


def sliding_window_of(attention: Any) -> int | None:
    """How many keys a token of this attention module sees, itself among them; None for all before it."""
    window = getattr(attention, "sliding_window", None)
    if window is None and attention.config.model_type == "mistral":
        window = attention.config.sliding_window
    return None if window is None else int(window)
