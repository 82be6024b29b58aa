"""Stages alone, for a while, at a recipe's own shapes: what `slipstream plan --probe` measures. Nothing is kept of the work.

Waits for: nothing but its own device. The spans of the process are what is measured.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import torch

from slipstream.launch.borrowed import borrowed_ends
from slipstream.launch.child import Control
from slipstream.launch.new_drafter import new_drafter
from slipstream.launch.planning import RunPlan, slot_layout
from slipstream.launch.recording import load_recipe_target, record_target
from slipstream.launch.roles import Job
from slipstream.launch.roles.opening import Opening, open_job
from slipstream.launch.stages import time_stages
from slipstream.observe import Account, MetricLog
from slipstream.records import Pack
from slipstream.target.dtypes import DTYPES
from slipstream.target.fingerprint import fingerprint_target
from slipstream.target.huggingface import HuggingFaceTarget
from slipstream.trainer import ColumnShare, MainRank, RunParts, build_trainer
from slipstream.trainer.warmup import MadeUpSource
from slipstream.transport.slots import SlotPool

LEAST = 6
"""Packs, or steps, that are made however long they take; the first ones are no measurement."""


TELL_SECONDS = 1.0


class _Until:
    """Tells when so many seconds are over since it was asked first, and so many things were done; reports how far it is."""

    def __init__(self, *, seconds: float, control: Control) -> None:
        self._seconds, self._control = seconds, control
        self._began: float | None = None
        self._told = 0.0
        self.done = 0

    def __call__(self) -> bool:
        now = time.monotonic()
        self._began = now if self._began is None else self._began
        self.done += 1
        if now - self._told >= TELL_SECONDS:
            self._told = now
            self._control.report("progress", {"done": min(now - self._began, self._seconds), "of": self._seconds})
        return self._control.stopping() or (self.done >= LEAST and now - self._began >= self._seconds)


def play_probe_target(job: Job, control: Control, account: Account) -> dict[str, Any]:
    """Run packs of the plan through the target, one after the other, into a slot that nobody reads."""
    opened = open_job(job)
    plan = opened.plan(job)
    target = load_recipe_target(recipe=opened.recipe, info=opened.info, shape=opened.shape, device=job["device"])
    layout = slot_layout(recipe=opened.recipe, shape=opened.shape, info=opened.info)
    record_target(target, recipe=opened.recipe, plan=plan, layout=layout, device=job["device"])
    make = _maker(job=job, opened=opened, target=target, account=account)
    time_stages(account, device=job["device"])
    control.report("ready", {})
    account.rest()
    until = _Until(seconds=job["seconds"], control=control)
    for order in itertools.cycle(plan.orders()):
        make(plan.pack(order.pack_id), until.done)
        if until():
            break
    return {"packs": until.done}


def _maker(*, job: Job, opened: Opening, target: HuggingFaceTarget, account: Account) -> Callable[[Pack, int], None]:
    """Makes one pack, charged under a number of its own, since packs come round again; ends when it is made."""
    layout = slot_layout(recipe=opened.recipe, shape=opened.shape, info=opened.info)
    if job["device"] == "cpu":
        pool = SlotPool.private(layout, 1)

        def make(pack: Pack, number: int) -> None:
            with account.state("target", pack=number):
                target.capture(pack, hidden_TKD=pool.hidden(0), scale_TK=pool.scale(0))
            with account.state("publish", pack=number):
                pool.seal(0, pack.pack_id, 0)

        return make
    from slipstream.launch.on_gpu import Gpu  # here, not above: a CPU has no use for it

    (slot,) = Gpu.open().slots(layout, 1)

    def make_on_gpu(pack: Pack, number: int) -> None:
        with account.state("target", pack=number):
            target.capture(pack, hidden_TKD=slot.hidden_TKD, scale_TK=slot.scale_TK)
        with account.state("wait_gpu"):
            torch.cuda.synchronize()

    return make_on_gpu


def play_probe_drafter(job: Job, control: Control, account: Account) -> dict[str, Any]:
    """Train on one made-up pack of hidden states, as a rank alone would, and write no checkpoint."""
    opened = open_job(job)
    plan = opened.plan(job)
    parts = _parts(job=job, opened=opened, plan=plan, account=account)
    trainer = build_trainer(parts=parts, main=MainRank(log=MetricLog({}), checkpoints=None))
    time_stages(account, device=job["device"])
    control.report("ready", {})
    account.rest()
    until = _Until(seconds=job["seconds"], control=control)
    trainer.fit(stop=until)
    return {"steps": until.done}


def _parts(*, job: Job, opened: Opening, plan: RunPlan, account: Account) -> RunParts:
    recipe, info, shape = opened.recipe, opened.info, opened.shape
    device = torch.device(job["device"])
    fingerprint = fingerprint_target(info, dtype=recipe.target.dtype)
    hidden_TKD = torch.randn(recipe.plan.pack_tokens, shape.num_taps, shape.hidden_size, device=device)
    return RunParts(
        recipe=recipe,
        shape=shape,
        schedule=plan.schedule,
        planner=plan.planner,
        source=MadeUpSource(hidden_TKD.to(DTYPES[recipe.target.hidden_dtype]), target_fingerprint=fingerprint),
        drafter=new_drafter(recipe=recipe, shape=shape, device=job["device"]),
        ends=borrowed_ends(info=info, dtype=recipe.drafter.dtype, device=job["device"]),
        target_fingerprint=fingerprint,
        share=ColumnShare(rank=0, ranks=1),
        group=None,
        account=account,
        device=device,
    )
