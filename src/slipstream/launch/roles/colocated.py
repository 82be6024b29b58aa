"""Target and drafter in one process: nothing crosses, and the order is that of split."""

from __future__ import annotations

from typing import Any

from slipstream.launch.child import Control
from slipstream.launch.planning import slot_layout
from slipstream.launch.roles import Job
from slipstream.launch.roles.opening import open_job
from slipstream.launch.training import train_drafter
from slipstream.target.huggingface import load_target
from slipstream.transport.inline import InlineTransport
from slipstream.transport.ledger import Assignment
from slipstream.transport.slots import SlotPool


def play_colocated(job: Job, control: Control) -> dict[str, Any]:
    """Run the target and train on its states in this process, pack by pack, in the same order as split does."""
    opened = open_job(job)
    recipe, info, shape = opened.recipe, opened.info, opened.shape
    plan = opened.plan(job)
    rank: int = job["rank"]
    layout = slot_layout(recipe=recipe, shape=shape, info=info)
    pool = SlotPool.private(layout=layout, num_slots=job["pool_slots"][rank])
    target = load_target(
        info=info,
        dtype=recipe.target.dtype,
        tap_layers=shape.tap_layers,
        device=job["device"],
        packing=recipe.target.packing,
    )

    def produce(assignment: Assignment) -> None:
        target.capture(plan.pack(assignment.pack_id), hidden_TKD=pool.hidden(assignment.slot))

    source = InlineTransport(
        order=[order for order in plan.orders() if order.rank == rank],
        pool=pool,
        produce=produce,
        fingerprint=target.fingerprint,
    )
    result = train_drafter(job=job, control=control, recipe=recipe, info=info, shape=shape, plan=plan, source=source)
    return {**result, "bad_rows": int(target.bad_rows)}
