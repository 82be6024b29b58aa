"""From a recipe and the parts that launch hands over to a trainer that only needs `fit()`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from slipstream.observe import MetricLog


@dataclass(frozen=True, slots=True)
class PlanFacts:
    """What the trainer must know of a plan beside its steps."""

    num_steps: int
    num_columns: int
    digest: str


@dataclass(frozen=True, slots=True)
class MainRank:
    """Side jobs that one rank does for all, rank 0. `validate(step)` returns metrics; none measures nothing."""

    log: MetricLog
    checkpoints: Path
    validate: Callable[[int], Mapping[str, object]] | None
