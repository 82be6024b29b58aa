"""The learning rate of a step: a pure function of the plan's step, never of how many steps happened to be finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from slipstream.config.recipe import OptimizerSection


def learning_rate(*, step: int, num_steps: int, optimizer: OptimizerSection) -> float:
    """Learning rate of update `step`, counted from 0, of `num_steps`.

    With W = round(warmup_ratio * num_steps), update s < W takes (s + 1) / (W + 1) of the peak, update W the peak itself;
    the minimum would be reached at update `num_steps`, so that no update is spent on a rate of 0.
    """
    assert 0 <= step < num_steps, f"step {step} is outside the plan of {num_steps} steps"
    warmup = min(round(optimizer.warmup_ratio * num_steps), num_steps - 1)
    if step < warmup:
        return optimizer.lr * (step + 1) / (warmup + 1)
    share = SCHEDULES[optimizer.schedule](step - warmup, num_steps - warmup, num_steps, optimizer)
    return optimizer.lr * (optimizer.min_lr_ratio + (1 - optimizer.min_lr_ratio) * share)


def _cosine(done: int, steps: int, _num_steps: int, _optimizer: OptimizerSection) -> float:
    return 0.5 * (1 + math.cos(math.pi * done / steps))


def _wsd(done: int, steps: int, num_steps: int, optimizer: OptimizerSection) -> float:
    decay = min(max(round(optimizer.decay_ratio * num_steps), 1), steps)
    return min(1.0, (steps - done) / decay)


def _constant(_done: int, _steps: int, _num_steps: int, _optimizer: OptimizerSection) -> float:
    return 1.0


SCHEDULES: Mapping[str, Callable[[int, int, int, OptimizerSection], float]] = {
    "cosine": _cosine,
    "wsd": _wsd,
    "constant": _constant,
}
"""Share of the peak (above the minimum) by (updates since warm-up, updates after warm-up in all, all updates, section)."""
