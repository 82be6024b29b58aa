"""`slipstream train`: run a recipe, or continue it."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.errors import SlipstreamError, UsageError

if TYPE_CHECKING:
    from slipstream.cli.progress import Bars
    from slipstream.launch.local import RunResult
    from slipstream.launch.preflight import Preflight

STANDARD_ERROR = 2


def train(
    recipe: Annotated[Path, typer.Argument(help="Recipe file (TOML).")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[a.b=c]…", help="Keys of the recipe to change.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run of that name, exactly, from its last checkpoint.")
    ] = False,
    warm_start: Annotated[str | None, typer.Option(help="Exported drafter folder to start the weights from.")] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Run in the background: status, watch, logs and stop know it by its name.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Train a drafter as a recipe says: preflight, plan, answers to validation prompts, then the run itself."""
    from slipstream.config import load_recipe

    changes = [*(overrides or []), *([f"drafter.warm_start={json.dumps(warm_start)}"] if warm_start else [])]
    resolved = load_recipe(recipe, overrides=changes)

    from slipstream.launch.preflight import preflight

    flight = preflight(resolved, resume=resume)
    if resume and _is_finished(flight, as_json=as_json):
        return
    if flight.chosen is not None and not as_json:
        typer.echo(f"placement: {flight.chosen}", err=True)
    if detach:
        _detach(flight, recipe=recipe, changes=changes, as_json=as_json)
        return

    from slipstream.cli.progress import Bars
    from slipstream.launch.detach import LOG_FILE as SUPERVISOR_LOG
    from slipstream.launch.local import train_run

    with Bars(quiet=as_json) as bars, _warnings_into(flight.folder.logs / SUPERVISOR_LOG):
        hear = _Progress(bars, quiet=as_json)
        result = train_run(flight=flight, given=recipe.read_text(), on_report=hear)
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "folder": str(result.folder),
                    "steps": result.steps,
                    "warm_up_seconds": result.warm_up_seconds,
                    "train_seconds": result.train_seconds,
                    "validate_seconds": result.validate_seconds,
                    "checkpoint": str(result.checkpoint),
                    "validations": result.validations,
                    "verdict": None if result.verdict is None else result.verdict.as_dict(),
                }
            )
        )
        return
    _print(result, is_rehearsal=resolved.target.weights == "random")


def _print(result: RunResult, *, is_rehearsal: bool) -> None:
    typer.echo(
        f"{result.steps} steps: {result.train_seconds:.0f} s of training after {result.warm_up_seconds:.0f} s of warm-up, "
        f"{result.validate_seconds:.0f} s of validation; checkpoint {result.checkpoint}"
    )
    lengths = [(line["acceptance_length"], line["step"]) for line in result.validations]
    measured = [(length, step) for length, step in lengths if length is not None]
    for length, step in measured[-1:]:
        longest, at = max(measured)
        more = "" if longest == length else f"; the longest was {longest:.3f}, at step {at}"
        typer.echo(f"acceptance length {length:.3f} at step {step}{more}")
    if result.verdict is not None:
        typer.echo(f"verdict: {result.verdict.headline}")
    if is_rehearsal:
        typer.echo('a rehearsal: target.weights = "random", so this drafter is worthless and cannot be exported')
        return
    typer.echo(f"next: slipstream export {result.folder} --out DIR")


@contextmanager
def _warnings_into(log: Path) -> Iterator[None]:
    """What this process warns of goes into the run's folder too, and so does what it fails with: logs by worker, all of them.

    A detached one says everything there.
    """
    if log.exists() and os.path.samestat(os.fstat(STANDARD_ERROR), log.stat()):
        yield
        return
    handler = logging.FileHandler(log, delay=True)  # none for a start that is refused: the folder may be another's
    handler.setFormatter(logging.Formatter("%(asctime)s supervisor %(levelname)s %(name)s: %(message)s"))
    logging.getLogger("slipstream").addHandler(handler)
    try:
        yield
    except SlipstreamError as error:
        if not isinstance(error, UsageError) and log.parent.is_dir():
            handler.handle(logging.LogRecord("slipstream", logging.ERROR, __file__, 0, "%s", (error,), None))
        raise
    finally:
        logging.getLogger("slipstream").removeHandler(handler)
        handler.close()


def _detach(flight: Preflight, *, recipe: Path, changes: list[str], as_json: bool) -> None:
    """Start the same run in the background. What preflight can refuse was refused here, where it is read."""
    from slipstream.launch.detach import start_detached
    from slipstream.launch.lock import RunLock

    folder = flight.folder
    folder.root.mkdir(parents=True, exist_ok=True)
    with RunLock(folder):  # refuses a run that somebody trains, before its log is written to
        pass
    resume = ["--resume"] if flight.resume else []
    handle = start_detached(["train", str(recipe), *changes, *resume], folder=folder)
    if as_json:
        typer.echo(json.dumps({"folder": str(folder.root), "pid": handle.pid, "log": str(folder.logs / "supervisor.log")}))
        return
    typer.echo(f"{folder.root.name} runs in the background, process {handle.pid}")
    typer.echo(f"next: slipstream status {folder.root}   watch, logs -f and stop take the same name")


def _is_finished(flight: Preflight, *, as_json: bool) -> bool:
    """Whether a run to resume has nothing left to do, which is said and is no error: a job that is repeated may end so."""
    from slipstream.launch.resume import check_same_recipe, finished_steps

    check_same_recipe(recipe=flight.recipe, saved=flight.folder.recipe)
    steps = finished_steps(flight.folder)
    if steps is None:
        return False
    root = flight.folder.root
    if as_json:
        typer.echo(json.dumps({"folder": str(root), "steps": steps, "already_finished": True}))
    else:
        typer.echo(f"{root.name} has finished: all {steps} steps are done")
        typer.echo(f"next: slipstream export {root} --out DIR")
    return True


class _Progress:
    """Says on stderr which worker is ready, and how far the answers are; the steps are the console sink's to tell."""

    def __init__(self, bars: Bars, *, quiet: bool) -> None:
        self._bars, self._quiet = bars, quiet

    def __call__(self, worker: str, kind: str, payload: Any) -> None:
        if self._quiet:
            return
        if kind == "ready":
            typer.echo(f"{worker} is ready", err=True)
        elif kind == "progress" and payload["stage"] == "answers":
            self._bars("answering validation prompts", payload["done"], payload["of"])
            if payload["done"] == payload["of"]:
                self._bars.close()
