"""When a column uses its packs: each of them `replays` times, far enough apart, at a steady rate of new packs.

A column has S steps for m = S / R packs of R uses. Let D' be the first distance with D' = 1 (mod R), or (mod 2R) for
even R. A *regular* pack starts at some t = 0 (mod R) and is used at t, t + D', ..., t + (R - 1) D'. Since k D' = k
(mod R), step t then carries use number t mod R: no two regular packs collide, every R steps bring one new pack, and
D' (R - 1) / R packs are alive.

Regular packs leave steps open in a ramp of (R - 1) D' steps at the start and in its mirror image at the end, each
D' - 1 times (R - 1) / 2 steps, a multiple of R by the choice of D'. *Ramp* packs fill them: with n = count / R, pack j
takes the open steps j, j + n, j + 2n, ... in order, which lie about D' / 2 apart.

With several columns, column c is turned by c mod R steps within each group of R steps. Every step then has its fair
share of first uses, so that the loss does not alternate between fresh packs and replays. It shortens some distances by R,
which D' makes up for.

How near uses may lie is a matter of what is learned, not of the pattern: `MEASURED` says what nearness costs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slipstream.config.recipe import PlanSection
from slipstream.errors import PlanError
from slipstream.records import BoolArray, Int64Array


@dataclass(frozen=True, slots=True)
class MeasuredDistance:
    """What a `replay_distance` costs: acceptance length without replays less that with them, at equal steps and anchors.

    `loss` is the mean over paired seeds, `low` and `high` its 95 % interval.
    """

    distance: int
    loss: float
    low: float
    high: float


MEASURED: tuple[MeasuredDistance, ...] = (
    MeasuredDistance(distance=1, loss=0.096, low=0.079, high=0.113),
    MeasuredDistance(distance=5, loss=0.035, low=-0.018, high=0.088),
    MeasuredDistance(distance=20, loss=0.004, low=-0.024, high=0.031),
    MeasuredDistance(distance=50, loss=0.003, low=-0.017, high=0.023),
)
"""By ascending distance, from `slipstream bench replays`: SmolLM2 on GSM8K, two uses, 208 packs an epoch at one pack a step,
four paired seeds, one H200 (LAB_LOG.md, 2026-11-29)."""

LARGEST_LOSS = 0.05
"""A distance that costs more acceptance length than this by the table is refused."""

UNMEASURED_DISTANCE = 10
"""The nearest that would be accepted if nothing were measured: Adam's first moment (beta1 = 0.9) spans about ten steps, within
which two uses of a pack act like one larger, correlated batch."""


def safe_distance() -> int:
    """The nearest distance from which on none measured costs more than `LARGEST_LOSS`."""
    safe = UNMEASURED_DISTANCE if not MEASURED else MEASURED[-1].distance + 1
    for row in reversed(MEASURED):
        if row.loss > LARGEST_LOSS:
            break
        safe = row.distance
    return safe


def check_distance(plan: PlanSection) -> None:
    """Refuse a distance that costs acceptance length, unless the recipe allows it. Raises `PlanError`."""
    safe = safe_distance()
    if plan.replays == 1 or plan.allow_lossy_replays or plan.replay_distance >= safe:
        return
    costly = [row for row in MEASURED if row.loss > LARGEST_LOSS]
    told = (
        f"{costly[-1].distance} steps cost {costly[-1].loss:.3f} of acceptance length, {LARGEST_LOSS} is the most accepted"
        if costly
        else f"none below {safe} steps has been measured to do no harm"
    )
    raise PlanError(
        key="plan.replay_distance",
        value=plan.replay_distance,
        rule=f"two uses of a pack are too near: {told}",
        hint=f"plan.replay_distance = {safe}, or plan.allow_lossy_replays = true",
    )


@dataclass(frozen=True, slots=True, eq=False)
class ColumnPattern:
    """The steps of a column's packs: `steps` int64 `[m, R]`, ascending in rows, rows by first step; `is_ramp` bool `[m]`."""

    steps: Int64Array
    is_ramp: BoolArray

    def distances(self) -> Int64Array:
        """Steps between one use and the next, int64 `[m, R - 1]`."""
        return np.diff(self.steps, axis=1)

    @property
    def smallest_distance(self) -> int | None:
        """The smallest of them; none without replays."""
        distances = self.distances()
        return int(distances.min()) if distances.size else None


def steady_distance(*, replays: int, replay_distance: int, num_columns: int) -> int:
    """D': the first distance, at least `replay_distance` after turning, at which regular packs do not collide."""
    if replays == 1:
        return 1
    modulus = replays if replays % 2 else 2 * replays
    least = replay_distance + (replays if num_columns > 1 else 0)
    return least + (1 - least) % modulus


def smallest_allowed(*, replays: int, replay_distance: int) -> int:
    """The bound on every distance, ramps included: half the planned one, less one for rounding.

    Every run of at least 2 (R - 1) D' steps meets it; a shorter one may not, and is refused.
    """
    return max(1, replay_distance // 2 - 1) if replays > 1 else 1


def column_pattern(*, packs: int, replays: int, distance: int, turn: int, allowed: int) -> ColumnPattern | None:
    """The pattern of a column of `packs` packs, turned by `turn`; none if some uses would lie closer than `allowed`.

    The two ramps are filled apart. If the run is so short that uses would then lie too close, they are filled as one,
    which doubles the distances and the memory.
    """
    steps = packs * replays
    starts = np.arange(0, max(0, steps - (replays - 1) * distance), replays, dtype=np.int64)
    regular = _turned(starts[:, None] + distance * np.arange(replays, dtype=np.int64), replays=replays, turn=turn)
    is_open = np.ones(steps, dtype=np.bool_)
    is_open[regular] = False
    open_steps = np.flatnonzero(is_open)
    num_ramp = len(open_steps) // replays
    for cut in sorted({num_ramp // 2, 0}, reverse=True):
        ramps = [_spread(part, replays=replays) for part in np.split(open_steps, [cut * replays])]
        pattern = _sorted_pattern(regular=regular, ramp=np.concatenate(ramps))
        smallest = pattern.smallest_distance
        if smallest is None or smallest >= allowed:
            return pattern
    return None


def _turned(steps: Int64Array, *, replays: int, turn: int) -> Int64Array:
    return steps - steps % replays + (steps + turn) % replays


def _spread(open_steps: Int64Array, *, replays: int) -> Int64Array:
    return open_steps.reshape(replays, -1).T


def _sorted_pattern(*, regular: Int64Array, ramp: Int64Array) -> ColumnPattern:
    steps = np.concatenate([regular, ramp])
    is_ramp = np.arange(len(steps)) >= len(regular)
    order = np.argsort(steps[:, 0], kind="stable")
    return ColumnPattern(steps=steps[order], is_ramp=is_ramp[order])
