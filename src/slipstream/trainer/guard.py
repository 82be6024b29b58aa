"""Results read a step late, and the end of a run that does not stay finite.

The loop never asks the device for a step's outcome while that step runs: results are copied to host memory and read when
the next step has been launched. The update was skipped on the device already, so being late costs nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import TrainingDiverged
from slipstream.observe import StepRecord
from slipstream.records import StepResult

SCALARS = (
    "loss_sum",
    "weight_sum",
    "accepted_sum",
    "anchors",
    "bad_rows",
    "context_tokens",
    "unique_tokens",
    "gradient_norm",
    "finite",
    "stop",
)


@dataclass(frozen=True, slots=True)
class _Pending:
    """One step's figures: scalars in the order of `SCALARS`, then hits and supervised by slot."""

    step: int
    epoch: int
    learning_rate: float
    seconds: float
    values: Tensor


class MetricsRing:
    """The results of the last steps on a CPU, read `lag_steps` late, as every rank reads a step's flags at the same step.

    On a GPU, `late_metrics.LateMetrics` stands in its place.
    """

    is_late = False

    def __init__(self, *, lag_steps: int = 1) -> None:
        self._lag_steps = lag_steps
        self._pending: deque[_Pending] = deque()

    def begin(self) -> None:
        """A step is about to be made; its time is handed over with its result."""

    def push(self, result: StepResult, *, epoch: int, seconds: float) -> None:
        """Take a step's result in."""
        scalars = torch.stack([getattr(result, name).to(torch.float32) for name in SCALARS])
        values = torch.cat([scalars, result.hits_per_slot, result.supervised_per_slot])
        self._pending.append(
            _Pending(step=result.step, epoch=epoch, learning_rate=result.learning_rate, seconds=seconds, values=values)
        )

    def drain(self, *, all_of_it: bool = False) -> list[StepRecord]:
        """Records of the steps that are `lag_steps` old, in order; with `all_of_it` also of those just made."""
        keep = 0 if all_of_it else self._lag_steps
        records = []
        while len(self._pending) > keep:
            pending = self._pending.popleft()
            named = record_fields(
                step=pending.step,
                epoch=pending.epoch,
                learning_rate=pending.learning_rate,
                seconds=pending.seconds,
                values=pending.values.tolist(),
            )
            records.append(StepRecord(**named))
        return records

    def forget(self) -> None:
        """Drop what was pushed so far: it was a rehearsal."""
        self._pending.clear()


def record_fields(*, step: int, epoch: int, learning_rate: float, seconds: float, values: list[float]) -> dict[str, Any]:
    """The fields of a `StepRecord` from a step's figures on the host: `SCALARS`, then hits and supervised by slot."""
    named: dict[str, Any] = dict(zip(SCALARS, values, strict=False))
    by_slot = values[len(SCALARS) :]
    half = len(by_slot) // 2
    skipped, stop = not named.pop("finite"), bool(named.pop("stop"))
    return {
        "step": step,
        "epoch": epoch,
        "hits_per_slot": tuple(by_slot[:half]),
        "supervised_per_slot": tuple(by_slot[half:]),
        "skipped": skipped,
        "stop": stop,
        "learning_rate": learning_rate,
        "seconds": seconds,
        **named,
    }


@dataclass(frozen=True, slots=True)
class CountedRecord(StepRecord):
    """A record that brings the run's counts up to and including its step, by name, as the device kept them."""

    totals: Mapping[str, int]


@dataclass
class Counters:
    """What a run has counted so far; saved in checkpoints, so that a resumed run goes on counting."""

    skipped_steps: int = 0
    bad_in_a_row: int = 0
    bad_rows: int = 0
    unsupervised_steps: int = 0
    context_tokens: int = 0
    unique_tokens: int = 0
    anchors: int = 0

    def count(self, record: StepRecord) -> None:
        """Add one step; or take over the device's counts, which have those of steps whose records were dropped."""
        if isinstance(record, CountedRecord):
            for name, value in record.totals.items():
                setattr(self, name, value)
            return
        self.skipped_steps += record.skipped
        self.bad_in_a_row = self.bad_in_a_row + 1 if record.skipped else 0
        self.bad_rows += int(record.bad_rows)
        self.unsupervised_steps += not sum(record.supervised_per_slot)
        self.context_tokens += int(record.context_tokens)
        self.unique_tokens += int(record.unique_tokens)
        self.anchors += int(record.anchors)


class DivergenceGuard:
    """Stops a run whose steps are no longer finite, with a diagnosis."""

    def __init__(self, *, max_bad_steps: int) -> None:
        self._max_bad_steps = max_bad_steps
        self._causes: deque[tuple[int, str]] = deque(maxlen=max_bad_steps)

    def check(self, record: StepRecord, counters: Counters) -> None:
        """Look at one step, counted already. Raises `TrainingDiverged` at the `max_bad_steps`-th bad one in a row."""
        if not record.skipped:
            self._causes.clear()
            return
        self._causes.append((record.step, what_was_not_finite(record)))
        if counters.bad_in_a_row >= self._max_bad_steps:
            shown = "; ".join(f"step {step}: {cause}" for step, cause in self._causes)
            raise TrainingDiverged(
                f"{counters.bad_in_a_row} steps in a row were not finite and changed no weight "
                f"(optimizer.max_bad_steps = {self._max_bad_steps}): {shown}. Rows that are not finite come from the target "
                "or the transport; a loss or gradient that is not finite with finite rows comes from the drafter, for "
                "which a lower optimizer.lr is the first thing to try"
            )


def what_was_not_finite(record: StepRecord) -> str:
    """Which figures of a skipped step were not finite, the earliest cause first."""
    causes = []
    if record.bad_rows:
        causes.append(f"{int(record.bad_rows)} hidden-state rows")
    if not math.isfinite(record.loss_sum):
        causes.append(f"the loss ({record.loss_sum})")
    if not math.isfinite(record.gradient_norm):
        causes.append(f"the gradient norm ({record.gradient_norm})")
    return ", ".join(causes)
