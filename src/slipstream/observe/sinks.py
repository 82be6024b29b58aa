"""Where metrics go. A configured sink starts or the run stops; one that fails later never stops the run and is reported."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TextIO

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from slipstream.errors import PreflightError
from slipstream.observe.clock import clock_time
from slipstream.observe.facts import RunFacts
from slipstream.observe.trackers import TensorBoardSink, TrackioSink, WandbSink, missing_package

logger = logging.getLogger(__name__)

Line = Mapping[str, object]

OFFLINE = 'observe.wandb_mode = "offline" needs no login and keeps the run in its folder'


class Sink(Protocol):
    """Takes lines of metrics; every line has "kind" and "step". The constructor raises when the sink cannot work."""

    def write(self, line: Line) -> None:
        """Take one line. May raise: the log around it reports that and goes on."""
        ...

    def close(self) -> None:
        """Flush and let go. Idempotent."""
        ...


class JsonlSink:
    """Every line into a file of JSON lines, appended; each is on its way to disk when `write` returns.

    A resumed run appends below a line of kind "start": of two lines of one kind and step, the later one counts.
    """

    def __init__(self, facts: RunFacts) -> None:
        path = facts.metrics_path
        self._torn = path.is_file() and not _ends_with_newline(path)
        self._file: TextIO = path.open("a", encoding="utf-8")

    def write(self, line: Line) -> None:
        """Append one line; a line torn by an earlier failure is closed off first. NaN and infinities become strings."""
        text = json.dumps(_finite(line), allow_nan=False) + "\n"
        text = "\n" + text if self._torn else text
        self._torn = True
        self._file.write(text)
        self._file.flush()
        self._torn = False

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class ConsoleSink:
    """One rich line every few steps, with the time that is left; every line that is no training step is shown.

    On a terminal a bar below the lines follows every step.
    """

    def __init__(self, facts: RunFacts, *, console: Console | None = None) -> None:
        self._facts = facts
        self._console = console or Console(stderr=True, highlight=False)
        self._clock: Callable[[], float] = time.monotonic
        self._first: tuple[int, float] | None = None
        self._bar: tuple[Progress, TaskID] | None = None

    def write(self, line: Line) -> None:
        """Show a line if it is due."""
        kind, step = str(line["kind"]), int(str(line["step"]))
        if kind == "train":
            self._first = self._first or (step, self._clock())
            if step % self._facts.console_every_steps == 0 or step == self._facts.num_steps - 1 or line["skipped"]:
                self._console.print(self._train_line(line, step=step), soft_wrap=True)
            if self._console.is_terminal:
                self._follow(step)
            return
        shown = "  ".join(f"{name} {_short(value)}" for name, value in line.items() if name not in ("kind", "step"))
        self._console.print(f"[bold]{escape(kind)}[/bold] at step {step}  {escape(shown)}", soft_wrap=True)

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar[0].stop()
            self._bar = None

    def _follow(self, step: int) -> None:
        if self._bar is None:
            columns = (BarColumn(bar_width=None), TextColumn("step {task.completed}/{task.total}  left {task.fields[left]}"))
            progress = Progress(*columns, console=self._console, transient=True, auto_refresh=False, expand=True)
            self._bar = (progress, progress.add_task("training", total=self._facts.num_steps, left="?"))
            progress.start()
        progress, task = self._bar
        progress.update(task, completed=step + 1, left=self._time_left(step), refresh=True)

    def _train_line(self, line: Line, *, step: int) -> str:
        parts = [
            f"[bold]step {step + 1}/{self._facts.num_steps}[/bold]",
            f"loss {_short(line['loss'])}",
            f"tau {_short(line['acceptance_length'])}",
            f"lr {_short(line['learning_rate'])}",
            f"grad {_short(line['gradient_norm'])}",
            f"{_short(line['context_tokens_per_second'])} tokens/s",
            f"{_short(line['anchors_per_second'])} anchors/s",
            f"left {self._time_left(step)}",
        ]
        if line["skipped"]:
            parts.append("[bold red]skipped: not finite[/bold red]")
        return "  ".join(parts)

    def _time_left(self, step: int) -> str:
        assert self._first is not None
        first_step, since = self._first
        if step == first_step:
            return "?"
        seconds = (self._clock() - since) / (step - first_step) * (self._facts.num_steps - 1 - step)
        return clock_time(seconds)


SINKS: Mapping[str, Callable[[RunFacts], Sink]] = {
    "console": ConsoleSink,
    "jsonl": JsonlSink,
    "tensorboard": TensorBoardSink,
    "wandb": WandbSink,
    "trackio": TrackioSink,
}
"""Every sink that a recipe can name."""


class MetricLog:
    """Hands lines to all sinks. A sink that raises is reported, to the log and to the other sinks, and tried again."""

    def __init__(self, sinks: Mapping[str, Sink]) -> None:
        self._sinks = dict(sinks)
        self.failures: dict[str, int] = dict.fromkeys(self._sinks, 0)

    def write(self, line: Line) -> None:
        """Hand one line to every sink; never raises."""
        for name in self._sinks:
            error = self._try(name, lambda sink: sink.write(line))
            if error is not None and self.failures[name] == 1:
                report = {
                    "kind": "sink_failed",
                    "step": line["step"],
                    "sink": name,
                    "error": f"{type(error).__name__}: {error}",
                }
                for other in self._sinks:
                    if other != name:
                        self._try(other, lambda sink, report=report: sink.write(report))  # type: ignore[misc]

    def close(self) -> None:
        """Close every sink and say how many lines each one lost."""
        for name in self._sinks:
            self._try(name, lambda sink: sink.close())
            if self.failures[name]:
                logger.warning("sink %s failed %d times; those lines are lost there", name, self.failures[name])

    def __enter__(self) -> MetricLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _try(self, name: str, action: Callable[[Sink], None]) -> Exception | None:
        try:
            action(self._sinks[name])
        except Exception as error:  # a sink is foreign ground: whatever it raises must not reach training
            self.failures[name] += 1
            if self.failures[name] == 1:
                logger.warning("sink %s failed; training goes on", name, exc_info=True)
            return error
        return None


def open_metric_log(names: Sequence[str], *, facts: RunFacts) -> MetricLog:
    """Start the configured sinks. Raises `PreflightError` naming the one that does not start."""
    check_sinks(names)
    sinks: dict[str, Sink] = {}
    for name in names:
        try:
            sinks[name] = SINKS[name](facts)
        except Exception as error:  # foreign ground, and the run must stop on it in words
            for started in sinks.values():
                started.close()
            hint = OFFLINE if name == "wandb" and facts.wandb_mode == "online" else ""
            rule = f"this sink does not start: {error}"
            raise PreflightError(key="observe.sinks", value=name, rule=rule, hint=hint) from error
    return MetricLog(sinks)


def check_sinks(names: Sequence[str]) -> None:
    """Refuse a sink that is not known, or whose package is not installed; imports none. Raises `PreflightError`."""
    for name in names:
        if name not in SINKS:
            raise PreflightError(key="observe.sinks", value=name, rule=f"is no sink; known: {', '.join(SINKS)}")
        package = missing_package(name)
        if package is not None:
            raise PreflightError(
                key="observe.sinks",
                value=name,
                rule=f"needs the package {package}, which is not installed",
                hint="pip install 'slipstream[sinks]', or leave it out",
            )


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(0, 2)
        if file.tell() == 0:
            return True
        file.seek(-1, 2)
        return file.read(1) == b"\n"


def _finite(value: object) -> object:
    """JSON has no NaN or infinity: they become the strings "nan", "inf", "-inf", never a number."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return value


def _short(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)
