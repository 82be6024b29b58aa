"""The gated delta net of Qwen3.5 and 3.6 on packed rows: our own mixer, since transformers' lets documents leak.

Its convolution ignores where documents end, so each one would reach three tokens into the next; and while a compiler traces, it
falls back in silence to a plain PyTorch delta rule. Here the kernels are handed in, and both are told the borders.

Shape letters: T tokens of a row · D hidden size · P columns of the merged projection · H value heads · E head size · W taps of
the convolution.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from slipstream.target.elementwise import Elementwise
from slipstream.target.frame import Frame
from slipstream.target.kernels import Kernels

PADDED_TO = 128
"""Columns of the merged projection are filled up to a multiple of this, so that each row begins on a 256-byte border."""


class DeltaNetMixer(nn.Module):
    """A gated delta net with one merged projection: query, key, value, output gate, strength, step.

    Strength and step alone would be products of 48 columns each, which cost as much as hundreds.
    """

    NUM_CONVOLUTIONS = 3
    """Launched by `mix`: of query, key and value. The delta rule is launched once."""

    weight_in_PD: Tensor
    weight_out_DP: Tensor
    conv_q: Tensor
    conv_k: Tensor
    conv_v: Tensor
    norm_scale_E: Tensor
    decay_H: Tensor
    step_bias_H: Tensor

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.num_heads, self.num_key_heads = int(net.num_v_heads), int(net.num_k_heads)
        self.head_size, self.key_size = int(net.head_v_dim), int(net.head_k_dim)
        self.eps = float(net.layer_norm_epsilon)
        keys, values = self.num_key_heads * self.key_size, self.num_heads * self.head_size
        self.widths = (keys, keys, values, values, self.num_heads, self.num_heads)
        projections = (net.in_proj_qkv, net.in_proj_z, net.in_proj_b, net.in_proj_a)
        self.register_buffer("weight_in_PD", _stack([projection.weight.detach() for projection in projections]))
        self.register_buffer("weight_out_DP", net.out_proj.weight.detach())
        for name, taps in zip(("q", "k", "v"), net.conv1d.weight.detach().squeeze(1).split((keys, keys, values)), strict=True):
            self.register_buffer(f"conv_{name}", taps.contiguous())
        self.register_buffer("norm_scale_E", net.norm.weight.detach().float())
        self.register_buffer("decay_H", -net.A_log.detach().float().exp())
        self.register_buffer("step_bias_H", net.dt_bias.detach().float())

    def add_to(
        self, residual_TD: Tensor, normed_TD: Tensor, *, rotation: Any, frame: Frame, kernels: Kernels, ops: Elementwise
    ) -> None:
        """Add the mixed rows to the residual stream, in place. A delta net knows no `rotation`."""
        projected_TP = functional.linear(normed_TD, self.weight_in_PD)
        columns = projected_TP[:, : sum(self.widths)].split(self.widths, dim=1)
        mixed_THE, gate_THE = self.mix(columns, frame=frame, kernels=kernels, ops=ops)
        rows_TP = ops.gated_norm(mixed_THE, gate_THE, self.norm_scale_E, self.eps)
        residual_TD.addmm_(rows_TP, self.weight_out_DP.t())

    def mix(self, columns: Sequence[Tensor], *, frame: Frame, kernels: Kernels, ops: Elementwise) -> tuple[Tensor, Tensor]:
        """What lies between the two products: mixed values and output gates `[T, H, E]`.

        `columns` are views `[T, width]` of any row stride: query, key, value, output gate, strength, step.
        """
        # One convolution for each of the three: it reads any row stride and writes contiguous heads, which the delta rule
        # would otherwise copy.
        query, key, value = (
            kernels.convolve(rows, taps, frame=frame).unflatten(1, (-1, size))
            for rows, taps, size in zip(
                columns[:3],
                (self.conv_q, self.conv_k, self.conv_v),
                (self.key_size, self.key_size, self.head_size),
                strict=True,
            )
        )
        log_decay_TH, strength_TH = ops.delta_gates(columns[4], columns[5], self.decay_H, self.step_bias_H)
        mixed_THE = kernels.mix(query, key, value, log_decay_TH, strength_TH, frame=frame)
        return mixed_THE, columns[3].unflatten(1, (self.num_heads, -1))


def _stack(weights: list[Tensor]) -> Tensor:
    missing = -sum(len(weight) for weight in weights) % PADDED_TO
    filling = weights[0].new_zeros(missing, weights[0].shape[1])
    return torch.cat([*weights, filling])
