"""`slipstream status`: every run of a folder, or one of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from slipstream.launch.condition import Condition


def status(
    run: Annotated[str | None, typer.Argument(metavar="[RUN]", help="Run folder or name; none lists every run.")] = None,
    runs: Annotated[Path, typer.Option(help="Folder that run folders are in.")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say how runs are: state, step, rate, time left, health. Exits with 1 when the one run asked for failed or was lost."""
    from slipstream.launch.condition import condition_of
    from slipstream.launch.handle import all_runs, find_run

    if run is None:
        found = [condition_of(folder) for folder in all_runs(runs)]
        if as_json:
            typer.echo(json.dumps([one.as_dict() for one in found], indent=1))
        elif found:
            _show(found)
        else:
            typer.echo(f"no run in {runs}")
        return
    folder = find_run(run, runs=runs)
    one, verdict = condition_of(folder), _headline(folder.root)
    if as_json:
        typer.echo(json.dumps({**one.as_dict(), "verdict": verdict}, indent=1))
    else:
        for label, text in _rows(one, verdict=verdict):
            typer.echo(f"{label:<18}{text}")
    raise typer.Exit(1 if one.state in ("failed", "lost") else 0)


def _headline(root: Path) -> str:
    from slipstream.report.reading import read_run
    from slipstream.report.verdict import judge

    return judge(read_run(root)).headline


def _show(found: list[Condition]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("run", "state", "step", "tokens/s", "left", "tau", "health"):
        table.add_column(title, overflow="fold" if title == "health" else "ellipsis", no_wrap=title != "health")
    for one in found:
        table.add_row(
            one.name, one.state, _steps(one), _number(one.context_tokens_per_second), _left(one), _tau(one), one.health
        )
    Console(highlight=False).print(table)


def _rows(one: Condition, *, verdict: str) -> list[tuple[str, str]]:
    process = f"process {one.pid}{', detached' if one.detached else ''}" if one.pid is not None else "no process"
    per_step = "-" if one.seconds_per_step is None else f"{one.seconds_per_step:.3g} s"
    return [
        ("run", f"{one.name} ({one.folder})"),
        ("state", f"{one.state}, {process}"),
        ("step", _steps(one)),
        ("rate", f"{_number(one.context_tokens_per_second)} context tokens/s, {per_step} a step"),
        ("left", _left(one)),
        ("loss", "-" if one.loss is None else f"{one.loss:.4f}"),
        ("acceptance length", f"{_tau(one)} (training, latest validation)"),
        ("health", one.health),
        ("verdict", verdict),
    ]


def _steps(one: Condition) -> str:
    return f"{one.step}/{one.steps if one.steps is not None else '?'}"


def _tau(one: Condition) -> str:
    both = [f"{value:.2f}" if value is not None else "-" for value in (one.acceptance_length, one.validated)]
    return ", ".join(both)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _left(one: Condition) -> str:
    from slipstream.observe.clock import clock_time

    return "-" if one.seconds_left is None else clock_time(one.seconds_left)
