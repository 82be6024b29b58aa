"""The kernels of packed rows in plain PyTorch, document by document: what the GPU's are compared with."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from slipstream.target.frame import Frame
from slipstream.target.kernels import Kernels


def spans(frame: Frame) -> list[slice]:
    return [slice(begin, end) for begin, end in pairwise(frame.cu_seqlens_M.tolist())]


def attention(query: Tensor, key: Tensor, value: Tensor, *, frame: Frame, scale: float, window: int | None) -> Tensor:
    output = torch.full_like(query, float("nan"))
    for span in spans(frame):
        q, k, v = (part[span].transpose(0, 1)[None] for part in (query, key, value))
        distance = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])[None]
        seen = (distance >= 0) & (distance < (window or q.shape[2]))
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True)
        output[span] = mixed[0].transpose(0, 1)
    return output


def convolution(rows: Tensor, weight: Tensor, frame: Frame) -> Tensor:
    output = torch.full(rows.shape, float("nan"), dtype=rows.dtype)
    for span in spans(frame):
        padded = functional.pad(rows[span].T[None], (weight.shape[1] - 1, 0))
        output[span] = functional.silu(functional.conv1d(padded, weight[:, None], groups=len(weight)))[0].T
    return output


def delta_rule(query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, strength: Tensor, frame: Frame) -> Tensor:
    output = torch.full_like(value, float("nan"))
    groups = value.shape[1] // key.shape[1]
    for span in spans(frame):
        q, k = (part[span].repeat_interleave(groups, dim=1)[None] for part in (query, key))
        mixed, _ = torch_chunk_gated_delta_rule(
            q, k, value[span][None], g=log_decay[span][None], beta=strength[span][None], use_qk_l2norm_in_kernel=True
        )
        output[span] = mixed[0]
    return output


def exact_product(rows: Tensor, weight: Tensor, row_step: Tensor, weight_step: Tensor) -> Tensor:
    """What e4m3 rows times e4m3 weights stand for, in fp32."""
    return (rows.float() @ weight.float().T) * (row_step * weight_step)


def reference_kernels() -> Kernels:
    return Kernels(attention=attention, convolution=convolution, delta_rule=delta_rule)
