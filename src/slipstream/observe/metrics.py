"""Metrics of a training step, once its results have reached the host. Each names the step it was taken in.

Step s is measured with the weights of s finished updates; a validation "at step s" sees those same weights.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A `StepResult` on the host: sums over all ranks, tuples of length B by slot (entry 0, the anchor, is always 0).

    `skipped` tells that the update was not made; `seconds` is the step's wall time on this rank; `context_tokens` counts
    real context tokens trained on, `unique_tokens` those seen for the first time (not a replay); `stop` that some rank
    asked to stop.
    """

    step: int
    epoch: int
    loss_sum: float
    weight_sum: float
    hits_per_slot: tuple[float, ...]
    supervised_per_slot: tuple[float, ...]
    accepted_sum: float
    anchors: float
    bad_rows: float
    context_tokens: float
    unique_tokens: float
    gradient_norm: float
    skipped: bool
    stop: bool
    learning_rate: float
    seconds: float

    @property
    def loss(self) -> float | None:
        """Weighted mean cross-entropy in nats; none when nothing was supervised."""
        return self.loss_sum / self.weight_sum if self.weight_sum else None

    @property
    def acceptance_length(self) -> float | None:
        """Mean leading run of right slots over the step's anchors, plus 1 for the token the target gives (tau)."""
        return self.accepted_sum / self.anchors + 1 if self.anchors else None


def step_metrics(record: StepRecord, *, totals: Mapping[str, float]) -> dict[str, object]:
    """One flat JSON-able line for a step. `totals` are running counts of the run, copied in under `total_` names."""
    accuracy = [
        hits / count if count else None
        for hits, count in zip(record.hits_per_slot[1:], record.supervised_per_slot[1:], strict=True)
    ]
    supervised = sum(record.supervised_per_slot)
    per_second = 1 / record.seconds if record.seconds else 0.0
    line: dict[str, object] = {
        "kind": "train",
        "step": record.step,
        "epoch": record.epoch,
        "loss": record.loss,
        "accuracy": sum(record.hits_per_slot) / supervised if supervised else None,
        "accuracy_per_slot": accuracy,
        "acceptance_length": record.acceptance_length,
        "learning_rate": record.learning_rate,
        "gradient_norm": record.gradient_norm,
        "skipped": record.skipped,
        "bad_rows": int(record.bad_rows),
        "anchors": int(record.anchors),
        "supervised_tokens": int(supervised),
        "context_tokens": int(record.context_tokens),
        "unique_tokens": int(record.unique_tokens),
        "seconds": record.seconds,
        "context_tokens_per_second": record.context_tokens * per_second,
        "supervised_tokens_per_second": supervised * per_second,
        "anchors_per_second": record.anchors * per_second,
        "memory_bytes": process_memory_bytes(),
    }
    line.update({f"total_{name}": value for name, value in totals.items()})
    return line


def process_memory_bytes() -> int:
    """Memory of this process that is resident now, in bytes."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
