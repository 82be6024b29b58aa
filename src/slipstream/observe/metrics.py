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


@dataclass(frozen=True, slots=True)
class StepWorth:
    """What a step had room for and was worth: context tokens and anchors that all its packs could hold; its mixing figure.

    `useful_flops` are those of this rank's GPU in the step (`plan.flops`), `peak_flops` what that GPU could do in a second;
    each is none where it is not known.
    """

    token_room: int
    anchor_room: int
    mixing: float
    useful_flops: float | None
    peak_flops: float | None

    def metrics(self, record: StepRecord) -> dict[str, object]:
        """Shares from 0 to 1: `token_fill`, `anchor_fill`, `mixing` (0: like the corpus), `mfu`; useful TFLOP per second."""
        rate = self.useful_flops / record.seconds if self.useful_flops is not None and record.seconds else None
        return {
            "token_fill": record.context_tokens / self.token_room,
            "anchor_fill": record.anchors / self.anchor_room,
            "mixing": self.mixing,
            "useful_tflops_per_second": None if rate is None else rate / 1e12,
            "mfu": rate / self.peak_flops if rate is not None and self.peak_flops else None,
        }


def step_metrics(record: StepRecord, *, totals: Mapping[str, float], worth: StepWorth | None = None) -> dict[str, object]:
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
        "unique_tokens_per_second": record.unique_tokens * per_second,
        "supervised_tokens_per_second": supervised * per_second,
        "anchors_per_second": record.anchors * per_second,
        "memory_bytes": process_memory_bytes(),
    }
    if worth is not None:
        line.update(worth.metrics(record))
    line.update({f"total_{name}": value for name, value in totals.items()})
    return line


def process_memory_bytes() -> int:
    """Memory of this process that is resident now, in bytes."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
