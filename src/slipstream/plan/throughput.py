"""Tokens per second of a run from what its stages cost alone, for every way to share out the devices. Pure; no torch.

Letters: C packs of a step · R replays · t_T seconds a pack through the target · t_D seconds a use in the drafter · o seconds
a drafter rank spends once a step · G devices, t of them targets, d drafter ranks (colocated: d = G).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import numpy as np

from slipstream.plan.placement import Mode

Limit = Literal["target", "drafter", "both", "devices"]

BALANCED = 0.05
"""Split: the two sides count as balanced when neither would wait for more than this share of a step."""


@dataclass(frozen=True, slots=True)
class StageCosts:
    """Seconds that one device takes for each stage when nothing makes it wait.

    `target_seconds_per_pack`: a forward over a pack, until others may read it; once a pack, however often it is replayed.
    `drafter_seconds_per_use`: forward, loss and backward of one use. `step_seconds`: what every drafter rank does once a
    step (optimizer, metrics). `pause_seconds_per_step`: checkpoints and validation, spread over the steps.
    `reduce_seconds`: summing the gradients of two ranks. `tokens_per_pack`: context tokens without padding.
    `colocated_ratio`: what both stages take alone over what they take in one process. `source` says where they come from.
    """

    target_seconds_per_pack: float
    drafter_seconds_per_use: float
    tokens_per_pack: float
    step_seconds: float = 0.0
    pause_seconds_per_step: float = 0.0
    reduce_seconds: float = 0.0
    colocated_ratio: float = 1.0
    source: str = "unknown"

    def as_dict(self) -> dict[str, Any]:
        """For JSON; `from_dict` takes it back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> StageCosts:
        """From JSON. Keys of other things are left aside; raises `KeyError` for a required one that is missing."""
        known: dict[str, Any] = {field.name: found[field.name] for field in fields(cls) if field.name in found}
        for name in ("target_seconds_per_pack", "drafter_seconds_per_use", "tokens_per_pack"):
            if name not in known:
                raise KeyError(name)
        converted: dict[str, Any] = {name: value if name == "source" else float(value) for name, value in known.items()}
        return cls(**converted)


@dataclass(frozen=True, slots=True)
class Workload:
    """What is to be trained: C packs a step, R uses of each, so many steps."""

    packs_per_step: int
    replays: int
    num_steps: int


@dataclass(frozen=True, slots=True)
class Layout:
    """A way to share out devices. Split: `targets` target processes beside `drafters` ranks; colocated: `targets` is 0."""

    mode: Mode
    targets: int
    drafters: int

    @property
    def devices(self) -> int:
        """How many it takes, one a process."""
        return self.targets + self.drafters

    def __str__(self) -> str:
        return f"{self.targets} + {self.drafters}" if self.mode == "split" else f"colocated on {self.drafters}"


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a layout is predicted to do in its steady state; ramps, warm-up and validation before step 1 are not in it.

    Trained tokens count every use, unique tokens each pack once. `target_wait`, `drafter_wait`: the share of a step that a
    process of the role waits for the other role or, between colocated ranks, for the busiest one. `hours` of all the steps.
    """

    layout: Layout
    trained_tokens_per_second: float
    unique_tokens_per_second: float
    step_seconds: float
    limit: Limit
    target_wait: float
    drafter_wait: float
    hours: float
    device_hours: float

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "name": str(self.layout)}


@dataclass(frozen=True, slots=True)
class Refused:
    """A layout that cannot be, and why."""

    layout: Layout
    reason: str


def layouts(*, devices: int, packs_per_step: int) -> tuple[list[Layout], list[Refused]]:
    """Every layout of all the devices, colocated first, then splits by rising drafter ranks; and those that cannot be.

    The packs of a step are shared out evenly, so drafter ranks must divide them. One device cannot be split.
    """
    every = [Layout("colocated", 0, devices)] + [Layout("split", devices - d, d) for d in range(1, devices)]
    good = [layout for layout in every if packs_per_step % layout.drafters == 0]
    bad = [
        Refused(layout, f"{layout.drafters} drafter ranks do not divide plan.packs_per_step = {packs_per_step}")
        for layout in every
        if packs_per_step % layout.drafters
    ]
    return good, bad


def predict(*, costs: StageCosts, layout: Layout, work: Workload) -> Prediction:
    """The steady state of a layout.

    A drafter rank's step is C/d t_D + o + r(d) + pauses, with r(d) = 2 (d - 1) / d times the reduction of two ranks, as
    a ring moves so many times the gradient (Patarasuk & Yuan 2009).

    Split: targets make the C/R new packs of a step in C/R t_T / t seconds, and run ahead; a step takes the longer of the two,
    so that uses come at min(t R / t_T, d / t_D) where o and r are small.

    Colocated: a rank runs the target on its own new packs in between: a step takes C/G t_D + f t_T + o + r(G) + pauses,
    f the new packs of the busiest rank (`busiest_new_packs`), since the ranks wait for each other in every step; uses
    come at G / (t_T / R + t_D) where ranks have equal shares and o and r are small.
    """
    packs, ranks = work.packs_per_step, layout.drafters
    assert costs.drafter_seconds_per_use > 0, "training takes time"
    assert packs % ranks == 0, f"{ranks} ranks do not divide {packs} packs"
    uses = packs / ranks * costs.drafter_seconds_per_use
    once = costs.step_seconds + costs.pause_seconds_per_step + costs.reduce_seconds * 2 * (ranks - 1) / ranks
    limit: Limit
    if layout.mode == "split":
        drafter = uses + once
        target = packs / work.replays * costs.target_seconds_per_pack / layout.targets
        step = max(drafter, target)
        limit = "both" if min(drafter, target) >= (1 - BALANCED) * step else "target" if target > drafter else "drafter"
        target_wait, drafter_wait = 1 - target / step, 1 - drafter / step
    else:
        busiest = busiest_new_packs(packs_per_step=packs, replays=work.replays, ranks=ranks)
        mean = packs / ranks / work.replays
        step = (uses + busiest * costs.target_seconds_per_pack) / costs.colocated_ratio + once
        limit = "devices"
        target_wait, drafter_wait = 0.0, (busiest - mean) * costs.target_seconds_per_pack / costs.colocated_ratio / step
    rate = packs * costs.tokens_per_pack / step
    hours = step * work.num_steps / 3600
    return Prediction(
        layout=layout,
        trained_tokens_per_second=rate,
        unique_tokens_per_second=rate / work.replays,
        step_seconds=step,
        limit=limit,
        target_wait=target_wait,
        drafter_wait=drafter_wait,
        hours=hours,
        device_hours=hours * layout.devices,
    )


def refill_seconds(*, costs: StageCosts, layout: Layout, packs: int) -> float:
    """How long a resume makes packs again that are alive where it begins: ceil(packs / t) t_T, all targets at once.

    Colocated, all ranks do: they own equally many columns, in which about equally many are alive.
    """
    return -(-packs // (layout.targets or layout.drafters)) * costs.target_seconds_per_pack


def busiest_new_packs(*, packs_per_step: int, replays: int, ranks: int) -> float:
    """New packs, in the mean over steps, of the rank that has the most of them in a step.

    In the steady state column c has a new pack in the steps s with s = c (mod R), and rank r owns the columns
    c = r (mod ranks) (`replays`): with one replay all ranks have equally many, with more they may not.
    """
    columns = np.arange(packs_per_step)
    steps = np.arange(replays)
    counts = np.array(
        [[np.sum((columns % ranks == rank) & (columns % replays == step)) for rank in range(ranks)] for step in steps]
    )
    return float(counts.max(axis=1).mean())


def predict_all(*, costs: StageCosts, candidates: Iterable[Layout], work: Workload) -> list[Prediction]:
    """One prediction for each candidate, in their order."""
    return [predict(costs=costs, layout=layout, work=work) for layout in candidates]


def best(predictions: Sequence[Prediction]) -> Prediction:
    """The one with the most trained tokens a second; of equal ones the first."""
    assert predictions, "nothing to choose from"
    return max(predictions, key=lambda found: found.trained_tokens_per_second)
