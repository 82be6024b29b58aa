"""A run watched in a terminal: read on every second, judged every few, drawn when something changed or a key was pressed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rich.text import Text

from slipstream.report.reading import RunData, RunReader
from slipstream.report.terminal import WHOLE_RUN, View, frame
from slipstream.report.terminal_panels import Health
from slipstream.report.terminal_screen import END_OF_KEYS, Screen
from slipstream.report.terminal_text import fitted
from slipstream.report.verdict import Verdict, judge

REFRESH_SECONDS = 1.0
OVER_SECONDS = 3.0
"""A run that is over is looked at less often: somebody may resume it."""
LEAST_VERDICT_SECONDS = 300.0
"""The verdict looks back as far as the window does, but at least so far: few steps say little."""
JUDGE_SECONDS = 5.0
MOST_SHARE = 0.05
"""At most this share of the time goes into judging, and as much into reading and drawing: long runs are read less often."""


class Judge:
    """The verdict of a run that grows, made anew only when that is due: judging reads every span."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._verdict: Verdict | None = None
        self._of: tuple[float | None, int] = (None, -1)
        self._due = 0.0

    def verdict(self, run: RunData, *, seconds: float | None) -> Verdict:
        """Of the newest `seconds`, of the whole run where these hold too few steps; possibly a few seconds old."""
        window = None if seconds is None else max(seconds, LEAST_VERDICT_SECONDS)
        began = self._clock()
        now_of = (window, sum(map(len, run.spans.values())))
        if self._verdict is not None and (now_of == self._of or (window == self._of[0] and began < self._due)):
            return self._verdict
        found = judge(run, window=window)
        if found.window is None and window is not None:
            found = judge(run)
        self._verdict, self._of = found, now_of
        self._due = self._clock() + max(JUDGE_SECONDS, (self._clock() - began) / MOST_SHARE)
        return found


def draw_once(folder: Path, *, health: Health, width: int, height: int) -> list[Text]:
    """One frame of the overview as it is now. Raises `UsageError` when the folder holds no run."""
    run = RunReader(folder).refresh()
    view = _first_view(health)
    verdict = Judge().verdict(run, seconds=view.seconds)
    return frame(run, verdict=verdict, health=health, view=view, width=width, height=height).rows


def watch_run(folder: Path, *, screen: Screen, health: Callable[[], Health]) -> None:
    """Show a run until `q` is pressed. `health` says what its process does. Raises `UsageError` when there is no run."""
    reader, judged = RunReader(folder), Judge()
    with screen:
        width, height = screen.size
        screen.draw(fitted([Text(f" reads {folder} …", style="dim")], width=width, height=height))
        run, how = reader.refresh(), health()
        view, due = _first_view(how), 0.0
        while True:
            began, is_due = time.process_time(), time.monotonic() >= due
            if is_due:
                run, how = reader.refresh(), health()
            width, height = screen.size
            verdict = judged.verdict(run, seconds=view.seconds)
            shown = frame(run, verdict=verdict, health=how, view=view, width=width, height=height)
            screen.draw(shown.rows)
            if is_due:
                spent = time.process_time() - began
                due = time.monotonic() + max(OVER_SECONDS if how.over else REFRESH_SECONDS, spent / MOST_SHARE)
            view = replace(view, scrolled=min(view.scrolled, shown.furthest))
            for key in screen.wait(due - time.monotonic()):
                if key in ("q", "Q", END_OF_KEYS):
                    return
                view = view.after(key)


def _first_view(health: Health) -> View:
    """A run that is over is seen whole, one that goes on in its newest minute."""
    return View(window=WHOLE_RUN) if health.over else View()
