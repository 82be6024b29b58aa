"""What the machine gives at best: every ratio that a bench shows divides by these, measured in the same run."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

SIDE = 8192
COPY_BYTES = 4 * 2**30
SUSTAINED_PRODUCTS = 1500
"""About two seconds: long enough for the card to meet its power limit, as a training run does."""


@dataclass(frozen=True, slots=True)
class Ceilings:
    """`matmul_tflops` is the median of single bf16 products of side 8192 on random data, which ratios divide by.

    `sustained_tflops` is the mean over two seconds of them, `copy_gb_per_second` counts bytes read and written.
    """

    matmul_tflops: float
    sustained_tflops: float
    copy_gb_per_second: float


def measure_ceilings(*, device: torch.device) -> Ceilings:
    """Measure all three; takes about four seconds and 9 GiB."""
    left, right = (torch.randn(SIDE, SIDE, device=device, dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(left)
    work = 2 * SIDE**3 / 1e12
    one = median_ms(lambda: torch.mm(left, right, out=product), repeats=20)
    many = median_ms(lambda: _repeat(lambda: torch.mm(left, right, out=product), SUSTAINED_PRODUCTS), repeats=1, warmup=0)
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    copy = median_ms(lambda: target.copy_(source), repeats=10)
    return Ceilings(
        matmul_tflops=work / one * 1e3,
        sustained_tflops=work * SUSTAINED_PRODUCTS / many * 1e3,
        copy_gb_per_second=2 * COPY_BYTES / copy / 1e6,
    )


def median_ms(work: Callable[[], object], *, repeats: int, warmup: int = 3) -> float:
    """Median milliseconds of a piece of device work, by events."""
    for _ in range(warmup):
        work()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for begin, end in marks:
        begin.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return float(statistics.median(begin.elapsed_time(end) for begin, end in marks))


def _repeat(work: Callable[[], object], times: int) -> None:
    for _ in range(times):
        work()
