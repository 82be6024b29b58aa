"""A probe: the stages of a recipe, run for a while on this machine at its own shapes, in processes of their own. No torch.

On a CPU the two stages of a split run beside each other, as they will in the run, since they share caches and memory; on a
GPU, and where one process does both, one after the other.
"""

from __future__ import annotations

import logging
import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from slipstream.config import Recipe
from slipstream.config.recipe import ValidationSection
from slipstream.errors import WorkerFailed
from slipstream.launch.planning import write_schedule
from slipstream.launch.preflight import Preflight
from slipstream.launch.processes import Child, start_child
from slipstream.launch.resources import Resources
from slipstream.launch.supervisor import Supervisor
from slipstream.plan.known_gpus import find_gpu
from slipstream.plan.throughput import StageCosts
from slipstream.report.measured import ONCE, USE, pack_seconds, step_ends, worker_in
from slipstream.report.reading import RunData, read_run
from slipstream.runfolder import RunFolder

SECONDS = 30.0
"""Of each stage, after it has loaded and warmed up."""
PACKS_PER_STEP = 2
STEPS = 1000
ROLES = {"target": "probe-target", "drafter": "probe-drafter"}

log = logging.getLogger(__name__)


Progress = Callable[[str, float, float | None], None]
"""Hears a stage's name, seconds that it was measured for, and of how many; none while it loads."""


def probe_costs(
    flight: Preflight, *, seconds: float = SECONDS, on_progress: Progress = lambda stage, done, of: None
) -> StageCosts:
    """Measure the stage costs of a recipe here. Raises `WorkerFailed` when a stage ends before it could be measured."""
    recipe = _recipe_of_probe(flight.recipe)
    with tempfile.TemporaryDirectory(prefix="slipstream-probe-") as place:
        folder = RunFolder(Path(place))
        folder.create()
        write_schedule(recipe=recipe, folder=folder)
        together = flight.device == "cpu" and flight.placement.mode == "split"
        for stages in [("target", "drafter")] if together else [("target",), ("drafter",)]:
            _run(stages, flight=flight, recipe=recipe, folder=folder, seconds=seconds, on_progress=on_progress)
        return costs_of_probe(read_run(folder.root), flight=flight, packs_per_step=recipe.plan.packs_per_step)


def costs_of_probe(run: RunData, *, flight: Preflight, packs_per_step: int) -> StageCosts:
    """Stage costs from the spans of both stages; the first pack and the first step are left out."""
    target, drafter = run.spans.get("target-0"), run.spans.get("drafter-0")
    if target is None or drafter is None:
        raise WorkerFailed(f"the probe left no spans of {'its target' if target is None else 'its drafter'}")
    packs = pack_seconds([target], begin=-math.inf, end=math.inf)[1:]
    steps, ends = step_ends(drafter)
    if not packs or len(steps) < 3:
        raise WorkerFailed(f"the probe saw {len(packs)} packs and {len(steps)} steps only")
    begin, end, count = float(ends[0]), float(ends[-1]), len(steps) - 1
    worker = worker_in(drafter, begin=begin, end=end)
    uses = count * packs_per_step
    gpu = Resources.of(flight).gpus[0].name if flight.device == "cuda" else None
    known = find_gpu(gpu) if gpu else None
    return StageCosts(
        target_seconds_per_pack=sum(packs) / len(packs),
        drafter_seconds_per_use=worker.cost(*USE) * (end - begin) / uses,
        step_seconds=worker.cost(*ONCE) * (end - begin) / count,
        reduce_seconds=flight.shape.num_parameters * 4 / (known.link_gb_per_second * 1e9) if known else 0.0,
        tokens_per_pack=flight.recipe.plan.pack_tokens,
        source=f"probe of {len(packs)} packs and {count} steps on {gpu or 'this CPU'}",
    )


def _recipe_of_probe(recipe: Recipe) -> Recipe:
    """The recipe with few packs a step, no replays and nothing beside the stages: a stage costs the same in it."""
    columns = min(PACKS_PER_STEP, recipe.plan.packs_per_step)
    plan = recipe.plan.model_copy(update={"packs_per_step": columns, "replays": 1, "epochs": 1, "max_steps": STEPS})
    observe = recipe.observe.model_copy(update={"spans": True})
    placement = recipe.placement.model_copy(update={"drafter_ranks": 1, "target_workers": 1})
    return recipe.model_copy(
        update={"plan": plan, "observe": observe, "placement": placement, "validation": ValidationSection()}
    )


def _run(
    stages: Sequence[str], *, flight: Preflight, recipe: Recipe, folder: RunFolder, seconds: float, on_progress: Progress
) -> None:
    """Run stages side by side to their ends."""

    def hear(worker: str, kind: str, payload: Any) -> None:
        log.info("probe: %s %s", worker, kind)
        stage = worker.split("-")[0]
        if kind == "progress":
            on_progress(stage, payload["done"], payload["of"])
        elif kind == "done":
            on_progress(stage, seconds, seconds)

    for stage in stages:
        on_progress(stage, 0, None)
    children = [_start(stage, flight=flight, recipe=recipe, folder=folder, seconds=seconds) for stage in stages]
    Supervisor(
        drafters=children,
        starter=None,
        num_targets=0,
        max_restarts=0,
        ready_seconds=flight.recipe.placement.ready_seconds,
        stall_seconds=flight.recipe.placement.stall_seconds,
        on_report=hear,
        close_broker=lambda reason, lost: None,
    ).run()


def _start(stage: str, *, flight: Preflight, recipe: Recipe, folder: RunFolder, seconds: float) -> Child:
    """A stage as the run would start it: its GPU, cores and threads are those of the recipe's own placement."""
    resources = Resources.of(flight)
    name = f"{stage}-0"
    job: dict[str, Any] = {
        "role": ROLES[stage],
        "rank": 0,
        "gpu": 0 if flight.device == "cuda" else None,
        "binding": resources.job_binding(role=stage, index=0),
        "recipe": recipe.model_dump(mode="json"),
        "folder": str(folder.root),
        "device": flight.device,
        "ranks": 1,
        "start_step": 0,
        "seconds": seconds,
    }
    return start_child(
        name=name,
        job=job,
        descriptors={},
        log=folder.logs / f"{name}.log",
        threads=resources.threads(role=stage, index=0),
        environment=resources.environment(role=stage, index=0),
    )
