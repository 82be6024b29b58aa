"""A run as a terminal shows it: one frame of lines for a given size, and the keys that lead from one view to another.

A frame has exactly as many lines as the terminal, none wider than it. What a run has no file for is left out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rich.text import Text

from slipstream.report.reading import RunData
from slipstream.report.terminal_pages import VIEWS, Page
from slipstream.report.terminal_panels import Health, figures_row, progress_row, title_row
from slipstream.report.terminal_text import apart, cut, fitted, window_name, wrapped
from slipstream.report.verdict import Verdict

NAMES = tuple(VIEWS)
WINDOWS: tuple[float | None, ...] = (15, 60, 300, 900, 3600, None)
"""Seconds that lanes, queues and GPUs look back; none for the whole run."""
ONE_MINUTE, WHOLE_RUN = WINDOWS.index(60), WINDOWS.index(None)
LEAST_WIDTH, LEAST_HEIGHT = 30, 8


@dataclass(frozen=True, slots=True)
class View:
    """What is looked at: a name of `VIEWS`, an index into `WINDOWS`, whether curves keep to the window, lines scrolled by."""

    name: str = NAMES[0]
    window: int = ONE_MINUTE
    curves_in_window: bool = False
    scrolled: int = 0

    @property
    def seconds(self) -> float | None:
        """Length of the window; none for the whole run."""
        return WINDOWS[self.window]

    def after(self, key: str) -> View:
        """The view that a key leads to; the same when it means nothing."""
        place = NAMES.index(self.name)
        if key in ("tab", "right"):
            return replace(self, name=NAMES[(place + 1) % len(NAMES)], scrolled=0)
        if key in ("back_tab", "left"):
            return replace(self, name=NAMES[place - 1], scrolled=0)
        if key.isdecimal() and 1 <= int(key) <= len(NAMES):
            return replace(self, name=NAMES[int(key) - 1], scrolled=0)
        if key in ("+", "="):
            return replace(self, window=min(self.window + 1, len(WINDOWS) - 1))
        if key == "-":
            return replace(self, window=max(self.window - 1, 0))
        if key == "c":
            return replace(self, curves_in_window=not self.curves_in_window)
        if key in ("down", "j"):
            return replace(self, scrolled=self.scrolled + 1)
        if key in ("up", "k"):
            return replace(self, scrolled=max(0, self.scrolled - 1))
        return self


@dataclass(frozen=True, slots=True)
class Frame:
    """What is shown: as many lines as the terminal has, none wider; and by how many lines the view can be scrolled at most."""

    rows: list[Text]
    furthest: int = 0


def frame(run: RunData, *, verdict: Verdict, health: Health, view: View, width: int, height: int) -> Frame:
    """One frame of `height` lines of at most `width` cells."""
    title = title_row(run, health=health, width=width)
    if width < LEAST_WIDTH or height < LEAST_HEIGHT:
        told = Text(f"enlarge to {LEAST_WIDTH} x {LEAST_HEIGHT}", style="dim")
        return Frame(fitted([title, told], width=width, height=height))
    head = [title, progress_row(run, width=width), figures_row(run, width=width)]
    if health.sentence != "well":
        said = [Text(line, style="bold yellow") for line in wrapped(f" {health.sentence}", width, hanging=" ")]
        head += cut(said, width=width, height=2)
    page = Page(
        run=run,
        verdict=verdict,
        seconds=view.seconds,
        curves_in_window=view.curves_in_window,
        scrolled=view.scrolled,
        width=width,
    )
    body = VIEWS[view.name](page, height - len(head) - 1)
    rows = fitted([*head, *body], width=width, height=height - 1)
    return Frame([*rows, *fitted([_keys(view, width=width)], width=width, height=1)], furthest=page.furthest)


def _keys(view: View, *, width: int) -> Text:
    """The last line: views by number, the one that is shown marked; then what other keys do, as far as they fit."""
    row = Text()
    for number, name in enumerate(NAMES, start=1):
        row.append(f" {number} ", style="dim").append(name, style="bold reverse" if name == view.name else "")
    window, curves = f"± {window_name(view.seconds)}", "window" if view.curves_in_window else "run"
    for parts in ((window, f"c curves of {curves}", "↑↓ scroll", "q quit"), (window, "q quit"), ("q quit",)):
        right = Text("  ".join(parts), style="dim")
        if row.cell_len + right.cell_len + 1 <= width:
            return apart(row, right, width=width)
    return row
