"""`slipstream plan`: what a recipe will do and need, before any weight loads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from slipstream.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from slipstream.config import Recipe
    from slipstream.launch.forecast import Forecast
    from slipstream.launch.resources import Resources
    from slipstream.plan import MemoryPlan, Placement, PlanSummary, Schedule

_GIB = 2**30


def plan(
    recipe: Annotated[Path, typer.Argument(help="Recipe file (TOML).")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[a.b=c]…", help="Keys of the recipe to change.")] = None,
    costs: Annotated[
        list[Path] | None,
        typer.Option(help="Stage costs to predict from: JSON of `slipstream bench pipeline|target|drafter`, or a run folder."),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the costs of --costs for this recipe on this machine.")] = False,
    probe: Annotated[bool, typer.Option("--probe", help="Measure the stages here and now, and keep what was found.")] = False,
    probe_seconds: Annotated[float, typer.Option(help="Seconds that a probe gives each stage once it is loaded.")] = 30.0,
    gpus: Annotated[int | None, typer.Option(help="Plan for another machine with so many GPUs.")] = None,
    gpu: Annotated[str | None, typer.Option(help="Kind of GPU of that machine, for example H200.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Show steps, packs, fills, replays, memory of every process, and tokens per second of every way to share out the GPUs.

    Everything that `train` refuses before it loads a weight is refused here too. Nothing is written, except stage costs with
    --probe or --keep: automatic placement goes by them from then on.
    """
    from slipstream.cli.plan_forecast import keep_costs, make_forecast, other_machine
    from slipstream.config import load_recipe
    from slipstream.launch.preflight import preflight
    from slipstream.launch.resources import Resources
    from slipstream.runfolder import RunFolder

    resolved = load_recipe(recipe, overrides=overrides or ())
    elsewhere = other_machine(gpus=gpus, gpu=gpu)
    _check_options(probe=probe, keep=keep, costs=costs or (), is_elsewhere=elsewhere is not None)
    # A plan may be shown while a run of that name is there; starting a second one is what preflight refuses.
    started = RunFolder(Path(resolved.runs) / resolved.name).recipe.is_file()
    flight = preflight(resolved, resume=started, elsewhere=elsewhere)
    schedule = _schedule(resolved)
    if probe or keep:
        seconds, named = probe_seconds if probe else None, costs or ()
        keep_costs(flight, recipe=resolved, schedule=schedule, costs_from=named, probe_seconds=seconds, quiet=as_json)
        flight = preflight(resolved, resume=started)  # again: automatic placement goes by what was found
    resources = Resources.of(flight) if elsewhere is None else Resources(flight=flight, gpus=elsewhere, cores=())
    memory = resources.plan_memory(slots_per_column=schedule.slots_per_column, validation_slots=0)
    found = make_forecast(
        recipe=resolved, flight=flight, schedule=schedule, memory=memory, resources=resources, costs_from=costs or ()
    )
    if as_json:
        content = _as_dict(schedule=schedule, memory=memory, placement=flight.placement)
        typer.echo(json.dumps(content | {"throughput": None if found is None else found.as_dict()}, indent=1))
    else:
        _print_all(recipe=resolved, schedule=schedule, memory=memory, resources=resources, found=found)
    resources.check_memory(memory, elsewhere=elsewhere is not None)


def _check_options(*, probe: bool, keep: bool, costs: Sequence[Path], is_elsewhere: bool) -> None:
    if probe and costs:
        raise UsageError(key="--probe", value=True, rule="measures stage costs, and --costs gives them: take one of the two")
    if keep and not costs:
        raise UsageError(
            key="--keep", value=True, rule="keeps what --costs gives, and there is none", hint="--probe keeps its own"
        )
    if is_elsewhere and (probe or keep):
        option = "--probe" if probe else "--keep"
        raise UsageError(key=option, value=True, rule="is for this machine, and --gpus or --gpu name another one")


def _schedule(recipe: Recipe) -> Schedule:
    from slipstream.corpus.store import CorpusStore
    from slipstream.plan import CorpusIndex, make_schedule

    store = CorpusStore.open(Path(recipe.corpus.path))
    index = CorpusIndex(num_tokens=store.num_tokens, num_anchors=store.num_anchors, fingerprint=store.meta.fingerprint)
    return make_schedule(index=index, plan=recipe.plan, block_size=recipe.drafter.block_size)


def _as_dict(*, schedule: Schedule, memory: MemoryPlan, placement: Placement) -> dict[str, Any]:
    return {
        "digest": schedule.digest,
        "summary": asdict(schedule.summary()),
        "placement": asdict(placement),
        "slots": {
            "per_column": schedule.slots_per_column,
            "number": memory.num_slots,
            "slot_bytes": memory.slot_nbytes,
            "bytes": memory.host_slot_bytes,
            "colocated_on_device": memory.colocated_on_device,
            "allowed_bytes": memory.host_memory_bytes,
        },
        "processes": [
            asdict(process)
            | {"peak_bytes": process.peak_bytes, "peak_moment": process.peak_moment, "device_bytes": process.device_bytes}
            for process in memory.processes
        ],
    }


def _print_all(*, recipe: Recipe, schedule: Schedule, memory: MemoryPlan, resources: Resources, found: Forecast | None) -> None:
    from rich.console import Console

    from slipstream.cli.plan_forecast import print_forecast

    console = Console(highlight=False)
    _print_schedule(schedule=schedule, name=recipe.name, console=console)
    for mode in ("split", "colocated"):
        _print_memory(memory=memory, mode=mode, chosen=resources.flight.placement.mode, console=console)
    console.print(
        f"slots: {memory.num_slots} of {_mib(memory.slot_nbytes)} MiB = {memory.host_slot_bytes / _GIB:.2f} GiB of host; "
        f"{memory.host_memory_bytes / _GIB:.2f} GiB allowed (placement.host_memory_gb)"
        + ("; none of them colocated, which has its slots on the GPU" if memory.colocated_on_device else "")
    )
    for gpu in resources.gpus:
        size = "the driver does not say how large: not checked" if gpu.memory_bytes is None else _gib(gpu.memory_bytes)
        console.print(f"GPU {gpu.index}: {gpu.name or 'without a name'}, {size}")
    print_forecast(found, flight=resources.flight, console=console)


def _print_schedule(*, schedule: Schedule, name: str, console: Console) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(f"plan of {name}"), title_justify="left", show_header=False)
    for label, text in _rows(schedule.summary()):
        table.add_row(label, text)
    table.add_row("digest", schedule.digest[:16])
    console.print(table)


def _rows(summary: PlanSummary) -> list[tuple[str, str]]:
    refused = ", ".join(f"{count:,} {reason}" for reason, count in summary.refused.items() if count) or "none"
    rows = [
        ("steps", f"{summary.steps:,} of {summary.columns} packs"),
        ("packs", f"{summary.packs:,} over {summary.epochs} epochs, {summary.empty_packs} empty at the end"),
        ("documents", f"{summary.documents:,}; refused: {refused}; in packs {summary.uses_of_documents:,} times"),
        ("tokens", f"{summary.target_tokens:,} through the target, {summary.trained_tokens:,} trained on"),
        ("anchors", f"{summary.anchors:,}"),
        ("fill", f"tokens {summary.token_fill:.4f}, anchors {summary.anchor_fill:.4f}"),
        ("mixing", f"mean {summary.mixing_mean:.3f}, worst step {summary.mixing_worst:.3f} (0 is the corpus' own mix)"),
        ("slots", f"{summary.slots_per_column} a column"),
    ]
    if summary.cut_documents:
        rows.insert(3, ("cut off", f"{summary.cut_documents:,} times a document, by plan.max_steps"))
    if summary.replays > 1:
        steady = (
            "none at a steady rate" if summary.steady_distance is None else f"{summary.steady_distance} steps apart or more"
        )
        ramps = f"{summary.ramp_packs:,} packs in ramps {summary.smallest_distance} or more"
        rows.append(("replays", f"{summary.replays} uses a pack, {steady}; {ramps}"))
    return rows


def _print_memory(*, memory: MemoryPlan, mode: Literal["split", "colocated"], chosen: str, console: Console) -> None:
    from rich.table import Table

    title = f"{mode}, MiB a process" + (" (this recipe's placement)" if mode == chosen else "")
    table = Table(title=title, title_justify="left")
    for column in ("process", "what", "MiB", "how"):
        table.add_column(column, justify="right" if column == "MiB" else "left")
    for process in memory.of(mode):
        label = f"{process.count} x {process.role}"
        for item in process.items:
            when = "" if item.held(process.peak_moment) else f" (not then: {', '.join(item.moments)})"
            table.add_row(label, item.name + when, _mib(item.nbytes), item.formula)
            label = ""
        outside = process.device_bytes - process.peak_bytes
        besides = f", and about {_mib(outside)} of the driver's and NCCL's" if outside else ""
        replays = f"; {' and '.join(process.replayed)} replayed from CUDA graphs" if process.replayed else ""
        told = f"{process.peak_moment}; on {process.device}{besides}{replays}"
        table.add_row("", "peak", _mib(process.peak_bytes), told, style="bold", end_section=True)
    console.print(table)


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f}"


def _gib(nbytes: int) -> str:
    return f"{nbytes / _GIB:.1f} GiB"
