"""`slipstream report`: a run folder as one HTML file, as a trace, or as numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.errors import UsageError

if TYPE_CHECKING:
    from slipstream.report.reading import RunData


def report(
    run: Annotated[list[str], typer.Argument(metavar="RUN…", help="Run folders or names; several are compared.")],
    out: Annotated[
        Path | None, typer.Option("--out", help="HTML file to write; of one run by default its own report.html.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Perfetto trace to write, FILE.json or FILE.json.gz; of one run.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print figures and verdict as JSON.")] = False,
    runs: Annotated[Path, typer.Option(help="Folder that run folders are in.")] = Path("runs"),
) -> None:
    """Say where the time of a run went: curves, lanes, wait shares and the verdict, in one HTML file that needs no network.

    With --trace or --json alone, no HTML file is written.
    """
    from slipstream.launch.handle import find_run
    from slipstream.report.reading import read_run

    if len(run) > 1 and trace is not None:
        raise UsageError(key="--trace", value=str(trace), rule=f"is of one run, here are {len(run)}")
    if len(run) > 1 and out is None and not as_json:
        raise UsageError(key="--out", value=None, rule="several runs need a file to be written to", hint="--out compare.html")
    read = [read_run(find_run(one, runs=runs).root) for one in run]
    told: list[str] = []
    if trace is not None:
        told.append(_write_trace(read[0], trace))
    if out is not None or (trace is None and not as_json):
        told.append(_write_html(read, out or read[0].root / "report.html"))
    if as_json:
        typer.echo(json.dumps(_figures(read), indent=1))
        return
    for line in told:
        typer.echo(line)


def _write_trace(run: RunData, path: Path) -> str:
    from slipstream.report.trace import write_trace

    try:
        count = write_trace(run, path)
    except OSError as error:
        raise UsageError(key="--trace", value=str(path), rule=f"cannot be written: {error.strerror}") from error
    return f"trace of {count:,} events: {path} (open it at ui.perfetto.dev)"


def _write_html(runs: list[RunData], path: Path) -> str:
    from slipstream.report.html import report_page
    from slipstream.report.verdict import judge

    page = report_page(runs)
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UsageError(key="--out", value=str(path), rule=f"cannot be written: {error.strerror}") from error
    verdicts = "\n".join(f"{run.name}: {judge(run).headline}" for run in runs)
    return f"{verdicts}\nreport: {path} ({path.stat().st_size / 1e6:.1f} MB)"


def _figures(runs: list[RunData]) -> object:
    """Of one run its figures, of several a list."""
    from slipstream.report.figures import run_figures, verdict_figures
    from slipstream.report.html import to_json
    from slipstream.report.verdict import judge

    figures = [run_figures(run) | {"verdict": verdict_figures(judge(run))} for run in runs]
    plain: list[object] = json.loads(to_json(figures))
    return plain[0] if len(plain) == 1 else plain
