"""`slipstream bench replays`: what replays, and eight-bit slots, cost a recipe in acceptance length."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.errors import UsageError

if TYPE_CHECKING:
    from slipstream.launch.bench.paired import Difference
    from slipstream.launch.bench.replays import ConditionFigures, ReplayFigures


def bench_replays(
    recipe: Annotated[Path, typer.Argument(help="Recipe file (TOML), with validation prompts.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[a.b=c]…", help="Keys of the recipe to change.")] = None,
    distances: Annotated[str, typer.Option(help="Steps between two uses of a pack, ascending.")] = "1,5,20,50",
    replays: Annotated[int, typer.Option(help="Uses of a pack; divides plan.epochs x plan.replays.")] = 2,
    seeds: Annotated[int, typer.Option(help="Seeds, from plan.seed on.")] = 3,
    float8_slots: Annotated[
        bool, typer.Option("--float8-slots", help="Compare slots of eight bits, without replays, too.")
    ] = False,
    workers: Annotated[int, typer.Option(help="Processes that train at the same time, on one device.")] = 1,
    out: Annotated[Path | None, typer.Option(help="JSON file of all figures, written anew after each run.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Train drafters with and without replays, at equal steps and anchors, and compare their acceptance lengths.

    Each seed trains one drafter without replays and one with each distance: same initial weights, same uses of each document.
    Differences are to no replays, with 95 % intervals: Student's t over seeds, and the bootstrap over prompts and seeds.
    Everything runs on one device, or on the CPU; the run folder is left alone.
    """
    from slipstream.config import load_recipe

    resolved = load_recipe(recipe, overrides=[*(overrides or []), "placement.mode=colocated", "placement.drafter_ranks=1"])
    resolved = resolved.model_copy(update={"name": f"{resolved.name}.bench-{os.getpid()}"})  # a name that no run has

    from slipstream.cli.progress import Bars
    from slipstream.launch.bench.replays import ReplayWork, bench_replays
    from slipstream.launch.preflight import preflight

    work = ReplayWork(distances=_numbers(distances), replays=replays, seeds=seeds, eight_bits=float8_slots, workers=workers)

    def hear(figures: ReplayFigures) -> None:
        if out is not None:
            part = out.with_name(f"{out.name}.part")
            part.write_text(json.dumps(figures.as_dict(), indent=1) + "\n")
            os.replace(part, out)

    with Bars(quiet=as_json) as bars:
        say = bars.say if not as_json else partial(typer.echo, err=True)
        figures = bench_replays(preflight(resolved), work, say=say, hear=hear, on_progress=bars)
    if as_json:
        typer.echo(json.dumps(figures.as_dict()))
    else:
        _show(figures)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise UsageError(key="--distances", value=text, rule="must be whole numbers with commas between them") from error


def _show(figures: ReplayFigures) -> None:
    from rich.console import Console
    from rich.table import Table

    steps = figures.conditions[0].steps
    title = f"{figures.work.replays} uses of a pack against one, {figures.work.seeds} seeds, {steps} steps each"
    table = Table(title=title, title_justify="left")
    for heading in ("", "planned", "packs", "tau", "difference", "over seeds", "over prompts"):
        table.add_column(heading, justify="left" if not heading else "right")
    for condition in figures.conditions:
        table.add_row(*_row(condition))
    Console(highlight=False, width=120).print(table)


def _row(condition: ConditionFigures) -> list[str]:
    tau = f"{condition.acceptance_length:.3f}"
    if condition.rounded_acceptance_length is not None:
        tau += f" ({condition.rounded_acceptance_length:.3f} on rounded states)"
    planned = "" if condition.planned_distance is None else str(condition.planned_distance)
    return [condition.name, planned, str(condition.packs), tau, *_difference(condition.difference)]


def _difference(found: Difference | None) -> list[str]:
    if found is None:
        return ["", "", ""]
    return [f"{found.mean:+.3f}", _interval(found.over_seeds), _interval(found.over_prompts)]


def _interval(bounds: tuple[float, float] | None) -> str:
    return "" if bounds is None else f"{bounds[0]:+.3f} to {bounds[1]:+.3f}"
