"""Validation of a made-up drafter over made-up answers, by one rank or by one of several."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slipstream.config import DrafterShape, Recipe, make_recipe, read_target_info, resolve_drafter
from slipstream.drafter import build_drafter
from slipstream.drafter.dflash import DFlashDrafter
from slipstream.launch.answers import ANSWERS_FILE, Answer, write_answers
from slipstream.launch.planning import RunPlan, open_run_plan, slot_layout
from slipstream.launch.training import OnDevice, Validation
from slipstream.runfolder import RunFolder
from slipstream.target.ends import FrozenEnds
from slipstream.target.fake import FakeTarget
from slipstream.trainer import ColumnShare, RankGroup
from slipstream.transport.inline import InlineTransport
from slipstream.transport.ledger import Assignment
from slipstream.transport.slots import SlotPool

FEW = 9
"""Answers hold tokens 4 to 8 and drafts are among the first nine, so that they stand now and then."""
STEPS = (0, 7)
"""The slots are kept, so that later measurements find the same states."""


def write_made_up_answers(recipe: Recipe, lengths: Sequence[tuple[int, int]]) -> list[Answer]:
    """Answers of given lengths of prompt and answer, in the recipe's run folder."""
    rng = np.random.default_rng(8)
    found = [
        Answer(prompt_ids=tuple(rng.integers(4, 200, p).tolist()), answer_ids=tuple(rng.integers(4, FEW, a).tolist()))
        for p, a in lengths
    ]
    write_answers(path=RunFolder(Path(recipe.runs) / recipe.name).validation / ANSWERS_FILE, answers=found)
    return found


@dataclass(frozen=True)
class Measuring:
    """One rank's validation and what it is made of. `captured` are the packs that this rank had the target run for."""

    plan: RunPlan
    shape: DrafterShape
    target: FakeTarget
    ends: FrozenEnds
    drafter: DFlashDrafter
    validation: Validation
    captured: list[int]

    @classmethod
    def open(cls, recipe: Recipe, *, rank: int = 0, ranks: int = 1, group: RankGroup | None = None) -> Measuring:
        """The run folder holds the schedule and the answers."""
        info = read_target_info(recipe.target.model)
        shape = resolve_drafter(recipe=recipe, info=info)
        plan = open_run_plan(recipe=recipe, folder=RunFolder(Path(recipe.runs) / recipe.name), ranks=ranks, start_step=0)
        target = FakeTarget(seed=2, num_taps=shape.num_taps, hidden_size=shape.hidden_size, vocab_size=shape.vocab_size)
        head_VD = target.ends().head_VD.clone()
        head_VD[FEW:] = 0
        ends = FrozenEnds(embedding_VD=target.ends().embedding_VD, head_VD=head_VD)
        drafter = build_drafter(shape=shape, dtype="float32", device="cpu", seed=1, attention="sdpa")
        pool = SlotPool.private(layout=slot_layout(recipe=recipe, shape=shape, info=info), num_slots=plan.num_slots(rank))
        captured: list[int] = []

        def produce(given: Assignment) -> None:
            captured.append(given.pack_id)
            target.capture(plan.pack(given.pack_id), hidden_TKD=pool.hidden(given.slot))

        order = [order for order in plan.orders() if order.rank == rank]
        source = OnDevice(
            InlineTransport(order=order, pool=pool, produce=produce, fingerprint=target.fingerprint), device=torch.device("cpu")
        )
        validation = Validation(
            plan=plan, source=source, drafter=drafter, ends=ends, shape=shape, rank=rank, group=group
        )  # fmt: skip
        return cls(plan, shape, target, ends, drafter, validation, captured)


def measure_as_rank(rank: int, ranks: int, folder: Path, recipes: Sequence[Mapping[str, Any]]) -> None:
    """In a process of its own: measure each of some runs with others, and leave what was found and captured in a file."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    share = ColumnShare(rank=rank, ranks=ranks)
    group = RankGroup.join(share=share, store=folder / f"store-{ranks}", timeout_seconds=60)
    found = []
    for raw in recipes:
        measuring = Measuring.open(make_recipe(dict(raw)), rank=rank, ranks=ranks, group=group)
        metrics = [measuring.validation.measure(step) for step in STEPS]
        found.append({"metrics": metrics, "captured": measuring.captured})
    group.close()
    (folder / f"found-{rank}-of-{ranks}.json").write_text(json.dumps(found))


def leave_before_measuring(rank: int, folder: Path, raw: Mapping[str, Any]) -> None:
    """Rank 1 fails at its share; rank 0 must say so, in the time that a death takes to be heard of."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    group = RankGroup.join(share=ColumnShare(rank=rank, ranks=2), store=folder / "store", timeout_seconds=60)
    measuring = Measuring.open(make_recipe(dict(raw)), rank=rank, ranks=2, group=group)
    if rank == 1:
        os._exit(7)
    try:
        measuring.validation.measure(0)
    except Exception as error:
        (folder / "error").write_text(f"{type(error).__name__}: {error}")
    group.close()
