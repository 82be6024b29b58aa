"""`slipstream logs`: what the processes of a run wrote."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from slipstream.errors import UsageError

POLL_SECONDS = 0.5


def logs(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run folder or name.")],
    worker: Annotated[str | None, typer.Option(help="Only this worker's: supervisor, drafter-0, target-1, ….")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as lines come, until the run is over.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Last lines of each log to begin with.")] = 20,
    runs: Annotated[Path, typer.Option(help="Folder that run folders are in.")] = Path("runs"),
) -> None:
    """Print the logs of a run, each line with its worker's name."""
    from slipstream.launch.condition import UNDER_WAY, condition_of
    from slipstream.launch.handle import find_run

    folder = find_run(run, runs=runs)
    places: dict[Path, int] = {}
    _check_worker(worker, folder.logs)
    for path in _files(folder.logs, worker):
        text = path.read_text(errors="replace")
        places[path] = path.stat().st_size
        _print(path, text.splitlines()[-lines:] if lines else [])
    while follow:
        over = condition_of(folder).state not in UNDER_WAY
        for path in _files(folder.logs, worker):
            places[path] = _rest(path, places.get(path, 0), last=over)
        if over:
            return
        time.sleep(POLL_SECONDS)


def _files(folder: Path, worker: str | None) -> list[Path]:
    return sorted(folder.glob(f"{worker or '*'}.log"))


def _check_worker(worker: str | None, folder: Path) -> None:
    known = [path.stem for path in _files(folder, None)]
    if worker is not None and worker not in known:
        raise UsageError(
            key="--worker", value=worker, rule="has no log in this run", hint=f"logs: {', '.join(known) or 'none'}"
        )


def _rest(path: Path, place: int, *, last: bool) -> int:
    """Print the whole lines behind a place, at the end of a run the torn one too; where they end."""
    with path.open("rb") as file:
        file.seek(place)
        data = file.read()
    whole = len(data) if last else data.rfind(b"\n") + 1
    _print(path, data[:whole].decode(errors="replace").splitlines())
    return place + whole


def _print(path: Path, lines: list[str]) -> None:
    for line in lines:
        typer.echo(f"{path.stem}: {line}")
