"""What lay in a slot before a pack was written into it must not matter, not in one bit: padding is neutral, never NaN."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from launch_material import tiny_recipe
from safetensors.torch import load_file

from slipstream.config import dump_recipe, read_target_info, resolve_drafter
from slipstream.launch.new_drafter import NewDrafter
from slipstream.launch.planning import RunPlan, open_run_plan, slot_layout, write_schedule
from slipstream.launch.training import train_drafter
from slipstream.observe import Account
from slipstream.runfolder import RunFolder
from slipstream.target.huggingface import load_target
from slipstream.trainer.checkpoint import latest
from slipstream.transport.inline import InlineTransport
from slipstream.transport.ledger import Assignment
from slipstream.transport.slots import SlotPool


class Listener:
    """The supervisor's side of a control connection that only remembers."""

    def __init__(self) -> None:
        self.lines: list[dict[str, object]] = []

    def stopping(self) -> bool:
        return False

    def report(self, kind: str, payload: object) -> None:
        if kind == "record":
            assert isinstance(payload, dict)
            self.lines.append(payload)


@dataclass(frozen=True, slots=True)
class Trained:
    """Weights and moments after a whole colocated run, what it told, and packs whose hidden states were not all finite."""

    state: dict[str, torch.Tensor]
    lines: list[dict[str, object]]
    bad_rows: dict[int, int]
    plan: RunPlan


def trained(
    material: dict[str, str], runs: Path, *, packing: str, fill: float = 0.0, poisoned: int | None = None, **keys: object
) -> Trained:
    """A run over slots that held `fill` at first, by a target that answers the token `poisoned` with infinity."""
    recipe = tiny_recipe(
        material, runs, name=f"fill-{fill}-{poisoned}", target__packing=packing, plan__epochs=1, plan__pack_tokens=256, **keys
    )
    folder = RunFolder(runs / recipe.name)
    folder.create()
    folder.recipe.write_text(dump_recipe(recipe))
    schedule = write_schedule(recipe=recipe, folder=folder)
    assert schedule.summary().token_fill < 1, "there is padding to be neutral"
    info = read_target_info(recipe.target.model)
    shape = resolve_drafter(recipe=recipe, info=info)
    plan = open_run_plan(recipe=recipe, folder=folder, ranks=1, start_step=0)
    pool = SlotPool.private(slot_layout(recipe=recipe, shape=shape, info=info), plan.num_slots(0))
    for slot in range(pool.num_slots):
        pool.hidden(slot).fill_(fill)
    target = load_target(info=info, dtype="float32", tap_layers=shape.tap_layers, packing=packing)
    if poisoned is not None:
        target._model.embed_tokens.weight[poisoned] = float("inf")
    bad_rows: dict[int, int] = {}

    def produce(assignment: Assignment) -> None:
        hidden_TKD = pool.hidden(assignment.slot)
        target.capture(plan.pack(assignment.pack_id), hidden_TKD=hidden_TKD)
        bad_rows[assignment.pack_id] = int((~torch.isfinite(hidden_TKD).all(dim=2).all(dim=1)).sum())

    listener = Listener()
    job = {
        "name": "worker-0",
        "rank": 0,
        "role": "colocated",
        "folder": str(folder.root),
        "device": "cpu",
        "checkpoint": None,
    }
    with NewDrafter(job=job, recipe=recipe, shape=shape) as new:
        train_drafter(
            job=job,
            control=listener,  # type: ignore[arg-type]
            account=Account("worker-0"),
            recipe=recipe,
            info=info,
            shape=shape,
            plan=plan,
            source=InlineTransport(plan.orders(), pool, produce, fingerprint=target.fingerprint),
            new=new,
        )
    newest = latest(folder.checkpoints)
    assert newest is not None
    files = sorted(newest.glob("*.safetensors"))
    state = {f"{file.name}:{name}": tensor for file in files for name, tensor in load_file(file).items()}
    return Trained(state=state, lines=listener.lines, bad_rows=bad_rows, plan=plan)


@pytest.mark.parametrize("packing", ["packed", "padded", "alone"])
def test_a_slot_full_of_nan_trains_the_same_as_one_full_of_zeros(
    material: dict[str, str], tmp_path: Path, packing: str
) -> None:
    runs = [trained(material, tmp_path, fill=fill, packing=packing) for fill in (float("nan"), 0.0)]
    with_nan, with_zero = (run.state for run in runs)
    assert not any(line.get("skipped") for run in runs for line in run.lines)
    assert with_nan.keys() == with_zero.keys()
    assert [name for name in with_nan if not torch.equal(with_nan[name], with_zero[name])] == []


def test_a_target_that_is_not_finite_on_some_documents_costs_their_steps_alone(
    material: dict[str, str], tmp_path: Path
) -> None:
    """A real target, its packs, its slots: rows are found on the drafter's side, by step, and no weight moves there."""
    whole = trained(material, tmp_path, packing="alone")
    packs = [whole.plan.pack(pack_id) for pack_id in range(whole.plan.schedule.num_packs)]
    ids = [np.unique(pack.token_ids[: pack.num_tokens]) for pack in packs]
    tokens, packs_with = np.unique(np.concatenate(ids), return_counts=True)
    run = trained(
        material, tmp_path, packing="alone", poisoned=int(tokens[packs_with.argmin()]), optimizer__max_bad_steps=10**6
    )
    steps = [line for line in run.lines if line["kind"] == "train"]
    packs_of_step = run.plan.schedule.pack_of_use
    expected = {step: sum(run.bad_rows[int(pack)] for pack in packs) for step, packs in enumerate(packs_of_step)}
    assert {line["step"]: line["bad_rows"] for line in steps} == expected
    assert [line["skipped"] for line in steps] == [bool(rows) for rows in expected.values()]
    assert 0 < sum(line["skipped"] for line in steps) < len(steps)
    assert all(torch.isfinite(tensor).all() for tensor in run.state.values() if tensor.is_floating_point())
