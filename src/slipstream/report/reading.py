"""A run folder as data: everything that its processes wrote about the run, read once or again and again while it is written.

A resumed run appends: the steps that its newest start makes again replace those from before.
"""

from __future__ import annotations

import json
import time
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.errors import UsageError
from slipstream.report.jsonl import JsonLines, with_numbers
from slipstream.report.spans import Samples, SpanColumns, Spans
from slipstream.runfolder import RunFolder

ENDED = ("finished", "interrupted", "failed")


@dataclass(frozen=True, slots=True)
class RunData:
    """What a run folder held when it was read. Files that are not there leave their field empty.

    `recipe` is the resolved one; `state` what state.json says; `starts` the rows of environment.jsonl; `train` and
    `validations` the lines of metrics.jsonl by step (of two lines of one step the later one), `events` its lines of every
    other kind in file order; `accounts` and `spans` by worker; `queues` and `gpus` as columns; `prediction` and `process` as
    written; `now` the Unix time of the reading; `torn_lines` how many lines were no JSON.
    """

    root: Path
    recipe: dict[str, Any] = field(default_factory=dict)
    recipe_given: str | None = None
    state: dict[str, Any] = field(default_factory=dict)
    starts: list[dict[str, Any]] = field(default_factory=list)
    train: list[dict[str, Any]] = field(default_factory=list)
    validations: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    accounts: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    spans: dict[str, Spans] = field(default_factory=dict)
    queues: Samples = field(default_factory=Samples)
    gpus: Samples = field(default_factory=Samples)
    prediction: dict[str, Any] | None = None
    process: dict[str, Any] | None = None
    now: float = 0.0
    torn_lines: int = 0

    @property
    def name(self) -> str:
        """The run's name: its recipe's, else its folder's."""
        return str(self.recipe.get("name") or self.root.name)

    @property
    def ended(self) -> bool:
        """Whether the run says that it is over."""
        return self.state.get("status") in ENDED

    @property
    def begin(self) -> float:
        """Unix seconds of the first thing known about the run; `now` when nothing is."""
        starts = [spans.starts[0] for spans in self.spans.values() if spans.starts]
        starts += [float(spans.start.min()) for spans in self.spans.values() if len(spans)]
        starts += [lines[0]["time"] - lines[0]["wall_seconds"] for lines in self.accounts.values() if lines]
        starts += [float(samples["time"][0]) for samples in (self.queues, self.gpus) if len(samples)]
        return min(starts, default=self.now)

    @property
    def end(self) -> float:
        """Unix seconds of the last thing known about the run."""
        ends = [float(spans.end.max()) for spans in self.spans.values() if len(spans)]
        ends += [lines[-1]["time"] for lines in self.accounts.values() if lines]
        ends += [float(samples["time"][-1]) for samples in (self.queues, self.gpus) if len(samples)]
        return max(ends, default=self.now)


class RunReader:
    """Reads a run folder again and again; each file is read on from where it ended. For views of a run that goes on.

    Raises `UsageError` when the folder holds no run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = RunFolder(folder)
        signs = (self._folder.process, self._folder.state, self._folder.metrics, self._folder.spans)
        if not any(path.exists() for path in signs):
            raise UsageError(
                key="RUN", value=str(folder), rule="is no run folder: it holds neither state.json nor metrics.jsonl"
            )
        self._files: dict[Path, JsonLines] = {}
        self._train: dict[int, dict[str, Any]] = {}
        self._validations: dict[int, dict[str, Any]] = {}
        self._events: list[dict[str, Any]] = []
        self._starts: list[dict[str, Any]] = []
        self._accounts: dict[str, list[dict[str, Any]]] = {}
        self._spans: dict[str, SpanColumns] = {}
        self._queues = Samples()
        self._gpus = Samples()

    def refresh(self) -> RunData:
        """Everything that the folder holds now. A record of before stays as it was."""
        folder = self._folder
        lines, restarted = self._new(folder.metrics)
        if restarted:
            self._train, self._validations, self._events = {}, {}, []
        for line in lines:
            self._take_metrics(with_numbers(line))
        lines, restarted = self._new(folder.environment)
        self._starts = ([] if restarted else self._starts) + lines
        lines, restarted = self._new(folder.queues)
        self._queues = (Samples() if restarted else self._queues).joined(Samples.of(lines))
        lines, restarted = self._new(folder.gpus)
        self._gpus = (Samples() if restarted else self._gpus).joined(Samples.of(lines))
        self._read_workers()
        return RunData(
            root=folder.root,
            recipe=_read_toml(folder.recipe),
            recipe_given=folder.recipe_given.read_text("utf-8") if folder.recipe_given.is_file() else None,
            state=_read_json(folder.state) or {},
            starts=list(self._starts),
            train=[self._train[step] for step in sorted(self._train)],
            validations=[self._validations[step] for step in sorted(self._validations)],
            events=list(self._events),
            accounts={worker: list(lines) for worker, lines in self._accounts.items()},
            spans={worker: columns.spans for worker, columns in self._spans.items()},
            queues=self._queues,
            gpus=self._gpus,
            prediction=_read_json(folder.prediction),
            process=_read_json(folder.process),
            now=time.time(),
            torn_lines=sum(file.torn_lines for file in self._files.values()),
        )

    def _new(self, path: Path) -> tuple[list[dict[str, Any]], bool]:
        """New lines that are objects, and whether the file was begun anew."""
        file = self._files.setdefault(path, JsonLines(path))
        lines = [line for line in file.new() if isinstance(line, dict)]
        return lines, file.restarted

    def _take_metrics(self, line: dict[str, Any]) -> None:
        kind, step = line.get("kind"), line.get("step")
        if kind == "train" and isinstance(step, int):
            self._train[step] = line
        elif kind == "validation" and isinstance(step, int):
            self._validations[step] = line
        else:
            self._events.append(line)
            if kind == "start" and isinstance(step, int):
                self._train = {done: row for done, row in self._train.items() if done < step}
                self._validations = {done: row for done, row in self._validations.items() if done <= step}

    def _read_workers(self) -> None:
        for path in sorted(self._folder.accounts.glob("*.jsonl")):
            lines, restarted = self._new(path)
            kept = [] if restarted else self._accounts.get(path.stem, [])
            self._accounts[path.stem] = kept + lines
        for path in sorted(self._folder.spans.glob("*.jsonl")):
            file = self._files.setdefault(path, JsonLines(path))
            values = file.new()
            if file.restarted or path.stem not in self._spans:
                self._spans[path.stem] = SpanColumns(path.stem)
            self._spans[path.stem].add(values)


def read_run(folder: Path) -> RunData:
    """Read a run folder once. Raises `UsageError` when it holds no run."""
    return RunReader(folder).refresh()


def number(line: Mapping[str, Any], key: str) -> float:
    """A value of a line as a number; NaN when it is missing or none."""
    value = line.get(key)
    return float(value) if isinstance(value, int | float) else np.nan


def column(lines: list[dict[str, Any]], key: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """One value of every line, float64; NaN where it is missing."""
    try:
        return np.array([line.get(key) for line in lines], dtype=np.float64)  # None becomes NaN
    except (TypeError, ValueError):
        return np.array([number(line, key) for line in lines], dtype=np.float64)


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text("utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (FileNotFoundError, tomllib.TOMLDecodeError):
        return {}
