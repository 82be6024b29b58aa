"""The part of `slipstream plan` that predicts: which machine, which stage costs, and the table of layouts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from slipstream.config import Recipe
    from slipstream.device.gpus import GpuFacts
    from slipstream.launch.forecast import Forecast
    from slipstream.launch.preflight import Preflight
    from slipstream.launch.resources import Resources
    from slipstream.launch.stage_costs import Subject
    from slipstream.plan import MemoryPlan, Schedule
    from slipstream.plan.known_gpus import PackShape
    from slipstream.plan.throughput import Prediction, StageCosts


def other_machine(*, gpus: int | None, gpu: str | None) -> tuple[GpuFacts, ...] | None:
    """The GPUs of the machine to plan for; none when it is this one. Raises `UsageError` for a GPU that no table knows."""
    from slipstream.device.gpus import GpuFacts, visible_gpus
    from slipstream.plan.known_gpus import KNOWN_GPUS, find_gpu

    if gpus is None and gpu is None:
        return None
    here = visible_gpus()
    if gpus is not None and gpus < 1:
        raise UsageError(key="--gpus", value=gpus, rule="must be at least 1")
    if gpu is None:
        if not here:
            names = ", ".join(known.name for _, known in KNOWN_GPUS)
            raise UsageError(
                key="--gpu", value=None, rule="is required: this machine has none to go by", hint=f"one of {names}"
            )
        return tuple(GpuFacts(index, here[0].name, here[0].memory_bytes, None) for index in range(gpus or 1))
    known = find_gpu(gpu)
    if known is None:
        names = ", ".join(known.name for _, known in KNOWN_GPUS)
        raise UsageError(key="--gpu", value=gpu, rule="is not in the table of known GPUs", hint=f"one of {names}")
    count = gpus or len(here) or 1
    return tuple(GpuFacts(index, known.name, int(known.memory_gb * 1e9), None) for index in range(count))


def keep_costs(
    flight: Preflight,
    *,
    recipe: Recipe,
    schedule: Schedule,
    costs_from: Sequence[Path],
    probe_seconds: float | None,
    quiet: bool,
) -> None:
    """Keep stage costs for `recipe`, which is as the user gave it: those of files, or of a probe that is made now."""
    from slipstream.launch.stage_costs import given_costs, store_costs

    subject = _subject(flight, recipe=recipe, resources=None)
    if probe_seconds is not None:
        store_costs(subject, _probe(flight, seconds=probe_seconds, quiet=quiet))
    else:
        store_costs(subject, given_costs(costs_from, subject=subject, pack=_pack(recipe, schedule)))


def _probe(flight: Preflight, *, seconds: float, quiet: bool) -> StageCosts:
    from slipstream.cli.progress import Bars
    from slipstream.launch.probe import probe_costs

    with Bars(quiet=quiet) as bars:

        def show(stage: str, done: float, of: float | None) -> None:
            bars(stage, done, of, "loads and warms up" if of is None else f"measured for {done:.0f} of {of:.0f} s")

        return probe_costs(flight, seconds=seconds, on_progress=show)


def make_forecast(
    *,
    recipe: Recipe,
    flight: Preflight,
    schedule: Schedule,
    memory: MemoryPlan,
    resources: Resources,
    costs_from: Sequence[Path],
) -> Forecast | None:
    """Predict all layouts: from the files given, a probe that was kept, or the table. None where nothing is known.

    `recipe` is as the user gave it, before automatic mode put a placement in.
    """
    from slipstream.device.limits import available_cores
    from slipstream.launch.forecast import forecast, layout_of, processes_on_cores, workload
    from slipstream.launch.stage_costs import given_costs, known_costs

    subject, pack = _subject(flight, recipe=recipe, resources=resources), _pack(recipe, schedule)
    costs = given_costs(costs_from, subject=subject, pack=pack) if costs_from else known_costs(subject, pack=pack)
    if costs is None:
        return None
    current = layout_of(flight.placement)
    devices = len(resources.gpus) if flight.device == "cuda" else processes_on_cores(subject, cores=available_cores())
    return forecast(
        costs=costs,
        work=workload(recipe, num_steps=schedule.num_steps),
        devices=devices or current.devices,
        memory=memory,
        gpu_memory_bytes=min((gpu.memory_bytes for gpu in resources.gpus if gpu.memory_bytes is not None), default=None),
        also=[current] if recipe.plan.packs_per_step % current.drafters == 0 else [],
    )


def _pack(recipe: Recipe, schedule: Schedule) -> PackShape:
    from slipstream.corpus.store import CorpusStore
    from slipstream.plan.known_gpus import PackShape

    return PackShape.of(schedule, num_tokens=CorpusStore.open(Path(recipe.corpus.path)).num_tokens)


def _subject(flight: Preflight, *, recipe: Recipe, resources: Resources | None) -> Subject:
    from slipstream.launch.resources import Resources
    from slipstream.launch.stage_costs import Subject

    gpus = (resources or Resources.of(flight)).gpus
    return Subject.of(recipe=recipe, info=flight.info, shape=flight.shape, device=flight.device, gpus=gpus)


def print_forecast(found: Forecast | None, *, flight: Preflight, console: Console) -> None:
    """The table of layouts, the source of the costs, and what cannot be; or how to come by stage costs."""
    from rich.table import Table

    from slipstream.launch.forecast import layout_of

    if found is None:
        console.print(
            "throughput: no stage costs are known for this recipe on this machine; "
            "--probe measures them, --costs FILE takes those of a bench or a run"
        )
        return
    replays = found.work.replays > 1
    table = Table(title="predicted throughput, steady state", title_justify="left")
    for name in ("layout", "tokens/s", *(["unique"] if replays else []), "hours", "device hours", "limited by", "waits", ""):
        table.add_column(name, justify="left" if name in ("layout", "limited by", "waits", "") else "right")
    current = layout_of(flight.placement)
    for item in found.predictions:
        notes = [*(["best"] if item is found.best else []), *(["this recipe's"] if item.layout == current else [])]
        table.add_row(
            str(item.layout),
            f"{item.trained_tokens_per_second:,.0f}",
            *([f"{item.unique_tokens_per_second:,.0f}"] if replays else []),
            f"{item.hours:,.2f}",
            f"{item.device_hours:,.2f}",
            {"both": "both sides", "devices": "both stages"}.get(item.limit, item.limit),
            _waits(item),
            ", ".join(notes),
            style="bold" if item is found.best else "",
        )
    console.print(table)
    if flight.chosen is not None:
        console.print(f"automatic placement: {flight.chosen}")
    costs = found.costs
    console.print(
        f"stage costs ({costs.source}): target {costs.target_seconds_per_pack:.4f} s a pack, drafter "
        f"{costs.drafter_seconds_per_use:.4f} s a use, {costs.step_seconds:.4f} s once a step"
        f"{_together(costs)}; {costs.tokens_per_pack:,.0f} tokens a pack"
    )
    for refused in found.refused:
        console.print(f"{refused.layout}: {refused.reason}")


def refill_seconds(found: Forecast | None, *, flight: Preflight, schedule: Schedule) -> float | None:
    """Seconds that the longest refill takes the recipe's own targets; None where stage costs are not known."""
    from slipstream.launch.forecast import refill_of

    costs = None if found is None else found.costs
    return refill_of(schedule.largest_refill, costs=costs, placement=flight.placement)


def print_refill(found: Forecast | None, *, flight: Preflight, schedule: Schedule, console: Console) -> None:
    """What a resume makes again before anything new, where packs are replayed."""
    from slipstream.launch.forecast import layout_of

    packs, seconds = schedule.largest_refill, refill_seconds(found, flight=flight, schedule=schedule)
    if not packs:
        return
    layout = layout_of(flight.placement)
    makers = layout.targets or layout.drafters
    who = "" if makers == 1 else f" on {makers} {'target workers' if layout.targets else 'colocated processes'}"
    takes = "" if seconds is None else f", about {seconds:,.1f} s{who}"
    console.print(f"resume: up to {packs:,} packs are made again first{takes}")


def _together(costs: StageCosts) -> str:
    """What one process that does both takes, where that is another time."""
    share = 1 / costs.colocated_ratio
    return "" if abs(share - 1) < 0.005 else f", both in one process in {share:.2f} of their sum"


def _waits(item: Prediction) -> str:
    parts = {"targets": item.target_wait, "drafters": item.drafter_wait}
    return ", ".join(f"{name} {share:.0%}" for name, share in parts.items() if share >= 0.005)
