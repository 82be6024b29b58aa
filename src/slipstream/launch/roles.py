"""The roles a child can play. Each opens what it needs from the run folder, says it is ready, works, returns a result.

`answers`: the target answers the validation prompts · `target`: hidden states into shared slots · `drafter`: trains from them ·
`colocated`: both in one process, nothing crosses.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slipstream.config import DrafterShape, Recipe, TargetInfo, make_recipe, read_target_info, resolve_drafter
from slipstream.device.shared import SharedMemory
from slipstream.launch.answers import CACHE_FOLDER, Answer, answers_key, read_answers, read_prompts, write_answers
from slipstream.launch.child import Control
from slipstream.launch.planning import ANSWERS_FILE, RunPlan, open_run_plan, slot_layout
from slipstream.launch.training import train_drafter
from slipstream.observe import Account, AccountWriter
from slipstream.runfolder import RunFolder
from slipstream.target.fingerprint import fingerprint_target
from slipstream.target.generate import greedy_answers
from slipstream.target.huggingface import load_target
from slipstream.target.loading import load_full
from slipstream.transport.connections import connection_from_fd
from slipstream.transport.inline import InlineTransport
from slipstream.transport.ledger import Assignment
from slipstream.transport.shared import SharedSink, SharedSource
from slipstream.transport.slots import SlotPool

log = logging.getLogger(__name__)

Job = Mapping[str, Any]


def _open(job: Job) -> tuple[Recipe, TargetInfo, DrafterShape, RunFolder]:
    recipe = make_recipe(dict(job["recipe"]))
    info = read_target_info(recipe.target.model)
    return recipe, info, resolve_drafter(recipe=recipe, info=info), RunFolder(Path(job["folder"]))


def _open_plan(job: Job, *, recipe: Recipe, folder: RunFolder) -> RunPlan:
    return open_run_plan(recipe=recipe, folder=folder, ranks=job["ranks"], start_step=job["start_step"])


def play_answers(job: Job, control: Control) -> dict[str, Any]:
    """Answer the validation prompts greedily, or take the answers kept from an earlier run of the same target."""
    recipe, info, _, folder = _open(job)
    control.report("ready", {})
    prompts = read_prompts(recipe=recipe, info=info)
    fingerprint = fingerprint_target(info)
    kept = Path(recipe.runs) / CACHE_FOLDER / answers_key(prompts=prompts, recipe=recipe, target_fingerprint=fingerprint)
    answers = read_answers(kept)
    reused = bool(answers)
    if not reused:
        model = load_full(info=info, dtype=recipe.target.dtype, device=job["device"])
        generated = greedy_answers(
            model=model,
            prompts=prompts,
            max_new_tokens=recipe.validation.max_new_tokens,
            stop_token_ids=info.eos_token_ids,
            batch_size=recipe.validation.batch_size,
            on_progress=lambda done, of: control.report("progress", {"stage": "answers", "done": done, "of": of}),
        )
        answers = [
            Answer(prompt_ids=tuple(prompt), answer_ids=tuple(answer))
            for prompt, answer in zip(prompts, generated, strict=True)
        ]
        write_answers(path=kept, answers=answers)
    write_answers(path=folder.validation / ANSWERS_FILE, answers=answers)
    return {"answers": len(answers), "reused": reused}


def play_target(job: Job, control: Control) -> dict[str, Any]:
    """Make hidden states for every pack that the broker assigns, until there are no more."""
    recipe, info, shape, folder = _open(job)
    plan = _open_plan(job, recipe=recipe, folder=folder)
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
    target = load_target(
        info=info,
        dtype=recipe.target.dtype,
        tap_layers=shape.tap_layers,
        device=job["device"],
        packing=recipe.target.packing,
    )
    control.report("ready", {"packing": target.packing})
    made = 0
    account = Account(job["name"])
    with AccountWriter(account, path=folder.accounts / f"{job['name']}.jsonl"):
        sink = SharedSink(connection=connection_from_fd(descriptors["transport"]), pools=pools, fingerprint=target.fingerprint)
        while True:
            with account.state("wait_slot"):
                assignment = sink.acquire()
            if assignment is None:
                break
            with account.state("forward"):
                target.capture(plan.pack(assignment.pack_id), hidden_TKD=sink.hidden(assignment))
            with account.state("publish"):
                sink.publish(assignment)
            made += 1
        sink.close()
    return {"packs": made}


def play_drafter(job: Job, control: Control) -> dict[str, Any]:
    """Train on packs that target workers put into this rank's shared pool."""
    recipe, info, shape, folder = _open(job)
    plan = _open_plan(job, recipe=recipe, folder=folder)
    layout = slot_layout(recipe=recipe, shape=shape, info=info)
    slots = job["pool_slots"][job["rank"]]
    memory = SharedMemory.attach(fd=job["descriptors"]["memory"], nbytes=layout.nbytes * slots)
    pool = SlotPool.shared(layout=layout, num_slots=slots, memory=memory)
    source = SharedSource(connection=connection_from_fd(job["descriptors"]["transport"]), pool=pool)
    return train_drafter(job=job, control=control, recipe=recipe, info=info, shape=shape, plan=plan, source=source)


def play_colocated(job: Job, control: Control) -> dict[str, Any]:
    """Run the target and train on its states in this process, pack by pack, in the same order as split does."""
    recipe, info, shape, folder = _open(job)
    plan = _open_plan(job, recipe=recipe, folder=folder)
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
    return train_drafter(job=job, control=control, recipe=recipe, info=info, shape=shape, plan=plan, source=source)


ROLES: Mapping[str, Callable[[Job, Control], dict[str, Any]]] = {
    "answers": play_answers,
    "target": play_target,
    "drafter": play_drafter,
    "colocated": play_colocated,
}
