"""Which step and column uses which pack, and the slot it lies in meanwhile."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slipstream.config.recipe import PlanSection
from slipstream.errors import PlanError
from slipstream.plan.replays import (
    ColumnPattern,
    check_distance,
    column_pattern,
    safe_distance,
    smallest_allowed,
    steady_distance,
)
from slipstream.plan.slots import colour_slots
from slipstream.records import Int32Array, Int64Array


@dataclass(frozen=True, slots=True, eq=False)
class Timetable:
    """Packs are numbered by first step, then column. Arrays as in `ScheduleArrays`.

    `steady_distance` and `smallest_distance` are the least among regular packs and among all, none where there are none;
    `ramp_packs` counts the packs that fill the ramps.
    """

    column_of_pack: Int32Array
    slot_of_pack: Int32Array
    first_step: Int64Array
    last_step: Int64Array
    pack_of_use: Int64Array
    use_number: npt.NDArray[np.int8]
    steady_distance: int | None
    smallest_distance: int | None
    ramp_packs: int


def time_packs(*, plan: PlanSection, packs_per_column: int) -> Timetable:
    """Plan the uses of `packs_per_column` packs in each column.

    Raises `PlanError` when the run is too short for its replays, and says what would work, or when they lie too near.
    """
    check_distance(plan)
    columns, replays = plan.packs_per_step, plan.replays
    patterns = _patterns(plan=plan, packs=packs_per_column)
    turns = np.arange(columns) % len(patterns)
    slots = np.stack([_slots(pattern, ahead_packs=plan.ahead_packs) for pattern in patterns])[turns].ravel()
    steps = np.stack([pattern.steps for pattern in patterns])[turns].reshape(-1, replays)
    is_ramp = np.stack([pattern.is_ramp for pattern in patterns])[turns].ravel()
    column = np.repeat(np.arange(columns, dtype=np.int32), packs_per_column)
    order = np.lexsort((column, steps[:, 0]))
    steps, column = steps[order], column[order]
    pack_of_use = np.empty((packs_per_column * replays, columns), dtype=np.int64)
    use_number = np.empty(pack_of_use.shape, dtype=np.int8)
    for number in range(replays):
        pack_of_use[steps[:, number], column] = np.arange(len(steps))
        use_number[steps[:, number], column] = number
    regular = [int(p.distances()[~p.is_ramp].min()) for p in patterns if replays > 1 and not p.is_ramp.all()]
    smallest = [p.smallest_distance for p in patterns if p.smallest_distance is not None]
    return Timetable(
        column_of_pack=column,
        slot_of_pack=slots[order],
        first_step=steps[:, 0].copy(),
        last_step=steps[:, -1].copy(),
        pack_of_use=pack_of_use,
        use_number=use_number,
        steady_distance=min(regular, default=None),
        smallest_distance=min(smallest, default=None),
        ramp_packs=int(is_ramp.sum()),
    )


def _slots(pattern: ColumnPattern, *, ahead_packs: int) -> Int32Array:
    return colour_slots(first_step=pattern.steps[:, 0], last_step=pattern.steps[:, -1], ahead_packs=ahead_packs)


def _patterns(*, plan: PlanSection, packs: int) -> list[ColumnPattern]:
    patterns = _try_patterns(
        packs=packs, replays=plan.replays, replay_distance=plan.replay_distance, columns=plan.packs_per_step
    )
    if patterns is None:
        steps = packs * plan.replays
        allowed = smallest_allowed(replays=plan.replays, replay_distance=plan.replay_distance)
        raise PlanError(
            key="plan.replays",
            value=plan.replays,
            rule=f"the run is too short: {steps} steps cannot use every pack {plan.replays} times with {allowed} steps or "
            f"more between two uses, as plan.replay_distance = {plan.replay_distance} asks for",
            hint=_what_works(plan=plan, packs=packs),
        )
    return patterns


def _try_patterns(*, packs: int, replays: int, replay_distance: int, columns: int) -> list[ColumnPattern] | None:
    distance = steady_distance(replays=replays, replay_distance=replay_distance, num_columns=columns)
    allowed = smallest_allowed(replays=replays, replay_distance=replay_distance)
    patterns: list[ColumnPattern] = []
    for turn in range(min(columns, replays)):
        pattern = column_pattern(packs=packs, replays=replays, distance=distance, turn=turn, allowed=allowed)
        if pattern is None:
            return None
        patterns.append(pattern)
    return patterns


def _what_works(*, plan: PlanSection, packs: int) -> str:
    """Settings that would be accepted, the rest left as it is."""
    columns, distance = plan.packs_per_step, plan.replay_distance

    def fits(replays: int, replay_distance: int) -> bool:
        return _try_patterns(packs=packs, replays=replays, replay_distance=replay_distance, columns=columns) is not None

    nearest = 1 if plan.allow_lossy_replays else safe_distance()
    shorter = next((value for value in range(distance - 1, nearest - 1, -1) if fits(plan.replays, value)), None)
    fewer = next(value for value in range(plan.replays - 1, 0, -1) if fits(value, distance))
    choices = [f"plan.replays = {fewer}"]
    if shorter is not None:
        choices.insert(0, f"plan.replay_distance = {shorter}")
    return " or ".join(choices) + " would work; so would more steps"
