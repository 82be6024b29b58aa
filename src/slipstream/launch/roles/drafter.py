"""Trains from shared slots. Waits for: the pack of its next use. Unblocked by: the target workers."""

from __future__ import annotations

from typing import Any

from slipstream.device.shared import SharedMemory
from slipstream.launch.child import Control
from slipstream.launch.new_drafter import NewDrafter
from slipstream.launch.planning import RunPlan, slot_layout
from slipstream.launch.roles import Job
from slipstream.launch.roles.opening import open_job
from slipstream.launch.training import train_drafter
from slipstream.observe import Account
from slipstream.transport.connections import connection_from_fd
from slipstream.transport.ends import HiddenSource
from slipstream.transport.shared import SharedSource
from slipstream.transport.slots import SlotPool
from slipstream.transport.widened import widened


def play_drafter(job: Job, control: Control, account: Account) -> dict[str, Any]:
    """Train on packs that target workers put into this rank's shared pool."""
    opened = open_job(job)
    recipe, info, shape = opened.recipe, opened.info, opened.shape
    with NewDrafter(job=job, recipe=recipe, shape=shape) as new:
        plan = opened.plan(job)
        layout = slot_layout(recipe=recipe, shape=shape, info=info)
        slots = job["pool_slots"][job["rank"]]
        memory = SharedMemory.attach(fd=job["descriptors"]["memory"], nbytes=layout.nbytes * slots)
        pool = SlotPool.shared(layout=layout, num_slots=slots, memory=memory)
        source = _open_source(job=job, pool=pool, plan=plan)
        source = widened(source, layout=layout, dtype=recipe.target.hidden_dtype, device=job["device"])
        return train_drafter(
            job=job, control=control, account=account, recipe=recipe, info=info, shape=shape, plan=plan, source=source, new=new
        )


def _open_source(*, job: Job, pool: SlotPool, plan: RunPlan) -> HiddenSource:
    """The end that reads host slots directly on a CPU, and through device buffers on CUDA."""
    connection = connection_from_fd(job["descriptors"]["transport"])
    if job["device"] == "cpu":
        return SharedSource(connection=connection, pool=pool)
    from slipstream.launch.on_gpu import gpu_source  # here, not above: a CPU has no use for it

    return gpu_source(connection=connection, pool=pool, plan=plan, rank=job["rank"])
