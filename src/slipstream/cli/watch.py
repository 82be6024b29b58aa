"""`slipstream watch`: a run while it goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slipstream.errors import UsageError


def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder; the run may be starting, going on or over.")],
    web: Annotated[bool, typer.Option("--web", help="Serve a page to a browser on this machine.")] = False,
    port: Annotated[int, typer.Option("--port", help="Port of the page; 0 takes any free one.")] = 7007,
) -> None:
    """Watch a run live: who waits for whom, curves, lanes and the verdict of its newest minutes. Ctrl-C only ends the view."""
    if not web:
        raise UsageError(key="--web", value=web, rule="a run is watched in a browser", hint=f"slipstream watch {run} --web")
    from slipstream.report.web import serve

    with serve(run, port) as server:
        typer.echo(f"{server.url} (Ctrl-C ends it)")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return
