"""Target and drafter in one process: nothing crosses, and the order is that of split."""

from __future__ import annotations

from typing import Any

import torch

from slipstream.launch.child import Control
from slipstream.launch.planning import RunPlan, slot_layout
from slipstream.launch.roles import Job
from slipstream.launch.roles.opening import Opening, open_job
from slipstream.launch.training import train_drafter
from slipstream.observe import Account
from slipstream.target.huggingface import HuggingFaceTarget, load_target
from slipstream.transport.ends import HiddenSource
from slipstream.transport.inline import InlineTransport
from slipstream.transport.ledger import Assignment
from slipstream.transport.slots import SlotPool


def play_colocated(job: Job, control: Control, account: Account) -> dict[str, Any]:
    """Run the target and train on its states in this process, pack by pack, in the same order as split does."""
    opened = open_job(job)
    recipe, info, shape = opened.recipe, opened.info, opened.shape
    plan = opened.plan(job)
    target = load_target(
        info=info,
        dtype=recipe.target.dtype,
        tap_layers=shape.tap_layers,
        device=job["device"],
        packing=recipe.target.packing,
        pack_tokens=recipe.plan.pack_tokens,
    )
    source = _open_source(job=job, opened=opened, plan=plan, target=target, account=account)
    result = train_drafter(
        job=job, control=control, account=account, recipe=recipe, info=info, shape=shape, plan=plan, source=source
    )
    return {**result, "bad_rows": int(target.bad_rows)}


def _open_source(
    *, job: Job, opened: Opening, plan: RunPlan, target: HuggingFaceTarget, account: Account
) -> HiddenSource:
    """Slots in this process's memory on a CPU; on CUDA on the device, or in host memory if they are too many."""
    recipe, info, shape = opened.recipe, opened.info, opened.shape
    rank: int = job["rank"]
    layout = slot_layout(recipe=recipe, shape=shape, info=info)
    if job["device"] == "cpu":
        pool = SlotPool.private(layout=layout, num_slots=job["pool_slots"][rank])
        return InlineTransport(
            order=[order for order in plan.orders() if order.rank == rank],
            pool=pool,
            produce=lambda assignment: _capture(target, plan, assignment, pool.hidden(assignment.slot), account),
            fingerprint=target.fingerprint,
        )
    from slipstream.launch.on_gpu import gpu_inline  # here, not above: a CPU has no use for it

    return gpu_inline(
        recipe=recipe,
        info=info,
        shape=shape,
        plan=plan,
        rank=rank,
        layout=layout,
        produce=lambda assignment, slot: _capture(target, plan, assignment, slot.hidden_TKD, account),
        fingerprint=target.fingerprint,
    )


def _capture(
    target: HuggingFaceTarget, plan: RunPlan, assignment: Assignment, hidden_TKD: torch.Tensor, account: Account
) -> None:
    pack = plan.pack(assignment.pack_id)
    with account.state("target", pack=pack.pack_id):
        target.capture(pack, hidden_TKD=hidden_TKD)
