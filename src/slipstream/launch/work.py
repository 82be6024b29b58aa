"""What a rank's GPU can do in a second and what its packs are worth, for metrics. Formulas are those of `plan.flops`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from slipstream.config import DrafterShape, TargetInfo
from slipstream.plan.flops import target_flops
from slipstream.plan.known_gpus import find_gpu
from slipstream.plan.weights import count_target_weights
from slipstream.records import Pack
from slipstream.trainer.worth import GpuWork


def gpu_work(*, info: TargetInfo, shape: DrafterShape, device: str, makes_packs: bool) -> GpuWork:
    """The peak of this process's GPU if it is a known one; the target's work too where this process runs it itself."""
    known = find_gpu(torch.cuda.get_device_name()) if device == "cuda" else None
    return GpuWork(
        peak_flops=None if known is None else known.peak_tflops * 1e12,
        target_flops=_of_target(info=info, shape=shape) if makes_packs else None,
    )


def _of_target(*, info: TargetInfo, shape: DrafterShape) -> Callable[[Pack], float]:
    depth = shape.tap_layers[-1] + 1
    matrix_parameters = sum(count_target_weights(info).layers[:depth])
    attention_layers = sum(kind != "linear_attention" for kind in info.layer_types[:depth])

    def flops(pack: Pack) -> float:
        lengths = np.diff(pack.starts).astype(np.float64)
        return target_flops(
            matrix_parameters=matrix_parameters,
            tokens=pack.num_tokens,
            attention_layers=attention_layers,
            attention_width=info.num_attention_heads * info.head_dim,
            squared_tokens=float((lengths * lengths).sum()),
        )

    return flops
