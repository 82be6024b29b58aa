"""`slipstream watch`: a run while it goes on, in the terminal or in a browser."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.errors import UsageError

if TYPE_CHECKING:
    from slipstream.report.terminal_panels import Health
    from slipstream.runfolder import RunFolder


def watch(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run folder or name; the run may be starting, going on or over.")],
    web: Annotated[bool, typer.Option("--web", help="Serve a page to a browser on this machine instead.")] = False,
    port: Annotated[
        int | None, typer.Option("--port", help="Port of the page; 0 takes any free one.", show_default="7007")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print the view once and leave; needs no terminal.")] = False,
    runs: Annotated[Path, typer.Option(help="Folder that run folders are in.")] = Path("runs"),
) -> None:
    """Watch a run live: who waits for whom, curves, lanes and the verdict of its newest minutes.

    Keys: 1 to 5 or tab for a view, + and - for the window of time, c for curves of the run or of the window, arrows to scroll,
    q to leave. Leaving ends the view alone, never the run.
    """
    from slipstream.launch.handle import find_run

    folder = find_run(run, runs=runs)
    if port is not None and not web:
        raise UsageError(key="--port", value=port, rule="does nothing without --web")
    if web and once:
        raise UsageError(key="--once", value=once, rule="prints to this terminal, and --web serves a page")
    if web:
        _serve(folder, port=port)
    elif once:
        _print_once(folder)
    else:
        _show(folder)


def _serve(folder: RunFolder, *, port: int | None) -> None:
    from slipstream.report.web import serve

    with serve(folder.root) if port is None else serve(folder.root, port) as server:
        typer.echo(f"{server.url} (Ctrl-C ends it)")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return


def _print_once(folder: RunFolder) -> None:
    from rich.console import Console

    from slipstream.report.terminal_live import draw_once

    console = Console(highlight=False)
    for row in draw_once(folder.root, health=_health(folder), width=console.width, height=console.height):
        console.print(row, no_wrap=True, crop=True)


def _show(folder: RunFolder) -> None:
    from slipstream.report.terminal_live import watch_run
    from slipstream.report.terminal_screen import WITHOUT_CURSOR, Screen

    name = os.environ.get("TERM", "")
    if not (sys.stdin.isatty() and sys.stdout.isatty()) or name in WITHOUT_CURSOR:
        raise UsageError(
            key="RUN",
            value=folder.root.name,
            rule="is watched in a terminal, and this is none that can be drawn on",
            hint="--once prints the view, --web serves a page, slipstream status prints figures",
        )
    screen = Screen(keys=sys.stdin.fileno(), out=sys.stdout.fileno())
    try:
        watch_run(folder.root, screen=screen, health=lambda: _health(folder))
    except KeyboardInterrupt:
        return


def _health(folder: RunFolder) -> Health:
    from slipstream.launch.condition import condition_of
    from slipstream.report.terminal_panels import Health

    condition = condition_of(folder)
    return Health(state=condition.state, sentence=condition.health)
