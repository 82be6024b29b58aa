"""Sinks that hand metrics to an experiment tracker: TensorBoard, Weights & Biases, trackio. Each is an optional package.

A tracker takes numbers, so of a line it gets those: "train/loss", "train/accuracy_per_slot/1" and so on, each at its own
step. It is imported when its sink is made, never before.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import secrets
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from slipstream.observe.facts import RunFacts

Line = Mapping[str, object]


PACKAGES: Mapping[str, str] = {"tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio"}
"""The package that each tracker's sink needs; the extra `sinks` installs all of them."""


def missing_package(sink: str) -> str | None:
    """The package that a sink needs and that is not installed, found without importing it; none for a sink that needs none."""
    package = PACKAGES.get(sink)
    return package if package is not None and importlib.util.find_spec(package) is None else None


def numbers(line: Line) -> dict[str, float]:
    """A line's numbers by tag, under its kind; lists count from 0, or from 1 where they are by slot. Its step is left out."""
    found: dict[str, float] = {}
    for name, value in line.items():
        if name not in ("kind", "step"):
            _collect(value, tag=f"{line['kind']}/{name}", first=1 if name.endswith("per_slot") else 0, into=found)
    return found


def _collect(value: object, *, tag: str, first: int, into: dict[str, float]) -> None:
    if isinstance(value, int | float):
        into[tag] = float(value)
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            _collect(inner, tag=f"{tag}/{key}", first=0, into=into)
    elif isinstance(value, list | tuple):
        for place, inner in enumerate(value, start=first):
            _collect(inner, tag=f"{tag}/{place}", first=0, into=into)


def _step(line: Line) -> int:
    return int(str(line["step"]))


class TensorBoardSink:
    """Event files in the run's folder `tensorboard`, one more for each start. Needs neither torch nor TensorFlow."""

    def __init__(self, facts: RunFacts) -> None:
        events = importlib.import_module("tensorboard.compat.proto.event_pb2")
        summaries = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        writers = importlib.import_module("tensorboard.summary.writer.event_file_writer")
        self._event, self._summary = events.Event, summaries.Summary
        self._writer = writers.EventFileWriter(str(facts.folder / "tensorboard"))

    def write(self, line: Line) -> None:
        """A scalar for each number."""
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in numbers(line).items()]
        if values:
            summary = self._summary(value=values)
            self._writer.add_event(self._event(wall_time=time.time(), step=_step(line), summary=summary))

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


class WandbSink:
    """A Weights & Biases run, the same one over all starts of a run folder: its id is kept in `wandb/run-id`.

    Online it is continued; offline each start leaves a folder in `wandb/`, which `wandb sync` puts together by the id.
    """

    def __init__(self, facts: RunFacts) -> None:
        wandb = importlib.import_module("wandb")
        self._run = wandb.init(
            project=facts.project,
            name=facts.name,
            id=_kept_id(facts.folder / "wandb" / "run-id"),
            dir=str(facts.folder),
            config=dict(facts.recipe),
            mode=facts.wandb_mode,
            resume="allow" if facts.wandb_mode == "online" else None,
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, line: Line) -> None:
        """Log the numbers against their step: a validation may come before the train line of an earlier step."""
        found = numbers(line)
        if found:
            self._run.log({**found, "step": _step(line)})

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class TrackioSink:
    """A trackio run, where trackio keeps its own: `trackio show` opens them. Goes on with the run of that name."""

    def __init__(self, facts: RunFacts) -> None:
        self._trackio = importlib.import_module("trackio")
        self._open = True
        with _quiet():
            self._run = self._trackio.init(
                project=facts.project,
                name=facts.name,
                config=dict(facts.recipe),
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def write(self, line: Line) -> None:
        """Log the numbers at their step."""
        found = numbers(line)
        if found:
            self._run.log(found, step=_step(line))

    def close(self) -> None:
        """Finish the run."""
        if self._open:
            self._open = False
            with _quiet():
                self._trackio.finish()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What a tracker says goes to stderr: stdout may be read by a program."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


def _kept_id(path: Path) -> str:
    if path.is_file():
        return path.read_text().strip()
    path.parent.mkdir(parents=True, exist_ok=True)
    made = secrets.token_hex(4)
    path.write_text(made + "\n")
    return made
