"""Target and drafter in one process: nothing crosses, and the order is that of split."""

from __future__ import annotations

from typing import Any

import torch

from slipstream.config import DrafterShape, Recipe, TargetInfo
from slipstream.launch.child import Control
from slipstream.launch.new_drafter import NewDrafter
from slipstream.launch.planning import RunPlan, slot_layout
from slipstream.launch.recording import load_recipe_target, record_target
from slipstream.launch.roles import Job
from slipstream.launch.roles.opening import open_job
from slipstream.launch.training import train_drafter
from slipstream.observe import Account
from slipstream.target.huggingface import HuggingFaceTarget
from slipstream.transport.ends import HiddenSource
from slipstream.transport.inline import InlineTransport
from slipstream.transport.ledger import Assignment
from slipstream.transport.slots import SlotPool
from slipstream.transport.widened import widened


def play_colocated(job: Job, control: Control, account: Account) -> dict[str, Any]:
    """Run the target and train on its states in this process, pack by pack, in the same order as split does."""
    opened = open_job(job)
    recipe, info, shape = opened.recipe, opened.info, opened.shape
    with NewDrafter(job=job, recipe=recipe, shape=shape) as new:
        plan = opened.plan(job)
        target = load_recipe_target(recipe=recipe, info=info, shape=shape, device=job["device"])
        new.ready()  # before launches are recorded: no other thread may copy to the GPU then
    layout = slot_layout(recipe=recipe, shape=shape, info=info)
    line = record_target(target, recipe=recipe, plan=plan, layout=layout, device=job["device"])
    if line is not None:
        control.report("record", {**line, "worker": job["name"]})
    source = open_source(
        recipe=recipe, info=info, shape=shape, plan=plan, target=target, rank=job["rank"], device=job["device"],
        account=account,
    )  # fmt: skip
    result = train_drafter(
        job=job, control=control, account=account, recipe=recipe, info=info, shape=shape, plan=plan, source=source, new=new,
        target_embedding_VD=target.embedding_VD,
    )  # fmt: skip
    return {**result, "bad_rows": int(target.bad_rows)}


def open_source(
    *,
    recipe: Recipe,
    info: TargetInfo,
    shape: DrafterShape,
    plan: RunPlan,
    target: HuggingFaceTarget,
    rank: int,
    device: str,
    account: Account | None = None,
) -> HiddenSource:
    """Slots in this process's memory on a CPU; on CUDA on the device, or in host memory if they are too many."""
    layout = slot_layout(recipe=recipe, shape=shape, info=info)
    account = account or Account("target")
    if device == "cpu":
        pool = SlotPool.private(layout=layout, num_slots=plan.num_slots(rank))
        inline = InlineTransport(
            order=[order for order in plan.orders() if order.rank == rank],
            pool=pool,
            produce=lambda assignment: _capture(
                target,
                plan,
                assignment,
                hidden_TKD=pool.hidden(assignment.slot),
                scale_TK=pool.scale(assignment.slot),
                account=account,
            ),
            fingerprint=target.fingerprint,
        )
        return widened(inline, layout=layout, dtype=recipe.target.hidden_dtype, device=device)
    from slipstream.launch.on_gpu import gpu_inline  # here, not above: a CPU has no use for it

    on_gpu = gpu_inline(
        recipe=recipe,
        info=info,
        shape=shape,
        plan=plan,
        rank=rank,
        layout=layout,
        produce=lambda assignment, slot: _capture(
            target, plan, assignment, hidden_TKD=slot.hidden_TKD, scale_TK=slot.scale_TK, account=account
        ),
        fingerprint=target.fingerprint,
    )
    return widened(on_gpu, layout=layout, dtype=recipe.target.hidden_dtype, device=device)


def _capture(
    target: HuggingFaceTarget,
    plan: RunPlan,
    assignment: Assignment,
    *,
    hidden_TKD: torch.Tensor,
    scale_TK: torch.Tensor | None,
    account: Account,
) -> None:
    pack = plan.pack(assignment.pack_id)
    with account.state("target", pack=pack.pack_id):
        target.capture(pack, hidden_TKD=hidden_TKD, scale_TK=scale_TK)
