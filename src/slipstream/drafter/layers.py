"""Layers of the drafter: pre-norm decoder layers with grouped queries, normalised heads, RoPE and a gated MLP, as Qwen3's.

Training and decoding run the same code here; they differ only in where the context's keys and values come from.

Shape letters: R rows (context tokens or block slots) · D hidden · H query heads · G key-value heads · C head width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from slipstream.config import DrafterShape

Rope = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines `[R, C]`, in the compute type."""

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""`(query_HRC, context_key_GTC, context_value_GTC, own_key_GRC, own_value_GRC) -> output_RHC`."""


class Linear(nn.Module):
    """A bias-free projection whose weight is left for `initialise` or a checkpoint to fill."""

    def __init__(self, *, inputs: int, outputs: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., inputs]` to `[..., outputs]`."""
        return F.linear(x, self.weight)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis, computed in fp32; the scale is applied in the compute type, as Qwen3 does."""

    def __init__(self, *, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Same shape and type as `x`."""
        return self.weight * F.rms_norm(x.float(), self.weight.shape, eps=self.eps).to(x.dtype)


def rope_tables(*, positions_R: torch.Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Rope:
    """Cosines and sines `[R, C]` of plain RoPE over the whole head: angles in fp32, then cast to the compute type."""
    even = torch.arange(0, head_dim, 2, dtype=torch.int64, device=positions_R.device).float()
    frequencies = 1.0 / (theta ** (even / head_dim))
    angles = positions_R.float()[:, None] * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x_RHC: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Rotate each head by its row's position; halves are paired, not neighbours (GPT-NeoX order)."""
    cos, sin = rope[0][:, None], rope[1][:, None]
    first, second = x_RHC.chunk(2, dim=-1)
    return x_RHC * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Projections of one attention: queries of the block's slots, keys and values of the context and of the slots alike."""

    def __init__(self, *, shape: DrafterShape, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, width = shape.hidden_size, shape.head_dim
        queries, keys = shape.num_attention_heads * width, shape.num_key_value_heads * width
        self.q_proj = Linear(inputs=hidden, outputs=queries, dtype=dtype)
        self.k_proj = Linear(inputs=hidden, outputs=keys, dtype=dtype)
        self.v_proj = Linear(inputs=hidden, outputs=keys, dtype=dtype)
        self.o_proj = Linear(inputs=queries, outputs=hidden, dtype=dtype)
        self.q_norm = RMSNorm(size=width, eps=shape.rms_norm_eps, dtype=dtype)
        self.k_norm = RMSNorm(size=width, eps=shape.rms_norm_eps, dtype=dtype)
        self.head_dim = width

    def query(self, x_RD: torch.Tensor, rope: Rope) -> torch.Tensor:
        """Normalised, rotated queries `[H, R, C]`."""
        heads = self.q_proj(x_RD).view(len(x_RD), -1, self.head_dim)
        return rotate(self.q_norm(heads), rope).transpose(0, 1)

    def key_value(self, x_RD: torch.Tensor, rope: Rope) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalised, rotated keys and plain values, both `[G, R, C]`; `x_RD` is the fused context or the normed slots."""
        keys = self.k_proj(x_RD).view(len(x_RD), -1, self.head_dim)
        values = self.v_proj(x_RD).view(len(x_RD), -1, self.head_dim)
        return rotate(self.k_norm(keys), rope).transpose(0, 1), values.transpose(0, 1)


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, *, shape: DrafterShape, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_proj = Linear(inputs=shape.hidden_size, outputs=shape.intermediate_size, dtype=dtype)
        self.up_proj = Linear(inputs=shape.hidden_size, outputs=shape.intermediate_size, dtype=dtype)
        self.down_proj = Linear(inputs=shape.intermediate_size, outputs=shape.hidden_size, dtype=dtype)

    def forward(self, x_RD: torch.Tensor) -> torch.Tensor:
        """`[R, D]` to `[R, D]`."""
        hidden: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x_RD)) * self.up_proj(x_RD))
        return hidden


class DecoderLayer(nn.Module):
    """One layer. The fused context enters attention as it is: no input norm, no query, no MLP (DFlash, arXiv 2602.06036)."""

    def __init__(self, *, shape: DrafterShape, dtype: torch.dtype) -> None:
        super().__init__()
        self.self_attn = Attention(shape=shape, dtype=dtype)
        self.mlp = Mlp(shape=shape, dtype=dtype)
        self.input_layernorm = RMSNorm(size=shape.hidden_size, eps=shape.rms_norm_eps, dtype=dtype)
        self.post_attention_layernorm = RMSNorm(size=shape.hidden_size, eps=shape.rms_norm_eps, dtype=dtype)

    def forward(
        self,
        x_RD: torch.Tensor,
        *,
        rope: Rope,
        context_key_GTC: torch.Tensor,
        context_value_GTC: torch.Tensor,
        attend: Attend,
    ) -> torch.Tensor:
        """Slots `[R, D]` to slots `[R, D]`; `attend` decides who sees whom."""
        normed = self.input_layernorm(x_RD)
        query = self.self_attn.query(normed, rope)
        own_key, own_value = self.self_attn.key_value(normed, rope)
        seen = attend(query, context_key_GTC, context_value_GTC, own_key, own_value)
        x_RD = x_RD + self.self_attn.o_proj(seen.flatten(1))
        output: torch.Tensor = x_RD + self.mlp(self.post_attention_layernorm(x_RD))
        return output
