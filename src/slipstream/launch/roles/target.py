"""Hidden states into shared slots. Waits for: a free slot. Unblocked by: the drafter that finished with one."""

from __future__ import annotations

from typing import Any

import torch

from slipstream.device.shared import SharedMemory
from slipstream.launch.child import Control
from slipstream.launch.late_target import LateTarget
from slipstream.launch.planning import RunPlan, slot_layout
from slipstream.launch.recording import load_recipe_target, record_target
from slipstream.launch.roles import Job
from slipstream.launch.roles.opening import open_job
from slipstream.launch.stages import dry_watch, time_stages
from slipstream.observe import Account
from slipstream.transport.connections import connection_from_fd
from slipstream.transport.ends import HiddenSink
from slipstream.transport.shared import SharedSink
from slipstream.transport.slots import SlotPool


def play_target(job: Job, control: Control, account: Account) -> dict[str, Any]:
    """Make hidden states for every pack that the broker assigns, until there are no more."""
    opened = open_job(job)
    recipe, info, shape = opened.recipe, opened.info, opened.shape
    plan = opened.plan(job)
    layout = slot_layout(recipe=recipe, shape=shape, info=info)
    descriptors = job["descriptors"]
    pools = [
        SlotPool.shared(
            layout=layout,
            num_slots=slots,
            memory=SharedMemory.attach(fd=descriptors[f"memory-{rank}"], nbytes=layout.nbytes * slots),
        )
        for rank, slots in enumerate(job["pool_slots"])
    ]
    target = load_recipe_target(recipe=recipe, info=info, shape=shape, device=job["device"])
    line = record_target(target, recipe=recipe, plan=plan, layout=layout, device=job["device"])
    if line is not None:
        control.report("record", {**line, "worker": job["name"]})
    sink = _open_sink(job=job, pools=pools, plan=plan, fingerprint=target.fingerprint)
    time_stages(account, device=job["device"])
    watch = dry_watch(device=job["device"])
    late = _late_work(job=job, control=control)
    control.report("ready", {"packing": target.packing})  # from here on it must not be silent: what may last is over
    account.rest()
    made = 0
    while True:
        with account.state("wait_gpu" if watch else "wait_slot") as claim:
            if watch is not None:
                watch.until_dry(claim, "wait_slot")
            assignment = sink.acquire()
        if assignment is None:
            break
        with account.state("target", pack=assignment.pack_id):
            target.capture(plan.pack(assignment.pack_id), hidden_TKD=sink.hidden(assignment), scale_TK=sink.scale(assignment))
        with account.state("publish", pack=assignment.pack_id):
            sink.publish(assignment)
        if late is not None:
            late.look(assignment.pack_id)
        made += 1
    sink.close()
    for watching in (watch, late):
        if watching is not None:
            watching.close()
    return {"packs": made, "bad_rows": int(target.bad_rows)}


def _open_sink(*, job: Job, pools: list[SlotPool], plan: RunPlan, fingerprint: str) -> HiddenSink:
    """The end that writes host slots directly on a CPU, and through device slots on CUDA."""
    connection = connection_from_fd(job["descriptors"]["transport"])
    if job["device"] == "cpu":
        return SharedSink(connection=connection, pools=pools, fingerprint=fingerprint)
    from slipstream.launch.on_gpu import gpu_sink  # here, not above: a CPU has no use for it

    return gpu_sink(connection=connection, pools=pools, plan=plan, fingerprint=fingerprint)


def _late_work(*, job: Job, control: Control) -> LateTarget | None:
    """What is compiled or allocated too late, told to the supervisor; a CPU does neither."""
    if job["device"] == "cpu":
        return None
    from slipstream.trainer.late_work import CudaWork  # here, not above: a CPU has no use for it

    work = CudaWork(torch.device("cuda", torch.cuda.current_device()))
    return LateTarget(work, put=lambda line: control.report("late_work", dict(line)))
