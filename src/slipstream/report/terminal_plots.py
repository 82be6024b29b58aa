"""Curves in cells of text: braille dots, two wide and four high in a cell; eighths of a block for sparklines and bars."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from rich.text import Text

from slipstream.report.curves import bin_means
from slipstream.report.spans import Floats, Ints
from slipstream.report.terminal_text import fitted

EIGHTHS = " ▏▎▍▌▋▊▉█"
LEVELS = "▁▂▃▄▅▆▇█"
DOTS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]], dtype=np.uint8)
"""Bits of a braille cell by row and column, as Unicode numbers them from U+2800."""
LABEL_CELLS = 6
LEAST_ROWS_WITH_STEPS = 5
MARK = "●"


@dataclass(frozen=True, slots=True)
class Curve:
    """One value by the number of steps made: `steps` ascending, `values` with NaN where there is none; `marks` are points.

    Of the `titles`, longest first, the one that fits is shown. `colour` is the curve's, `short` writes a value in at most
    `LABEL_CELLS` cells; `from_zero` puts 0 at its foot.
    """

    titles: Sequence[str]
    steps: Ints
    values: Floats
    colour: str
    short: Callable[[float], str]
    marks: Sequence[tuple[float, float]] = field(default_factory=tuple)
    mark_colour: str = "#ff79c6"
    from_zero: bool = False

    @property
    def latest(self) -> float | None:
        """The newest value that is a number."""
        finite = self.values[np.isfinite(self.values)]
        return float(finite[-1]) if len(finite) else None


def curve_rows(curve: Curve, *, width: int, height: int) -> list[Text]:
    """A curve as `height` rows of `width` cells: its title with the newest value, the plot, and from five rows on the steps."""
    rows = [_title(curve, width)]
    with_steps = height >= LEAST_ROWS_WITH_STEPS
    plot_rows, plot_width = height - 1 - with_steps, width - LABEL_CELLS - 1
    known = np.isfinite(curve.values)
    if plot_rows < 1 or plot_width < 4:
        return fitted(rows, width=width, height=height)
    if not (known.any() or curve.marks):
        return fitted([*rows, Text("no value yet".center(width), style="dim")], width=width, height=height)
    seen = [*curve.steps[known].tolist(), *(step for step, _ in curve.marks)]
    first, last = float(min(seen)), float(max(seen))
    heights = _bins(curve, first=first, last=last, bins=2 * plot_width)
    low, high = _span([*heights[np.isfinite(heights)], *(value for _, value in curve.marks)])
    low = min(low, 0.0) if curve.from_zero else low
    cells = braille(heights, low=low, high=high, rows=plot_rows)
    for row in range(plot_rows):
        label = curve.short(high) if row == 0 else curve.short(low) if row == plot_rows - 1 else ""
        line = Text().append(f"{label:>{LABEL_CELLS}}{'┤' if label else '│'}", style="dim")
        rows.append(line.append_text(Text(cells[row], style=curve.colour)))
    for step, value in curve.marks:
        column = LABEL_CELLS + 1 + round((step - first) / max(last - first, 1) * (plot_width - 1))
        row = 1 + round((high - value) / max(high - low, 1e-12) * (plot_rows - 1))
        rows[row] = _marked(rows[row], column, style=f"bold {curve.mark_colour}")
    if with_steps:
        ends = f"{int(first):,}", f"{int(last):,}"
        gap = plot_width - len(ends[0]) - len(ends[1])
        steps = ends[0] + " " * gap + ends[1] if gap > 0 else ends[1].rjust(plot_width)[:plot_width]
        rows.append(Text(" " * (LABEL_CELLS + 1) + steps, style="dim"))
    return rows


def braille(heights: Floats, *, low: float, high: float, rows: int) -> list[str]:
    """Values as a line of dots, two to a cell of width, joined from each to the next; NaN leaves a gap."""
    dots = np.zeros((4 * rows, len(heights)), dtype=bool)
    place = (high - heights) / max(high - low, 1e-12) * (4 * rows - 1)
    before: int | None = None
    for column, value in enumerate(place):
        if not np.isfinite(value):
            before = None
            continue
        here = round(float(value))
        joined = here if before is None or before == here else before + 1 if before < here else before - 1
        dots[min(here, joined) : max(here, joined) + 1, column] = True
        before = here
    cells = dots.reshape(rows, 4, len(heights) // 2, 2).astype(np.uint8)
    codes = np.einsum("rdwc,dc->rw", cells, DOTS)
    return ["".join(chr(0x2800 + int(code)) for code in row) for row in codes]


def sparkline(values: Floats, *, width: int, low: float, high: float) -> str:
    """Means of the values over `width` cells as blocks between `low` and `high`; blank where there is none."""
    if not len(values) or width < 1:
        return " " * max(0, width)
    means = _resampled(values, width)
    share = np.clip((means - low) / max(high - low, 1e-12), 0, 1)
    levels = [" " if not np.isfinite(part) else LEVELS[min(7, int(part * 8))] for part in share]
    return "".join(levels)


def bar(share: float, *, width: int) -> str:
    """A share of `width` cells, to an eighth of a cell."""
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    whole, part = divmod(eighths, 8)
    return ("█" * whole + (EIGHTHS[part] if part else "")).ljust(width)[:width]


def _title(curve: Curve, width: int) -> Text:
    latest = curve.latest
    value = "" if latest is None else curve.short(latest)
    room = max(0, width - len(value) - 3)
    name = next((title for title in curve.titles if len(title) <= room), curve.titles[-1])[:room]
    line = Text().append(name, style="bold").append(" " + "─" * max(0, width - len(name) - len(value) - 2) + " ", style="dim")
    return line.append(value, style=f"bold {curve.colour}")


def _bins(curve: Curve, *, first: float, last: float, bins: int) -> Floats:
    """Means of the curve's values over bins of steps; bins between two values are bridged, those outside are NaN."""
    known = np.isfinite(curve.values)
    if not known.any():
        return np.full(bins, np.nan)
    steps, values = curve.steps[known].astype(np.float64), curve.values[known]
    place = np.minimum(((steps - first) / max(last - first, 1) * bins).astype(np.int64), bins - 1)
    count = np.bincount(place, minlength=bins)
    filled = np.flatnonzero(count)
    means = np.bincount(place, weights=values, minlength=bins)[filled] / count[filled]
    between = np.interp(np.arange(bins), filled, means, left=np.nan, right=np.nan)
    return np.asarray(between, dtype=np.float64)


def _resampled(values: Floats, width: int) -> Floats:
    """`width` values: means of as many when there are more, each repeated when there are fewer."""
    if len(values) <= width:
        return values[np.arange(width) * len(values) // width]
    edges = np.arange(width + 1) * len(values) // width
    widest = int(np.diff(edges).max())
    padded = np.full((width, widest), np.nan)
    for row in range(width):
        part = values[edges[row] : edges[row + 1]]
        padded[row, : len(part)] = part
    return bin_means(padded.reshape(-1), widest)


def _span(values: Sequence[float] | Floats) -> tuple[float, float]:
    """Least and largest of some values; of equal ones, room around them."""
    low, high = float(min(values)), float(max(values))
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-9):
        room = abs(low) * 0.05 or 1.0
        return low - room, high + room
    return low, high


def _marked(row: Text, column: int, *, style: str) -> Text:
    return row[:column].append(MARK, style=style).append_text(row[column + 1 :]) if column < len(row) else row
