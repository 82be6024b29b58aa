"""A target in bfloat16, then the same weights in float8, in one process: what it saves, and what it changes.

Random weights multiply rounding errors from layer to layer as trained ones do not: the errors here compare one way of rounding
with another, those of a real target come from `slipstream check`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slipstream.device.graph_choice import Wish
from slipstream.launch.bench.ceilings import SIDE, Ceilings, median_ms
from slipstream.launch.bench.target import DEVICE, Clock, Say, TargetFigures, build_subject, measure_subject, wrap_model
from slipstream.target.float8 import E4M3, check_device, cuda_product
from slipstream.target.float8_layers import quantise_decoder
from slipstream.target.parity import row_error

FEWEST_REPEATS = 3


@dataclass(frozen=True, slots=True)
class Float8Figures:
    """Both runs, and `speedup`, the time of the first over the second's.

    `tap_errors` of each tap, against bfloat16 on the same pack: `row_error`. `product_tflops` is of one e4m3 product of side
    8192, as the `matmul_tflops` of the ceilings are of one in bfloat16.
    """

    bfloat16: TargetFigures
    float8: TargetFigures
    speedup: float
    tap_errors: tuple[float, ...]
    product_tflops: float


def measure_float8(
    *, shape: str, pack_tokens: int, ceilings: Ceilings, layers: int | None, repeats: int, graphs: Wish = "auto", say: Say
) -> Float8Figures:
    """Measure one shape in both types on the current CUDA device, bfloat16 with a third of the repeats.

    Layers are rounded one by one in the memory of the first run's. Raises `TargetError` on a GPU without float8 products.
    """
    check_device(DEVICE)
    peak = product_tflops()
    say(f"e4m3 8192^3: {peak:.0f} TFLOP/s")
    subject = build_subject(shape=shape, pack_tokens=pack_tokens, layers=layers, say=say)
    fewer = max(FEWEST_REPEATS, repeats // 3)
    before = measure_subject(subject, ceilings=ceilings, repeats=fewer, graphs=graphs, say=say)
    pack = subject.packs[0]
    subject.target.capture(pack, hidden_TKD=subject.slot_TKD)
    expected_TKD = subject.slot_TKD[: pack.num_tokens].clone()
    with Clock() as build:
        quantise_decoder(subject.model, device=DEVICE)
        subject.target = wrap_model(subject.model, taps=subject.taps, float8=True)
    subject.build_seconds = build.seconds
    after = measure_subject(subject, ceilings=ceilings, repeats=repeats, graphs=graphs, say=say)
    subject.target.capture(pack, hidden_TKD=subject.slot_TKD)
    errors = tuple(
        _tap_error(subject.slot_TKD[: pack.num_tokens, tap], expected_TKD[:, tap]) for tap in range(len(subject.taps))
    )
    speedup = before.milliseconds / after.milliseconds
    say(f"float8 is {speedup:.3f} times as fast; errors on taps {', '.join(f'{error:.3f}' for error in errors)}")
    return Float8Figures(bfloat16=before, float8=after, speedup=speedup, tap_errors=errors, product_tflops=peak)


def product_tflops() -> float:
    """One product of side 8192 in e4m3, on random data."""
    product, step = cuda_product(), torch.ones(1, device=DEVICE)
    left, right = (torch.randn(SIDE, SIDE, device=DEVICE).to(E4M3) for _ in range(2))
    return 2 * SIDE**3 / median_ms(lambda: product(left, right, step, step), repeats=20) / 1e9


def _tap_error(left_TD: torch.Tensor, right_TD: torch.Tensor) -> float:
    return float(row_error(left_TD[:, None], right_TD[:, None]))
