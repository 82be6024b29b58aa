"""How a target runs on a GPU: packed rows, fused layers where the architecture is known, and proof of which kernels ran.

Waits for nothing: borders come from the plan's pack in one copy, no mask is built, no value is read back.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import TargetError
from slipstream.target.attention import PACKED_ATTENTION
from slipstream.target.delta_net import DeltaNetMixer
from slipstream.target.float8_layers import Float8Layer
from slipstream.target.frame import Frame, FrameRing, FrameSize, send_frame
from slipstream.target.fused import can_fuse, fuse_layers
from slipstream.target.kernels import Kernels
from slipstream.target.layouts import Forward
from slipstream.target.loading import decoder_layers

COMPILE_FROM_TOKENS = 1024
"""Packed rows shorter than this are bound by launches: compiling for them costs seconds and saves nothing."""

SUPPORTED_KINDS: Mapping[str, Mapping[str, int]] = {
    "full_attention": {"attention": 1},
    "sliding_attention": {"attention": 1},
    "linear_attention": {"convolution": DeltaNetMixer.NUM_CONVOLUTIONS, "delta_rule": 1},
}
"""Layer types of a config, and the kernels that each must launch in a forward, with how often."""

log = logging.getLogger(__name__)


class Engine:
    """Runs a loaded decoder on frames. Changes the model in place; afterwards only frames go through it.

    Layers that `float8_layers` has replaced stay as they are.
    """

    def __init__(self, model: Any, *, kernels: Kernels) -> None:
        config = model.config
        kinds = list(getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers)
        layers = decoder_layers(model, count=config.num_hidden_layers)
        self._float8 = sum(isinstance(layer, Float8Layer) for layer in layers)
        assert self._float8 in (0, len(layers)), "all layers are float8, or none"
        self.fused = self._float8 > 0 or can_fuse(layers)
        self._model, self._kernels = model, kernels
        self._ring = FrameRing(model.device) if model.device.type == "cuda" else None
        self._hybrid = "linear_attention" in kinds
        unknown = sorted(set(kinds) - set(SUPPORTED_KINDS))
        if unknown or getattr(config, "attn_logit_softcapping", None) or (self._hybrid and not self.fused):
            raise TargetError(
                key="target.dtype",
                value=str(model.dtype).removeprefix("torch."),
                rule=f"there are no packed kernels for a {config.model_type} of {', '.join(unknown or sorted(set(kinds)))}",
                hint='"float32" runs it as transformers has it, slowly',
            )
        self._expected: Counter[str] = Counter()
        for kind in kinds:
            self._expected.update(SUPPORTED_KINDS[kind])
        if self._float8:
            self._expected["float8 product"] = self._float8 * Float8Layer.NUM_PRODUCTS
        elif self.fused:
            fuse_layers(layers)
        # Transformers builds no mask for an attention function that it does not know the mask of.
        model.set_attn_implementation(PACKED_ATTENTION)
        log.info("packed attention; %s layers; kernels a forward: %s", self.layers, dict(self._expected))

    @property
    def layers(self) -> str:
        """Whose decoder layers run: "fused" ones, "fused, float8", or those of "transformers"."""
        if self._float8:
            return "fused, float8"
        return "fused" if self.fused else "transformers"

    @property
    def unrecordable(self) -> str | None:
        """Why its forward cannot be recorded once for many packs, in words; none where it can be."""
        if not self.fused:
            return "its layers are those of transformers"
        if self._hybrid:
            return "its delta nets launch as many programs as a pack's documents need"
        return None

    @property
    def has_windows(self) -> bool:
        """Whether a layer's attention has a window: one that is wider than the longest sequence is none."""
        return getattr(self._model.config, "sliding_window", None) is not None

    def frame(
        self,
        forward: Forward,
        *,
        num_tokens: int,
        packed: bool,
        size: FrameSize | None = None,
        memory: Tensor | None = None,
    ) -> Frame:
        """Send a forward's inputs and borders to the device. `num_tokens`: the real tokens of a packed row.

        `size` and `memory` as in `send_frame`.
        """
        compiled = packed and forward.token_ids.size >= COMPILE_FROM_TOKENS and self._ring is not None
        return send_frame(forward, num_tokens=num_tokens, ring=self._ring, compiled=compiled, size=size, memory=memory)

    def run(self, frame: Frame) -> Any:
        """The model's output for a frame. Raises `TargetError` if a layer went around the kernels that it should launch."""
        before = Counter(self._kernels.calls)
        with torch.inference_mode():
            output = self._model(
                input_ids=frame.token_ids_RL,
                position_ids=frame.position_ids_RL,
                attention_mask={"full_attention": None, "linear_attention": None} if self._hybrid else None,
                use_cache=False,
                frame=frame,
                kernels=self._kernels,
            )
        launched = self._kernels.calls - before
        if launched != self._expected:
            raise TargetError(
                key="target.model",
                value=self._model.config.model_type,
                rule=f"its layers launched {dict(launched)} of our kernels in a forward, not {dict(self._expected)}",
                hint='use target.dtype = "float32", which runs the model as transformers has it',
            )
        return output
