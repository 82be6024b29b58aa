"""Lanes in cells of text: what each worker did over a window of time, one cell a moment, and its shares in numbers.

A cell has one state. Where many fit into its time, they take turns from cell to cell in proportion to their seconds, so that
the colours of a lane mix as its time does. Work is solid, waiting hatched, idle a dot: a lane is read without colours too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from rich.text import Text

from slipstream.observe.states import IDLE, STATES, is_wait
from slipstream.report.lanes import LANE_ORDER
from slipstream.report.reading import RunData
from slipstream.report.spans import Floats, Spans
from slipstream.report.times import split_by_kind, worker_order

WORK, WAIT, NOTHING = "█", "▒", "·"
SMALL_SHARE = 0.005
UNKNOWN = -1
"""The code of a cell in which nothing is known of the worker: before it began, or not written yet."""


@dataclass(frozen=True, slots=True)
class Lane:
    """One lane of one worker over a window: `seconds` by state, of them `known_seconds` in all, and `cells` as states."""

    worker: str
    lane: str
    gpu: int | None
    seconds: Mapping[str, float]
    cells: Sequence[str | None]

    @property
    def known_seconds(self) -> float:
        """Seconds of the window that the lane covers."""
        return sum(self.seconds.values())

    def shares(self) -> list[tuple[str, float]]:
        """States and their shares of what is known, the largest first."""
        total = self.known_seconds
        found = [(state, seconds / total) for state, seconds in self.seconds.items()] if total else []
        return sorted((pair for pair in found if pair[1] >= SMALL_SHARE), key=lambda pair: -pair[1])


def read_lanes(run: RunData, *, begin: float, end: float, width: int, names: Sequence[str] | None = None) -> list[Lane]:
    """The lanes of all workers between two Unix times, in `width` cells; `names` chooses among a worker's lanes."""
    found = []
    for spans in sorted(run.spans.values(), key=lambda spans: worker_order(spans.worker)):
        for name in sorted(spans.lane_names, key=_lane_place):
            if names is not None and name not in names:
                continue
            lane = spans.of_lane(name)
            if len(lane):
                found.append(_lane(lane, name=name, begin=begin, end=end, width=width))
    return found


def lane_row(lane: Lane, *, label: str, label_cells: int, told_cells: int) -> Text:
    """A lane as one line: label, cells, and its largest shares in words."""
    row = Text(f"{label[: label_cells - 1]:<{label_cells}}")
    for state, count in _runs(lane.cells):
        row.append(glyph(state) * count, style=colour(state))
    return row.append_text(told_shares(lane, width=told_cells)) if told_cells > 0 else row


def told_shares(lane: Lane, *, width: int) -> Text:
    """As many of a lane's shares as fit: how much it worked, then its states by size."""
    row = Text()
    if lane.known_seconds <= 0:
        return row.append(" nothing written".ljust(width)[:width], style="dim")
    kinds = split_by_kind(dict(lane.seconds))
    row.append(f" {kinds['work']:4.0%}", style="bold")
    row.append(" work", style="dim")
    for state, share in _waits_first(lane.shares()):
        part = f"  {state} {share:.0%}"
        if len(row) + len(part) > width:
            break
        row.append(part, style=colour(state) if is_wait(state) or state == IDLE else "dim")
    return row


def legend_row(lanes: Sequence[Lane], *, width: int) -> Text:
    """The states that these lanes show, in the table's order; where room is short, those that take most time."""
    seconds: dict[str, float] = {}
    for lane in lanes:
        for state in {state for state in lane.cells if state is not None}:
            seconds[state] = seconds.get(state, 0.0) + lane.seconds.get(state, 0.0)
    room, chosen = width + 2, set()
    for state in sorted(seconds, key=lambda state: -seconds[state]):
        if len(state) + 4 <= room:
            room -= len(state) + 4
            chosen.add(state)
    row = Text()
    for state in (*STATES, *sorted(chosen - set(STATES))):
        if state in chosen:
            row.append(glyph(state), style=colour(state)).append(f" {state}  ", style="dim")
    row.rstrip()
    return row


def legend_in_words(lanes: Sequence[Lane]) -> list[Text]:
    """A line for each state that these lanes show: what it means."""
    shown = {state for lane in lanes for state in lane.cells if state is not None}
    rows = []
    for state in (*STATES, *sorted(shown - set(STATES))):
        if state in shown:
            known = STATES.get(state)
            row = Text(" ").append(glyph(state) * 3, style=colour(state)).append(f" {state:<17}")
            rows.append(row.append(known.sentence if known else "No table knows it.", style="dim"))
    return rows


def glyph(state: str | None) -> str:
    """The cell of a state: solid for work, hatched for waits, a dot for idle, blank where nothing is known."""
    return " " if state is None else NOTHING if state == IDLE else WAIT if is_wait(state) else WORK


def colour(state: str | None) -> str:
    """The state's colour on a dark ground; grey for a name that no table knows."""
    known = STATES.get(state) if state is not None else None
    return known.dark if known is not None else "grey50"


def _lane(lane: Spans, *, name: str, begin: float, end: float, width: int) -> Lane:
    inside = lane.between(begin, end)
    edges = np.linspace(0.0, end - begin, width + 1)
    by_state = np.stack(
        [_seconds_in(inside.pick(inside.state == code), edges + begin) for code in range(len(lane.state_names))]
    )
    known_from, known_to = float(lane.start.min()), float(lane.end.max())
    if lane.starts:
        known_from = min(known_from, lane.starts[0])
    known = np.clip(np.minimum(edges[1:] + begin, known_to) - np.maximum(edges[:-1] + begin, known_from), 0, None)
    rest = np.clip(known - by_state.sum(axis=0), 0, None)
    names = [*lane.state_names, IDLE]
    table = np.concatenate((by_state, rest[None]))
    cells = [None if code == UNKNOWN else names[code] for code in take_turns(table, known=known)]
    seconds: dict[str, float] = {}
    for state, total in zip(names, table.sum(axis=1).tolist(), strict=True):
        if total > 0:
            seconds[state] = seconds.get(state, 0.0) + total
    return Lane(worker=lane.worker, lane=name, gpu=lane.gpu, seconds=seconds, cells=cells)


def take_turns(table: Floats, *, known: Floats) -> list[int]:
    """One row of the table (states x cells, in seconds) for each cell: the one that is owed most; it then owes what it got.

    Cells of which less than half is known are `UNKNOWN`. So a state's number of cells follows its share of the seconds.
    """
    width = table.shape[1]
    cell_seconds = float(known.max()) if width else 0.0
    owed = np.zeros(len(table))
    chosen = []
    for cell in range(width):
        owed += table[:, cell]
        if known[cell] < cell_seconds / 2 or cell_seconds == 0:
            chosen.append(UNKNOWN)
            continue
        code = int(np.argmax(np.where(table[:, cell] > 0, owed, -np.inf)))
        owed[code] -= known[cell]
        owed = np.clip(owed, -cell_seconds, cell_seconds)
        chosen.append(code)
    return chosen


def _seconds_in(spans: Spans, edges: Floats) -> Floats:
    """Seconds that spans cover between each two edges; they may overlap."""
    origin = edges[0]
    starts, ends = np.sort(spans.start - origin), np.sort(spans.end - origin)
    marks = edges - origin
    return np.diff(_begun(starts, marks) - _begun(ends, marks))


def _begun(times: Floats, marks: Floats) -> Floats:
    """For each mark the sum of the time since every one of `times` (ascending) that lies before it."""
    count = np.searchsorted(times, marks)
    total = np.concatenate(([0.0], np.cumsum(times)))
    return np.asarray(marks * count - total[count], dtype=np.float64)


def _runs(cells: Sequence[str | None]) -> list[tuple[str | None, int]]:
    """Cells in a row of one state, with their number."""
    found: list[tuple[str | None, int]] = []
    for state in cells:
        if found and found[-1][0] == state:
            found[-1] = (state, found[-1][1] + 1)
        else:
            found.append((state, 1))
    return found


def _waits_first(shares: list[tuple[str, float]]) -> list[tuple[str, float]]:
    return sorted(shares, key=lambda pair: not (is_wait(pair[0]) or pair[0] == IDLE))


def _lane_place(name: str) -> int:
    return LANE_ORDER.index(name) if name in LANE_ORDER else len(LANE_ORDER)
