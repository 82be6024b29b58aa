"""Fused layers whose large matrices are float8: the mixers of `attention` and `delta_net` between products of `float8`.

A delta net's write strength and decay are products of their own, in bfloat16: what they get wrong, its state keeps.

Shape letters: R rows · L tokens of a row · T = R · L · D hidden size · F width of the MLP · P columns of a projection.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from slipstream.errors import TargetError
from slipstream.target.delta_net import DeltaNetMixer
from slipstream.target.elementwise import Elementwise, elementwise
from slipstream.target.float8 import Float8Weight, norm_step
from slipstream.target.float8_elementwise import Float8Elementwise, Rounded, float8_elementwise
from slipstream.target.frame import Frame
from slipstream.target.fused import FusedLayer, can_fuse
from slipstream.target.kernels import Kernels
from slipstream.target.loading import decoder_layers


class Float8Layer(nn.Module):
    """norm → mixer → norm → gated MLP, both added to the residual stream; its four products read e4m3."""

    NUM_PRODUCTS = 4

    mixer_scale_D: Tensor
    weight_gates_PD: Tensor

    def __init__(self, layer: FusedLayer) -> None:
        """Round a fused layer's matrices. Its mixer moves in here, without them: the layer itself is of no use afterwards."""
        super().__init__()
        self.eps, self.mixer = layer.eps, layer.mixer
        weight_in_PD, weight_out_DP = self.mixer.weight_in_PD, self.mixer.weight_out_DP
        del self.mixer.weight_in_PD, self.mixer.weight_out_DP
        after_norm = {"row_step": norm_step(weight_in_PD.shape[1])}
        num_rounded = len(weight_in_PD)
        if isinstance(self.mixer, DeltaNetMixer):
            num_rounded = sum(self.mixer.widths[:4])
            self.register_buffer("weight_gates_PD", weight_in_PD[num_rounded:].clone())
            self.register_buffer("mixer_scale_D", layer.mixer_scale_D)
        self.mixer_in = Float8Weight(weight_in_PD[:num_rounded], column_scale_D=layer.mixer_scale_D, **after_norm)
        self.mixer_out = Float8Weight(weight_out_DP)
        self.gate_up = Float8Weight(layer.weight_gate_up_2FD, column_scale_D=layer.mlp_scale_D, **after_norm)
        self.down = Float8Weight(layer.weight_down_DF)

    def forward(
        self, hidden_states: Tensor, *, position_embeddings: Any, frame: Frame, kernels: Kernels, **_others: Any
    ) -> Tensor:
        """The layer's output `[R, L, D]`, which is the memory of `hidden_states`. Called by transformers' own loop."""
        plain, ops = elementwise(compile_it=frame.compiled), float8_elementwise(compile_it=frame.compiled)
        residual_TD = hidden_states.view(-1, hidden_states.shape[-1])
        mixed = self._mixed(residual_TD, rotation=position_embeddings, frame=frame, kernels=kernels, plain=plain, ops=ops)
        _add(residual_TD, mixed, self.mixer_out, kernels=kernels, ops=ops)
        active = ops.swiglu(kernels.multiply(ops.norm(residual_TD, self.eps), self.gate_up))
        _add(residual_TD, active, self.down, kernels=kernels, ops=ops)
        return hidden_states

    def _mixed(
        self, residual_TD: Tensor, *, rotation: Any, frame: Frame, kernels: Kernels, plain: Elementwise, ops: Float8Elementwise
    ) -> Rounded:
        mixer = self.mixer
        if isinstance(mixer, DeltaNetMixer):
            rounded_TD, normed_TD = ops.norm_twice(residual_TD, self.mixer_scale_D, self.eps)
            columns = kernels.multiply(rounded_TD, self.mixer_in).split(mixer.widths[:4], dim=1)
            gates = functional.linear(normed_TD, self.weight_gates_PD)[:, : sum(mixer.widths[4:])].split(
                mixer.widths[4:], dim=1
            )
            mixed_THE, gate_THE = mixer.mix((*columns, *gates), frame=frame, kernels=kernels, ops=plain)
            return ops.gated_norm(mixed_THE, gate_THE, mixer.norm_scale_E, mixer.eps)
        projected_TP = kernels.multiply(ops.norm(residual_TD, self.eps), self.mixer_in)
        attended_THE, gates_THE = mixer.attend(projected_TP, rotation=rotation, frame=frame, kernels=kernels, ops=plain)
        return ops.rounded(attended_THE.flatten(1)) if gates_THE is None else ops.gate_heads(attended_THE, gates_THE)


def _add(residual_TD: Tensor, rows: Rounded, weight: Float8Weight, *, kernels: Kernels, ops: Float8Elementwise) -> None:
    rows_TP, step_T = rows
    ops.add_rows(residual_TD, kernels.multiply(rows_TP, weight), step_T)


def quantise_decoder(model: Any, *, device: str) -> None:
    """Replace a decoder's layers by float8 ones on `device`, then move what is left there.

    `model` is as loaded, anywhere, or has fused layers already. Layer by layer: the device never holds more of it than the
    float8 layers so far and one layer as it was, three times at most while matrices are merged and rounded. Raises
    `TargetError` for layers that are not known, or whose matrices are of odd sizes.
    """
    layers = decoder_layers(model, count=model.config.num_hidden_layers)
    if not all(isinstance(layer, FusedLayer) for layer in layers) and not can_fuse(layers):
        raise TargetError(
            key="target.dtype",
            value="float8",
            rule=f"there are no float8 layers for a {model.config.model_type}",
            hint='use "bfloat16"',
        )
    for index in range(len(layers)):
        layers[index] = _quantised(layers[index], device=device)
    model.to(device)


def _quantised(layer: Any, *, device: str) -> Float8Layer:
    layer.to(device)
    return Float8Layer(layer if isinstance(layer, FusedLayer) else FusedLayer(layer))
