"""Spans and samples as columns: a worker's states over time, and what was sampled about once a second."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

TOUCHING = 2e-6
"""Seconds: spans are written in whole microseconds."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Spans:
    """The spans of one worker, ordered by their place in the file (within one lane: by time). Columns have one entry a span.

    `lane` and `state` are codes into `lane_names` and `state_names`; `start` is in Unix seconds, `seconds` the duration;
    `pack` and `step` are -1 where there is none (columns of integers have no None). `starts` are the Unix seconds at which
    this worker's process started, one a start. `role`, `rank`, `gpu` and `pid` are those of the newest start. `dropped` counts
    spans that the worker could not keep.
    """

    worker: str
    role: str
    rank: int
    gpu: int | None
    pid: int | None
    lane_names: tuple[str, ...]
    state_names: tuple[str, ...]
    lane: NDArray[np.int16]
    state: NDArray[np.int16]
    start: Floats
    seconds: Floats
    pack: Ints
    step: Ints
    starts: tuple[float, ...] = ()
    dropped: int = 0

    def __len__(self) -> int:
        return len(self.start)

    @property
    def end(self) -> Floats:
        """Unix seconds at which each span ended."""
        return self.start + self.seconds

    def pick(self, chosen: NDArray[Any]) -> Spans:
        """Those spans that a mask or an index array chooses."""
        columns = ("lane", "state", "start", "seconds", "pack", "step")
        return replace(self, **{name: getattr(self, name)[chosen] for name in columns})

    def of_lane(self, name: str) -> Spans:
        """The spans of one lane; none when it has no such lane."""
        code = self.lane_names.index(name) if name in self.lane_names else -1
        return self.pick(self.lane == code)

    def between(self, begin: float, end: float) -> Spans:
        """The spans that touch a window of time, cut to it."""
        inside = self.pick((self.start < end) & (self.end > begin))
        start = np.maximum(inside.start, begin)
        return replace(inside, start=start, seconds=np.minimum(inside.end, end) - start)

    def seconds_by_state(self) -> dict[str, float]:
        """Seconds of each state that occurs, over all lanes that are left in here; the longest first."""
        totals = np.bincount(self.state, weights=self.seconds, minlength=len(self.state_names))
        counted = np.bincount(self.state, minlength=len(self.state_names))
        order = np.argsort(-totals, kind="stable")
        return {self.state_names[code]: float(totals[code]) for code in order if counted[code]}


def join_pieces(spans: Spans) -> Spans:
    """The spans of one lane with those joined that follow each other at once in one state, pack and step: pieces of one, which
    was written while it went on."""
    if len(spans) < 2:
        return spans
    same = np.abs(spans.start[1:] - spans.end[:-1]) < TOUCHING
    for column in (spans.state, spans.pack, spans.step):
        same &= column[1:] == column[:-1]
    first = np.flatnonzero(np.concatenate(([True], ~same)))
    return replace(spans.pick(first), seconds=np.add.reduceat(spans.seconds, first))


@dataclass(frozen=True, slots=True)
class Samples:
    """Rows of numbers as columns, `time` (Unix seconds) among them. A value that a row lacks or has as null is NaN."""

    columns: Mapping[str, Floats] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]]) -> Samples:
        """Columns from rows; what is no number in any row is left out."""
        names = dict.fromkeys(name for row in rows for name, value in row.items() if isinstance(value, int | float))
        return cls({name: np.array([_number(row.get(name)) for row in rows], dtype=np.float64) for name in names})

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def __getitem__(self, name: str) -> Floats:
        """One column; all NaN when no row has it."""
        return self.columns.get(name, np.full(len(self), np.nan))

    def where(self, name: str, value: float) -> Samples:
        """The rows in which a column has a value."""
        return self.pick(self[name] == value)

    def between(self, begin: float, end: float) -> Samples:
        """The rows sampled in a window of time."""
        return self.pick((self["time"] >= begin) & (self["time"] <= end))

    def pick(self, chosen: NDArray[Any]) -> Samples:
        """The rows that a mask or an index array chooses."""
        return Samples({name: column[chosen] for name, column in self.columns.items()})

    def joined(self, other: Samples) -> Samples:
        """The rows of both, one after the other."""
        if not len(other):
            return self
        names = dict.fromkeys((*self.columns, *other.columns))
        return Samples({name: np.concatenate((self[name], other[name])) for name in names})


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else np.nan


class SpanColumns:
    """Spans of one worker while its file is read piece by piece."""

    def __init__(self, worker: str) -> None:
        self._whole = Spans(
            worker=worker, role=worker.rsplit("-", 1)[0], rank=0, gpu=None, pid=None, lane_names=(), state_names=(),
            lane=np.zeros(0, np.int16), state=np.zeros(0, np.int16), start=np.zeros(0), seconds=np.zeros(0),
            pack=np.zeros(0, np.int64), step=np.zeros(0, np.int64),
        )  # fmt: skip
        self._began = 0.0
        self._lanes: dict[str, int] = {}
        self._states: dict[str, int] = {}

    @property
    def spans(self) -> Spans:
        """All spans so far."""
        return self._whole

    def add(self, lines: Iterable[Any]) -> None:
        """Take lines of the file: a start, then arrays of six; a count of dropped spans may stand between."""
        pieces: list[tuple[Any, ...]] = []
        rows: list[list[Any]] = []
        for line in lines:
            if isinstance(line, list):
                if len(line) == 6:
                    rows.append(line)
            elif isinstance(line, dict):
                pieces += self._columns(rows)
                rows = []
                self._take_header(line)
        pieces += self._columns(rows)
        if pieces:
            whole = self._whole
            before = (whole.lane, whole.state, whole.start, whole.seconds, whole.pack, whole.step)
            joined: list[Any] = [np.concatenate(columns) for columns in zip(before, *pieces, strict=True)]
            names = ("lane", "state", "start", "seconds", "pack", "step")
            self._whole = replace(
                whole, lane_names=tuple(self._lanes), state_names=tuple(self._states), **dict(zip(names, joined, strict=True))
            )

    def _take_header(self, line: Mapping[str, Any]) -> None:
        if line.get("kind") == "start":
            self._began = line["unix_ns"] / 1e9
            known = {name: line[name] for name in ("role", "rank", "gpu", "pid") if name in line}
            self._whole = replace(self._whole, starts=(*self._whole.starts, self._began), **known)
        elif line.get("kind") == "dropped":
            self._whole = replace(self._whole, dropped=self._whole.dropped + int(line.get("spans", 0)))

    def _columns(self, rows: list[list[Any]]) -> list[tuple[Any, ...]]:
        if not rows:
            return []
        lane, state, start, micros, pack, step = zip(*rows, strict=True)
        lanes, states = self._lanes, self._states
        return [
            (
                np.array([lanes.setdefault(name, len(lanes)) for name in lane], dtype=np.int16),
                np.array([states.setdefault(name, len(states)) for name in state], dtype=np.int16),
                np.array(start, dtype=np.float64) / 1e6 + self._began,
                np.array(micros, dtype=np.float64) / 1e6,
                np.array([-1 if value is None else value for value in pack], dtype=np.int64),
                np.array([-1 if value is None else value for value in step], dtype=np.int64),
            )
        ]
