"""What a process on CUDA is told of a plan: the order of its uses, and two slots for packs that are trained on once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from launch_material import tiny_recipe

from slipstream.launch.on_gpu import planned_uses, two_slots
from slipstream.launch.planning import RunPlan, open_run_plan, write_schedule
from slipstream.runfolder import RunFolder
from slipstream.transport.ledger import Ledger, PackOrder

REPLAYED: dict[str, Any] = {"plan__replays": 2, "plan__replay_distance": 10, "plan__packs_per_step": 4, "plan__epochs": 4}


def planned(material: dict[str, str], runs: Path, *, ranks: int, start_step: int, **changes: Any) -> RunPlan:
    recipe = tiny_recipe(material, runs, name="on-gpu", **changes)
    folder = RunFolder(runs / recipe.name)
    write_schedule(recipe=recipe, folder=folder)
    return open_run_plan(recipe=recipe, folder=folder, ranks=ranks, start_step=start_step)


@pytest.mark.parametrize(("ranks", "start_step"), [(1, 0), (2, 0), (2, 7)])
def test_uses_are_those_that_the_loop_takes_and_releases(
    material: dict[str, str], tmp_path: Path, ranks: int, start_step: int
) -> None:
    plan = planned(material, tmp_path, ranks=ranks, start_step=start_step, **REPLAYED)
    for rank in range(ranks):
        uses = list(planned_uses(plan=plan, rank=rank))
        steps = (plan.planner.step(index) for index in range(start_step, plan.schedule.num_steps))
        taken = [step.uses[column] for step in steps for column in range(rank, plan.schedule.num_columns, ranks)]
        assert [(use.pack_id, use.is_last) for use in uses] == [(use.pack_id, use.is_last) for use in taken]
        made = {order.pack_id for order in plan.orders() if order.rank == rank}
        assert {use.pack_id for use in uses} == made
        assert len([use for use in uses if use.is_last]) == len(made)


def test_packs_used_once_take_turns_in_two_slots(material: dict[str, str], tmp_path: Path) -> None:
    """The order of production is that of the uses: with one pack in use and the next being made, no slot is missing."""
    plan = planned(material, tmp_path, ranks=1, start_step=0)
    kept = [PackOrder(pack_id=900 + i, rank=0, slot=50 + i, kept=True) for i in range(3)]
    order = two_slots([*kept, *plan.orders()])
    assert [pack.pack_id for pack in order] == [900, 901, 902, *(pack.pack_id for pack in plan.orders())]
    assert max(pack.slot for pack in order) == 4
    ledger = Ledger(order, slot_bytes=1)

    def make() -> int | None:
        assignment = ledger.issue("worker")
        if assignment is not None:
            assert ledger.published("worker", assignment)
        return None if assignment is None else assignment.pack_id

    assert [make() for _ in kept] == [900, 901, 902]
    uses = [use.pack_id for use in planned_uses(plan=plan, rank=0)]
    assert make() == uses[0]
    for place, pack_id in enumerate(uses):
        assert make() == (uses[place + 1] if place + 1 < len(uses) else None)
        ledger.released(pack_id)
