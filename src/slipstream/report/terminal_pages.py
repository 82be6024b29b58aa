"""The views of a run in a terminal: which panels stand where, and which give way when there is little room."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from rich.text import Text

from slipstream.report.reading import RunData
from slipstream.report.spans import Samples
from slipstream.report.terminal_lanes import Lane, lane_row, legend_in_words, legend_row, read_lanes
from slipstream.report.terminal_panels import curves, gpu_rows, queue_rows, verdict_in_full, verdict_rows
from slipstream.report.terminal_plots import Curve, curve_rows
from slipstream.report.terminal_text import beside, column_width, heading, window_name
from slipstream.report.verdict import Verdict

NARROW, WIDE = 60, 120
"""Below the first width lanes go without words; from the second on panels stand side by side."""
CURVE_CELLS, LARGE_CURVE_CELLS = 25, 38
LEAST_CURVE_ROWS, GOOD_CURVE_ROWS = 4, 9
MOST_LANE_LABEL = 16
TALLEST_LANE = 3


@dataclass(slots=True)
class Page:
    """What a view is drawn from. `seconds` is the window's length, none for the whole run; `scrolled` lines are skipped.

    `furthest` is how many lines can be skipped: a view that scrolls sets it.
    """

    run: RunData
    verdict: Verdict
    seconds: float | None
    curves_in_window: bool
    scrolled: int
    width: int
    furthest: int = 0

    @property
    def window(self) -> tuple[float, float]:
        """The window in Unix seconds; its end is the last thing known of the run."""
        begin, end = self.run.begin, self.run.end
        return (begin if self.seconds is None else end - self.seconds), end

    def scroll(self, rows: Sequence[Text], height: int) -> list[Text]:
        """The part of some rows that is looked at, with how many there are above and below it."""
        if len(rows) <= height:
            return list(rows)
        self.furthest = len(rows) - height + 1
        first = min(self.scrolled, self.furthest)
        shown = list(rows[first : first + height - 1])
        below = len(rows) - first - len(shown)
        return [*shown, Text(f"↑ {first} lines above, ↓ {below} below", style="dim")]


def overview(page: Page, height: int) -> list[Text]:
    """Everything in short. Where room is short, queues and GPUs go first, then curves."""
    lanes = _lane_panel(page, most=3 if height < 16 else max(4, height // 4))
    told_rows = 1 + (2 if height < 16 else 3 if height < 24 else height // 4)
    only_words = height - len(lanes) - told_rows < LEAST_CURVE_ROWS
    told = _verdict(page, height - len(lanes) if only_words else told_rows)
    left = height - len(told) - len(lanes)
    machine = _machine(page, min(left - LEAST_CURVE_ROWS - 1, max(4, height // 5)))
    left -= len(machine)
    drawn = _grid(page, width_each=CURVE_CELLS, most_columns=4, height=left) if left >= LEAST_CURVE_ROWS else []
    return [*told, *lanes, *drawn, *machine]


def all_curves(page: Page, height: int) -> list[Text]:
    """All curves, as large as they can be."""
    return _grid(page, width_each=LARGE_CURVE_CELLS, most_columns=3, height=height, least_rows=LEAST_CURVE_ROWS + 1)


def all_lanes(page: Page, height: int) -> list[Text]:
    """Every lane of every worker."""
    lanes, rows = _lanes(page, names=None)
    if not lanes:
        return [heading("lanes", width=page.width), Text(" no worker has written what it does", style="dim")]
    words = [Text(), *legend_in_words(lanes)]
    tall = max(1, min(TALLEST_LANE, (height - 1 - len(words)) // len(lanes)))
    if tall > 1:
        lanes, rows = _lanes(page, names=None, tall=tall)
    legend = words if height - 1 - len(rows) >= len(words) else [legend_row(lanes, width=page.width)]
    return [_lane_heading(page, lanes), *page.scroll(rows, height - 1 - len(legend)), *legend]


def whole_verdict(page: Page, height: int) -> list[Text]:
    """All findings with their advice, and the layouts that were predicted."""
    return [_verdict_heading(page), *page.scroll(verdict_in_full(page.verdict, width=page.width), height - 1)]


def machine(page: Page, height: int) -> list[Text]:
    """Queues and GPUs over the window."""
    queues, gpus = _sampled(page)
    rows = [heading("queues", width=page.width, told=window_name(page.seconds)), *queue_rows(queues, width=page.width)]
    if not len(queues):
        rows.append(Text(" no queue was sampled: in a colocated run nothing crosses processes", style="dim"))
    rows += [Text(), heading("GPUs", width=page.width, told=window_name(page.seconds)), *gpu_rows(gpus, width=page.width)]
    if not len(gpus):
        rows.append(Text(" no GPU was sampled", style="dim"))
    return page.scroll(rows, height)


VIEWS: Mapping[str, Callable[[Page, int], list[Text]]] = {
    "overview": overview,
    "curves": all_curves,
    "lanes": all_lanes,
    "verdict": whole_verdict,
    "machine": machine,
}
"""Every view, in the order of its key; each takes a page and its height and returns at most so many lines."""


def _verdict_heading(page: Page) -> Text:
    window = page.verdict.window
    told = "" if window is None else f"of {page.verdict.steps:,} steps in {window[1] - window[0]:,.0f} s"
    return heading("verdict", width=page.width, told=told)


def _verdict(page: Page, height: int) -> list[Text]:
    return [_verdict_heading(page), *verdict_rows(page.verdict, width=page.width, height=height - 1)]


def _lane_panel(page: Page, *, most: int) -> list[Text]:
    """Lanes of the workers' own threads, those of their GPUs too where all of both fit, then the legend."""
    if not page.run.spans:
        return []
    lanes, rows = _known(*_lanes(page, names=("cpu", "gpu")))
    if len(lanes) > most:
        lanes, rows = _known(*_lanes(page, names=("cpu",)))
    if len(lanes) > most:
        kept = _of_each_role(lanes, most - 1)
        hidden = Text(f"and {len(lanes) - len(kept)} more workers, see lanes (3)", style="dim")
        lanes, rows = [lanes[place] for place in kept], [*(rows[place] for place in kept), hidden]
    return [_lane_heading(page, lanes), *rows, legend_row(lanes, width=page.width)] if lanes else []


def _known(lanes: Sequence[Lane], rows: Sequence[Text]) -> tuple[list[Lane], list[Text]]:
    """Without those of workers that wrote nothing in the window: they are over, or not begun."""
    kept = [place for place, lane in enumerate(lanes) if lane.known_seconds > 0]
    return [lanes[place] for place in kept], [rows[place] for place in kept]


def _of_each_role(lanes: Sequence[Lane], most: int) -> list[int]:
    """Places of at most so many lanes, the first ones of every role in turn."""
    by_role: dict[str, list[int]] = {}
    for place, lane in enumerate(lanes):
        by_role.setdefault(lane.worker.rsplit("-", 1)[0], []).append(place)
    turns = [place for turn in zip_longest(*by_role.values()) for place in turn if place is not None]
    return sorted(turns[:most])


def _lanes(page: Page, *, names: Sequence[str] | None, tall: int = 1) -> tuple[list[Lane], list[Text]]:
    """Lanes of the window, and each as `tall` lines."""
    begin, end = page.window
    by_worker = [[name for name in spans.lane_names if names is None or name in names] for spans in page.run.spans.values()]
    several = any(len(own) > 1 for own in by_worker)
    longest = max((len(worker) for worker in page.run.spans), default=0) + (7 if several else 0)
    label = min(longest + 1, MOST_LANE_LABEL + 7)
    told = 0 if page.width < NARROW else max(27, page.width // 4)
    width = max(4, page.width - label - told)
    lanes = read_lanes(page.run, begin=begin, end=end, width=width, names=names)
    rows = []
    for number, lane in enumerate(lanes):
        same = number > 0 and lanes[number - 1].worker == lane.worker
        name = lane.lane if same else f"{lane.worker} {lane.lane}"
        text = f"{name:>{label - 1}}" if same else name
        rows.append(lane_row(lane, label=text if several else lane.worker, label_cells=label, told_cells=told))
        rows += [lane_row(lane, label="", label_cells=label, told_cells=0) for _ in range(tall - 1)]
    return lanes, rows


def _lane_heading(page: Page, lanes: Sequence[Lane]) -> Text:
    begin, end = page.window
    cell = (end - begin) / max(1, len(lanes[0].cells))
    told = f"a cell {cell:.3g} s, to {time.strftime('%H:%M:%S', time.localtime(end))}"
    return heading(f"lanes, {window_name(page.seconds)}", width=page.width, told=told)


def _grid(page: Page, *, width_each: int, most_columns: int, height: int, least_rows: int = GOOD_CURVE_ROWS) -> list[Text]:
    """Curves in rows and columns; those that would be too flat to be read are left out."""
    most_across, most_down = max(1, min(most_columns, page.width // width_each)), max(1, height // least_rows)
    seconds = page.seconds if page.curves_in_window else None
    found = curves(page.run, seconds=seconds, most=most_across * most_down)
    columns = min(most_across, len(found))
    down = min(most_down, -(-len(found) // columns))
    rows: list[Text] = []
    for number in range(down):
        part: list[Curve] = found[number * columns : (number + 1) * columns]
        each, tall = column_width(page.width, columns), height * (number + 1) // down - height * number // down
        blocks = [curve_rows(curve, width=each, height=tall) for curve in part]
        rows += beside([*blocks, *([[]] * (columns - len(part)))], width=page.width)
    return rows


def _machine(page: Page, height: int) -> list[Text]:
    """Queues and GPUs in at most so many lines, side by side where there is room for it."""
    queues, gpus = _sampled(page)
    if height < 2 or not (len(queues) or len(gpus)):
        return []
    if page.width < WIDE or not (len(queues) and len(gpus)):
        name = " and ".join(name for name, samples in (("queues", queues), ("GPUs", gpus)) if len(samples))
        waiting = queue_rows(queues, width=page.width)
        room = height - 1 - len(waiting)
        return [
            heading(name, width=page.width, told=window_name(page.seconds)),
            *_first(waiting, height - 1),
            *_gpus(gpus, width=page.width, height=room),
        ]
    each = column_width(page.width, 2)
    left = [heading("queues", width=each), *_first(queue_rows(queues, width=each), height - 1)]
    right = [heading("GPUs", width=each, told=window_name(page.seconds)), *_gpus(gpus, width=each, height=height - 1)]
    return beside([left, right], width=page.width)


def _gpus(gpus: Samples, *, width: int, height: int) -> list[Text]:
    """Each GPU, or their means where there is no room for each."""
    rows = gpu_rows(gpus, width=width)
    return rows if len(rows) <= height else gpu_rows(gpus, width=width, together=True)[: max(0, height)]


def _sampled(page: Page) -> tuple[Samples, Samples]:
    begin, end = page.window
    return page.run.queues.between(begin, end), page.run.gpus.between(begin, end)


def _first(rows: Sequence[Text], height: int) -> list[Text]:
    if len(rows) <= height:
        return list(rows)
    return [*rows[: height - 1], Text(f"and {len(rows) - height + 1} more, see machine (5)", style="dim")]
