"""`slipstream stop`: end a run by its own handle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def stop(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run folder or name.")],
    runs: Annotated[Path, typer.Option(help="Folder that run folders are in.")] = Path("runs"),
    grace: Annotated[float, typer.Option(min=0, help="Seconds that the step and its checkpoint may take.")] = 300.0,
    now: Annotated[
        bool, typer.Option("--now", help="Do not wait for the step: steps since the last checkpoint are lost.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Stop a run on this machine: it finishes its step, saves, and ends. Returns when all its processes are gone."""
    from slipstream.launch.condition import condition_of
    from slipstream.launch.handle import find_run, stop_run

    folder = find_run(run, runs=runs)
    how = stop_run(folder, grace_seconds=0.0 if now else grace, say=lambda text: typer.echo(text, err=True))
    one = condition_of(folder)
    if as_json:
        typer.echo(json.dumps({"run": one.name, "ended": how, "state": one.state, "step": one.step}))
        return
    typer.echo(f"{one.name} ended {how}: {one.state} at step {one.step} of {one.steps if one.steps is not None else '?'}")
