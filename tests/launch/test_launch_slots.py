"""What lay in a slot before a pack was written into it must not matter, not in one bit: padding is neutral, never NaN."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from launch_material import tiny_recipe
from safetensors.torch import load_file

from slipstream.config import dump_recipe, read_target_info, resolve_drafter
from slipstream.launch.new_drafter import NewDrafter
from slipstream.launch.planning import open_run_plan, slot_layout, write_schedule
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


def trained(material: dict[str, str], runs: Path, *, fill: float, packing: str) -> dict[str, torch.Tensor]:
    """Weights and moments after a whole colocated run over slots that held `fill` at first."""
    recipe = tiny_recipe(material, runs, name=f"fill-{fill}", target__packing=packing, plan__epochs=1, plan__pack_tokens=256)
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

    def produce(assignment: Assignment) -> None:
        target.capture(plan.pack(assignment.pack_id), hidden_TKD=pool.hidden(assignment.slot))

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
    assert not any(line.get("skipped") for line in listener.lines)
    newest = latest(folder.checkpoints)
    assert newest is not None
    return {f"{file.name}:{name}": t for file in sorted(newest.glob("*.safetensors")) for name, t in load_file(file).items()}


@pytest.mark.parametrize("packing", ["packed", "padded", "alone"])
def test_a_slot_full_of_nan_trains_the_same_as_one_full_of_zeros(
    material: dict[str, str], tmp_path: Path, packing: str
) -> None:
    with_nan = trained(material, tmp_path, fill=float("nan"), packing=packing)
    with_zero = trained(material, tmp_path, fill=0.0, packing=packing)
    assert with_nan.keys() == with_zero.keys()
    assert [name for name in with_nan if not torch.equal(with_nan[name], with_zero[name])] == []
