"""How far a command is, on stderr: on a terminal a bar for each stage, with the time left; elsewhere a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column

from slipstream.observe.clock import clock_time

LINE_SECONDS = 15.0
"""Where no terminal is, a stage says how far it is this often, and when it ends."""


@dataclass(slots=True)
class _Stage:
    """A stage as a line tells it: since when and from where it counts, what it last said, and when."""

    began: float
    first: float
    said: float
    text: str = ""
    over: bool = False
    task: TaskID | None = None


class Bars:
    """Bars of one command, a context. Each call is news of a stage; `say` prints a line of the command's own output above them.

    Quiet bars show nothing: with `--json`, stdout belongs to the result and nobody reads along.
    """

    def __init__(
        self, *, quiet: bool = False, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._quiet, self._clock = quiet, clock
        self._console = console or Console(stderr=True, highlight=False)
        self._stages: dict[str, _Stage] = {}
        self._bars: Progress | None = None

    def __call__(self, stage: str, done: float, total: float | None, text: str = "") -> None:
        """A stage has done so much of `total`, none while that is unknown; an empty `text` keeps the one before, or counts."""
        if self._quiet:
            return
        now = self._clock()
        known = self._stages.setdefault(stage, _Stage(began=now, first=done, said=now))
        known.text = text or known.text
        shown = known.text or ("" if total is None else f"{done:,.0f}/{total:,.0f}")
        if self._console.is_terminal:
            self._draw(stage, known, done=done, total=total, shown=shown)
        else:
            self._tell(stage, known, done=done, total=total, shown=shown, now=now)

    def say(self, line: str) -> None:
        """Print a line to stdout; where both are one terminal, above the bars."""
        if self._bars is not None and sys.stdout.isatty():
            self._bars.console.print(line, markup=False, soft_wrap=True)
        else:
            typer.echo(line)

    def close(self) -> None:
        """Leave the bars as they are, and begin others with the next news."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None
        self._stages.clear()

    def __enter__(self) -> Bars:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _draw(self, stage: str, known: _Stage, *, done: float, total: float | None, shown: str) -> None:
        if self._bars is None:
            self._bars = Progress(*_columns(), console=self._console, redirect_stdout=False, refresh_per_second=4)
            self._bars.start()
        if known.task is None:
            known.task = self._bars.add_task(shown, total=total, stage=stage)
        self._bars.update(known.task, completed=done, total=total, description=shown)

    def _tell(self, stage: str, known: _Stage, *, done: float, total: float | None, shown: str, now: float) -> None:
        over = total is not None and done >= total
        if known.over or not (over or now - known.said >= LINE_SECONDS):
            return
        known.said, known.over = now, over
        left = ""
        if total is not None and done > known.first and not over:
            seconds = (now - known.began) / (done - known.first) * (total - done)
            left = f", left {clock_time(seconds)}"
        share = f" {done / total:.0%}," if known.text and total else ""
        self._console.print(f"{stage}:{share} {shown}{left}", markup=False, soft_wrap=True)


def _columns() -> tuple[TextColumn | BarColumn | TimeElapsedColumn | TimeRemainingColumn, ...]:
    whole = Column(no_wrap=True, min_width=7)
    return (
        TextColumn("{task.fields[stage]:8}", markup=False),
        BarColumn(bar_width=16),
        TaskProgressColumn(),
        TimeElapsedColumn(table_column=whole),
        TimeRemainingColumn(table_column=whole),
        TextColumn("{task.description}", markup=False),
    )
