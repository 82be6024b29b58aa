"""What each layout of a machine is predicted to do for a recipe, which one is taken, and the record of it. No torch in here."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.config import DrafterShape, Recipe, TargetInfo
from slipstream.device.gpus import GpuFacts
from slipstream.device.kind import DeviceKind
from slipstream.launch.stage_costs import Subject, known_costs
from slipstream.plan.memory import MemoryPlan, plan_memory
from slipstream.plan.placement import Placement, resolve_placement
from slipstream.plan.throughput import (
    Layout,
    Prediction,
    Refused,
    StageCosts,
    Workload,
    best,
    layouts,
    predict_all,
    refill_seconds,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Forecast:
    """All layouts of so many devices: `predictions` of those that can be, `refused` the others and why, and the best."""

    costs: StageCosts
    work: Workload
    predictions: Sequence[Prediction]
    refused: Sequence[Refused]

    @property
    def best(self) -> Prediction | None:
        """The one with the most tokens a second; none where nothing can be."""
        return best(self.predictions) if self.predictions else None

    def of(self, layout: Layout) -> Prediction | None:
        """The prediction of one layout; none where it is not among them."""
        return next((found for found in self.predictions if found.layout == layout), None)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "costs": self.costs.as_dict(),
            "layouts": [found.as_dict() for found in self.predictions],
            "refused": [{"name": str(found.layout), "reason": found.reason} for found in self.refused],
            "best": None if self.best is None else str(self.best.layout),
        }


def layout_of(placement: Placement) -> Layout:
    """The layout that a placement is."""
    targets = sum(process.role == "target" for process in placement.processes)
    return Layout(placement.mode, targets, len(placement.processes) - targets)


def workload(recipe: Recipe, *, num_steps: int) -> Workload:
    """What a recipe trains in a step."""
    return Workload(packs_per_step=recipe.plan.packs_per_step, replays=recipe.plan.replays, num_steps=num_steps)


def forecast(
    *,
    costs: StageCosts,
    work: Workload,
    devices: int,
    memory: MemoryPlan | None,
    gpu_memory_bytes: int | None,
    also: Sequence[Layout] = (),
) -> Forecast:
    """Predict every layout of so many devices, and those of `also`. One that does not fit on a GPU of that size is refused."""
    good, refused = layouts(devices=devices, packs_per_step=work.packs_per_step)
    good += [layout for layout in also if layout not in good]
    fitting = []
    for layout in good:
        reason = None if memory is None or gpu_memory_bytes is None else _too_large(layout, memory, gpu_memory_bytes)
        if reason is None:
            fitting.append(layout)
        else:
            refused.append(Refused(layout, reason))
    return Forecast(costs, work, predict_all(costs=costs, candidates=fitting, work=work), refused)


def _too_large(layout: Layout, memory: MemoryPlan, gpu_memory_bytes: int) -> str | None:
    """Why a layout with a GPU for each process does not fit; None when it does."""
    roles = ("target", "drafter") if layout.mode == "split" else ("colocated",)
    for process in memory.of(layout.mode):
        if process.role in roles and process.device_bytes > gpu_memory_bytes:
            needed, there = process.device_bytes / 2**30, gpu_memory_bytes / 2**30
            return f"a {process.role} process needs {needed:.1f} GiB, a GPU has {there:.1f} GiB"
    return None


def place(
    *,
    recipe: Recipe,
    info: TargetInfo,
    shape: DrafterShape,
    device: DeviceKind,
    num_devices: int,
    gpus: Sequence[GpuFacts] = (),
) -> tuple[Recipe, Placement, str | None]:
    """The placement of a recipe on a machine of so many GPUs or cores, the recipe with it put in, and why it was chosen.

    Automatic mode takes the layout that is predicted to be fastest, if stage costs are known (probed, or from the table of
    GPUs) and no GPUs are named; `target_workers` and `drafter_ranks` that the recipe sets stay. Without costs, on GPUs whose
    size is known, it takes all of them: colocated where that fits, which needs no balance, else the most even split. Otherwise
    it splits if there are two devices at least.
    """
    section = recipe.placement
    subject = Subject.of(recipe=recipe, info=info, shape=shape, device=device, gpus=gpus)
    chosen, why = _chosen(subject, num_devices=num_devices, gpus=gpus), None
    if chosen is not None:
        layout, why = chosen
        changed = {"mode": layout.mode, "drafter_ranks": layout.drafters}
        if layout.mode == "split":
            changed["target_workers"] = layout.targets
        log.info("placement.mode = auto: %s", why)
        section = section.model_copy(update=changed)
        recipe = recipe.model_copy(update={"placement": section})
    return recipe, resolve_placement(placement=section, device=device, num_devices=num_devices), why


def _chosen(subject: Subject, *, num_devices: int, gpus: Sequence[GpuFacts]) -> tuple[Layout, str] | None:
    """The layout of automatic mode, and why; none where it is left to `resolve_placement`."""
    recipe, section = subject.recipe, subject.recipe.placement
    if section.mode != "auto" or section.target_gpus is not None or section.drafter_gpus is not None:
        return None
    devices = num_devices if subject.device == "cuda" else processes_on_cores(subject, cores=num_devices)
    costs = known_costs(subject)
    smallest = min((gpu.memory_bytes for gpu in gpus if gpu.memory_bytes is not None), default=None)
    if devices is None or (costs is None and (smallest is None or devices < 2)):
        return None
    memory = plan_memory(
        recipe=recipe,
        info=subject.info,
        shape=subject.shape,
        schedule_slots_per_column=0,
        device=subject.device,
        gpu_memory_bytes=smallest,
    )
    if costs is None:
        assert smallest is not None
        return _without_costs(recipe, memory=memory, devices=devices, gpu_memory_bytes=smallest)
    work = workload(recipe, num_steps=1)
    found = forecast(costs=costs, work=work, devices=devices, memory=memory, gpu_memory_bytes=smallest)
    free = [item for item in found.predictions if _allowed(item.layout, recipe)]
    if not free:
        return None
    fastest = best(free)
    speed = f"{fastest.trained_tokens_per_second:,.0f} tokens/s ({costs.source})"
    return fastest.layout, f"{fastest.layout}, predicted to be fastest: {speed}"


def _without_costs(recipe: Recipe, *, memory: MemoryPlan, devices: int, gpu_memory_bytes: int) -> tuple[Layout, str] | None:
    """A layout of all GPUs that fits: colocated, which is balanced whatever a stage costs, or the most even split."""
    good, _ = layouts(devices=devices, packs_per_step=recipe.plan.packs_per_step)
    free = [layout for layout in good if _allowed(layout, recipe) and _too_large(layout, memory, gpu_memory_bytes) is None]
    if not free:
        return None
    chosen = min(free, key=lambda layout: (layout.mode == "split", abs(layout.targets - layout.drafters)))
    why = "which needs no balance" if chosen.mode == "colocated" else "the most even split, since both do not fit on one GPU"
    return chosen, f"{chosen}, {why}: what a stage costs here is not known (slipstream plan --probe finds out)"


def _allowed(layout: Layout, recipe: Recipe) -> bool:
    """Whether a layout keeps the counts that the recipe names."""
    section = recipe.placement
    named = section.model_fields_set
    if "drafter_ranks" in named and layout.drafters != section.drafter_ranks:
        return False
    return layout.mode == "colocated" or "target_workers" not in named or layout.targets == section.target_workers


def processes_on_cores(subject: Subject, *, cores: int) -> int | None:
    """How many processes a CPU has room for, each with the threads that costs were measured with; none if roles differ."""
    threads = subject.threads
    if threads is None or threads.target != threads.drafter:
        return None
    return max(1, cores // threads.target)


def write_forecast(path: Path, *, costs: StageCosts, placement: Placement, work: Workload) -> Prediction | None:
    """Put stage costs and the predicted throughput of a placement into prediction.json; what else it holds stays."""
    layout = layout_of(placement)
    if work.packs_per_step % layout.drafters:
        return None
    found = predict_all(costs=costs, candidates=[layout], work=work)[0]
    content = json.loads(path.read_text()) if path.is_file() else {}
    content["stages"] = costs.as_dict()
    content["throughput"] = {
        "tokens_per_second": found.trained_tokens_per_second,
        "unique_tokens_per_second": found.unique_tokens_per_second,
        "layout": str(layout),
        "hours": found.hours,
        "device_hours": found.device_hours,
    }
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(content, indent=1))
    os.replace(temporary, path)
    return found


def forecast_of_run(path: Path, *, costs: StageCosts | None, placement: Placement, work: Workload) -> Prediction | None:
    """Write down what a run that starts is predicted to do, if stage costs are known, so that its end can tell the error."""
    if costs is None or not _one_each(placement):
        return None
    return write_forecast(path, costs=costs, placement=placement, work=work)


def refill_of(packs: int, *, costs: StageCosts | None, placement: Placement) -> float | None:
    """Seconds that a resume takes to make so many packs again; None where stage costs are not known."""
    if costs is None or not _one_each(placement):
        return None
    return refill_seconds(costs=costs, layout=layout_of(placement), packs=packs)


def _one_each(placement: Placement) -> bool:
    """Whether no two processes share a GPU: costs are of a GPU of one's own."""
    gpus = [process.gpu for process in placement.processes if process.gpu is not None]
    return len(gpus) == len(set(gpus))
