"""Bars of long commands: on a terminal a bar with the time left, elsewhere lines now and then, nothing when quiet."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from slipstream.cli.progress import LINE_SECONDS, Bars


class Shown:
    """Bars on a console of 100 cells, with a clock that is set by hand."""

    def __init__(self, *, terminal: bool, quiet: bool = False) -> None:
        self.file, self.now = io.StringIO(), 0.0
        console = Console(file=self.file, force_terminal=terminal, width=100, highlight=False)
        self.bars = Bars(quiet=quiet, console=console, clock=lambda: self.now)

    @property
    def text(self) -> str:
        return self.file.getvalue()


def test_a_terminal_has_a_bar_for_each_stage() -> None:
    shown = Shown(terminal=True)
    with shown.bars as bars:
        bars("prepare", 0, None)
        bars("prepare", 50, 100, "12 kept [so far]")
        bars("prepare", 100, 100)
        bars("answers", 1, 4)
        bars("answers", 4, 4)
    last = shown.text[shown.text.rindex("prepare") :]
    assert "100%" in last
    assert "━━━" in last
    assert "12 kept [so far]" in last, "a text stays until another comes"
    assert "4/4" in last
    assert shown.text.rstrip().endswith("\x1b[?25h"), "the cursor is given back"


def test_the_cursor_comes_back_after_an_error() -> None:
    shown = Shown(terminal=True)

    def fail() -> None:
        with shown.bars as bars:
            bars("prepare", 1, 2)
            raise ValueError("a mistake")

    with pytest.raises(ValueError, match="a mistake"):
        fail()
    assert shown.text.count("\x1b[?25l") == shown.text.count("\x1b[?25h") == 1


def test_elsewhere_a_line_comes_now_and_then_with_the_time_left() -> None:
    shown = Shown(terminal=False)
    with shown.bars as bars:
        for done in range(20, 101):
            bars("answers", done, 100)
            shown.now += 1.0
        bars("answers", 100, 100)
        bars("export", 0, 4, "reads")
        bars("export", 4, 4, "done")
    every = int(LINE_SECONDS)
    lines = shown.text.splitlines()
    assert lines[0] == f"answers: {20 + every}/100, left 0:01:05"
    assert lines[1] == f"answers: {20 + 2 * every}/100, left 0:00:50"
    assert lines[-2:] == ["answers: 100/100", "export: 100%, done"]
    assert len(lines) == 80 // every + 2


def test_quiet_bars_show_nothing() -> None:
    for terminal in (True, False):
        shown = Shown(terminal=terminal, quiet=True)
        with shown.bars as bars:
            bars("answers", 1, 1)
        assert shown.text == ""


def test_lines_of_the_command_go_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    shown = Shown(terminal=True)
    with shown.bars as bars:
        bars("runs", 0, 2)
        bars.say("seed 0: 3.1 [x]")
    assert capsys.readouterr().out == "seed 0: 3.1 [x]\n"
    assert "seed 0" not in shown.text


def test_bars_begin_anew_after_they_were_closed() -> None:
    shown = Shown(terminal=True)
    bars = shown.bars
    bars("answers", 1, 1)
    bars.close()
    before = shown.text
    bars("export", 0, 1)
    bars.close()
    assert "answers" not in shown.text[len(before) :]
