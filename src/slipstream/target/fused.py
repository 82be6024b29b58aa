"""Decoder layers as few kernels: merged projections, the residual added inside the products, elementwise work fused between.

A fused layer takes the place of transformers' own in the model's list, so that hooks on it, the cut after the last tap and the
model's embedding and rotation stay what they were. It owns the residual stream and updates it in place: what a tap wants of a
layer's output is copied in that layer's hook.

Shape letters: R rows · L tokens of a row · T = R · L · D hidden size · F width of the MLP.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from slipstream.target.attention import AttentionMixer
from slipstream.target.delta_net import DeltaNetMixer
from slipstream.target.elementwise import elementwise
from slipstream.target.frame import Frame
from slipstream.target.kernels import Kernels

NORM_OFFSETS: Mapping[str, float] = {
    "LlamaDecoderLayer": 0.0,
    "MistralDecoderLayer": 0.0,
    "Qwen3DecoderLayer": 0.0,
    "Qwen3_5DecoderLayer": 1.0,
}
"""Layer classes of transformers that are this layer with other numbers; and what their norms add to their weights."""


class FusedLayer(nn.Module):
    """norm → mixer → norm → gated MLP, both added to the residual stream."""

    mixer: AttentionMixer | DeltaNetMixer
    mixer_scale_D: Tensor
    mlp_scale_D: Tensor
    weight_gate_up_2FD: Tensor
    weight_down_DF: Tensor

    def __init__(self, layer: Any) -> None:
        super().__init__()
        offset = NORM_OFFSETS[type(layer).__name__]
        net = getattr(layer, "linear_attn", None)
        self.mixer = AttentionMixer(layer.self_attn, norm_offset=offset) if net is None else DeltaNetMixer(net)
        norms = layer.input_layernorm, layer.post_attention_layernorm
        self.eps = float(getattr(norms[0], "variance_epsilon", getattr(norms[0], "eps", 0.0)))
        assert self.eps > 0, "a norm without an epsilon"
        self.register_buffer("mixer_scale_D", norms[0].weight.detach().float() + offset)
        self.register_buffer("mlp_scale_D", norms[1].weight.detach().float() + offset)
        gate_up = [layer.mlp.gate_proj.weight.detach(), layer.mlp.up_proj.weight.detach()]
        self.register_buffer("weight_gate_up_2FD", torch.cat(gate_up))
        self.register_buffer("weight_down_DF", layer.mlp.down_proj.weight.detach())

    def forward(
        self, hidden_states: Tensor, *, position_embeddings: Any, frame: Frame, kernels: Kernels, **_others: Any
    ) -> Tensor:
        """The layer's output `[R, L, D]`, which is the memory of `hidden_states`. Called by transformers' own loop."""
        ops = elementwise(compile_it=frame.compiled)
        residual_TD = hidden_states.view(-1, hidden_states.shape[-1])
        normed_TD = ops.rms_norm(residual_TD, self.mixer_scale_D, self.eps)
        self.mixer.add_to(residual_TD, normed_TD, rotation=position_embeddings, frame=frame, kernels=kernels, ops=ops)
        normed_TD = ops.rms_norm(residual_TD, self.mlp_scale_D, self.eps)
        active_TF = ops.swiglu(functional.linear(normed_TD, self.weight_gate_up_2FD))
        residual_TD.addmm_(active_TF, self.weight_down_DF.t())
        return hidden_states


def can_fuse(layers: Iterable[Any]) -> bool:
    """Whether every layer is one of the known classes, with SiLU and without biases."""
    return all(
        type(layer).__name__ in NORM_OFFSETS
        and layer.mlp.act_fn.__class__.__name__ in ("SiLUActivation", "SiLU")
        and not any(isinstance(part, nn.Linear) and part.bias is not None for part in layer.modules())
        for layer in layers
    )


def fuse_layers(layers: nn.ModuleList) -> None:
    """Put a fused layer in the place of each one. Weights are merged layer by layer: one layer's worth is held twice."""
    for index in range(len(layers)):
        layers[index] = FusedLayer(layers[index])
