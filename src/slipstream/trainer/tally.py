"""A step's sums as one fp32 vector at the end of the gradient buffer, so that one reduction sums gradients and metrics.

B block size. Counts are exact up to 2^24 a step.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from slipstream.records import StepResult

NAMES = ("loss_sum", "weight_sum", "accepted_sum", "anchors", "bad_rows", "context_tokens", "unique_tokens", "stop")
"""The scalars of the vector, in order; hits and supervised counts by slot follow."""


class ColumnSums(Protocol):
    """What the objective returns for one use: fp32 scalars and two vectors `[B]`, on the device."""

    @property
    def loss_sum(self) -> Tensor: ...
    @property
    def weight_sum(self) -> Tensor: ...
    @property
    def hits_per_slot(self) -> Tensor: ...
    @property
    def supervised_per_slot(self) -> Tensor: ...
    @property
    def accepted_sum(self) -> Tensor: ...
    @property
    def anchors(self) -> Tensor: ...


class StepTally:
    """Adds up the columns of a step in a vector that the optimizer owns and clears."""

    def __init__(self, vector: Tensor, *, block_size: int) -> None:
        assert vector.shape == (self.size(block_size),)
        self.vector = vector
        self._block_size = block_size

    @staticmethod
    def size(block_size: int) -> int:
        """Elements of the vector."""
        return len(NAMES) + 2 * block_size

    @torch.no_grad()
    def add(self, sums: ColumnSums, *, bad_rows: Tensor, context_tokens: int | Tensor, unique_tokens: int | Tensor) -> None:
        """Add one use. The token counts come from the plan, as numbers or on the device, where the rest is."""
        for name in ("loss_sum", "weight_sum", "accepted_sum", "anchors"):
            self._scalar(name).add_(getattr(sums, name).detach())
        self._scalar("bad_rows").add_(bad_rows)
        self._scalar("context_tokens").add_(context_tokens)
        self._scalar("unique_tokens").add_(unique_tokens)
        hits, supervised = self._by_slot(self.vector)
        hits.add_(sums.hits_per_slot)
        supervised.add_(sums.supervised_per_slot)

    def ask_to_stop(self) -> None:
        """Raise the flag that every rank will read at the same step."""
        self._scalar("stop").add_(1)

    def finite(self) -> Tensor:
        """Whether loss and rows are finite on every rank, once reduced: a bool scalar on the device."""
        return torch.isfinite(self._scalar("loss_sum")) & (self._scalar("bad_rows") == 0)

    def result(self, *, step: int, gradient_norm: Tensor, finite: Tensor, learning_rate: float) -> StepResult:
        """The step's result, in memory of its own."""
        vector = self.vector.clone()
        return self.result_of(vector, step=step, gradient_norm=gradient_norm, finite=finite, learning_rate=learning_rate)

    def result_of(
        self, vector: Tensor, *, step: int, gradient_norm: Tensor, finite: Tensor, learning_rate: float
    ) -> StepResult:
        """The result that a copy of the vector holds, as views of it."""
        scalars = {name: vector[index] for index, name in enumerate(NAMES) if name != "stop"}
        hits, supervised = self._by_slot(vector)
        return StepResult(
            step=step,
            hits_per_slot=hits,
            supervised_per_slot=supervised,
            gradient_norm=gradient_norm,
            finite=finite,
            learning_rate=learning_rate,
            stop=vector[NAMES.index("stop")],
            **scalars,
        )

    def _scalar(self, name: str) -> Tensor:
        return self.vector[NAMES.index(name)]

    def _by_slot(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        hits = vector[len(NAMES) : len(NAMES) + self._block_size]
        return hits, vector[len(NAMES) + self._block_size :]
