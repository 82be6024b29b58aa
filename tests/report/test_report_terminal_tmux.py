"""`slipstream watch` in a real terminal: drawn at two sizes, resized while the run goes on, left by a key."""

from __future__ import annotations

import json
import re
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from rich.cells import cell_len
from run_maker import make_run
from tmux import TMUX, Terminal

from slipstream.launch.handle import RunHandle
from slipstream.runfolder import RunFolder

pytestmark = [pytest.mark.terminal, pytest.mark.skipif(TMUX is None, reason="no tmux is on PATH")]

WATCH = [sys.executable, "-c", "from slipstream.cli.main import run; run()", "watch"]
WORKERS = ("target-0", "target-1", "drafter-0", "drafter-1")
STEPS = 200
STATUS = r"step (\d+)/200"
SUM = re.compile(r"\d+ \d+")


class Growing:
    """A run of 200 steps that is written share by share, supervised by this process."""

    def __init__(self, folder: Path) -> None:
        began = time.time() - 110
        whole = make_run(folder / "whole", steps=STEPS, began=began, workers=WORKERS, validate_every=40)
        self.run: RunFolder = make_run(folder / "live", steps=0, began=began, workers=WORKERS)
        names = [whole.metrics, whole.queues, whole.gpus, *whole.spans.iterdir(), *whole.accounts.iterdir()]
        self._lines = {path.relative_to(whole.root): path.read_text().splitlines(keepends=True) for path in names}
        self._written = dict.fromkeys(self._lines, 0)
        for name in self._lines:
            (self.run.root / name).write_text("")
        RunHandle.of_this_process().write(self.run)

    def grow(self, share: float, *, status: str = "training") -> int:
        """Write up to that share of each file and say so in state.json; the step."""
        for name, lines in self._lines.items():
            upto = int(len(lines) * share)
            with (self.run.root / name).open("a") as file:
                file.writelines(lines[self._written[name] : upto])
            self._written[name] = upto
        step = int(STEPS * share)
        state = {"status": status, "step": step - 1, "steps": STEPS, "cause": None, "restarts": 0, "time": time.time()}
        self.run.state.write_text(json.dumps(state))
        return step


@pytest.fixture
def growing(tmp_path: Path) -> Growing:
    return Growing(tmp_path)


def step_of(lines: list[str]) -> int:
    found = re.search(STATUS, lines[0])
    return int(found.group(1)) if found else -1


def check_frame(lines: list[str], *, width: int, height: int) -> None:
    """All parts in their order, and nothing wider or taller than the terminal."""
    assert len(lines) == height
    assert max(map(cell_len, lines)) == width, "the frame spans the terminal and no more"
    text = "\n".join(lines)
    order = ["live", "tokens/s", "─ verdict", "─ lanes, last 60 s", "loss ─", "─ queues", "1 overview"]
    assert "wait_input" in text
    places = [text.index(part) for part in order]
    assert places == sorted(places)
    assert "q quit" in lines[-1]
    for worker in WORKERS:
        row = next(line for line in lines if line.startswith(worker))
        assert len(re.findall("[█▒·]", row)) > width / 3, row
        assert re.search(r"\d+% work", row)


def is_view(lines: list[str], *, begins: str, holds: str, height: int) -> bool:
    """Whether the part below the head is that view, whole."""
    whole = len(lines) == height and lines[-1].endswith("q quit")
    return whole and lines[3].startswith(begins) and holds in "\n".join(lines)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 50)])
def test_a_run_is_watched_resized_and_left(growing: Growing, tmp_path: Path, width: int, height: int) -> None:
    growing.grow(0.5)
    with Terminal(tmp_path, width=width, height=height) as terminal:
        terminal.run(["stty", "-g"], then=" | cksum")
        settings = next(filter(SUM.fullmatch, terminal.wait_for(lambda lines: any(map(SUM.fullmatch, lines)))))
        terminal.run([*WATCH, "live", "--runs", str(tmp_path)], then="; echo code=$?; stty -g | cksum")
        lines = terminal.wait_for("tokens/s: ")
        check_frame(lines, width=width, height=height)
        assert "● training" in lines[0]
        assert "left 0:00:" in lines[0]
        first = step_of(lines)
        assert 95 <= first <= 100
        colours = set(re.findall(r"38;5;(\d+)m[█▒]", "\n".join(terminal.lines(colours=True))))
        assert len(colours) >= 5, "lanes are coloured by state"

        growing.grow(0.75)
        lines = terminal.wait_for(lambda lines: step_of(lines) > first)
        check_frame(lines, width=width, height=height)
        other_width, other_height = (200, 50) if width == 80 else (80, 24)
        terminal.resize(width=other_width, height=other_height)
        terminal.wait_for(lambda lines: len(lines) == other_height and lines[-1].endswith("q quit"), seconds=5)
        check_frame(terminal.lines(), width=other_width, height=other_height)
        terminal.resize(width=width, height=height)

        for begins, holds in (
            ("tokens/s ─", "gradient norm"),
            ("─ lanes", " gpu "),
            ("─ verdict", "1. "),
            ("─ queues", "GPU 3"),
        ):
            terminal.type("Tab")
            seen = partial(is_view, begins=begins, holds=holds, height=height)
            assert max(map(cell_len, terminal.wait_for(seen, seconds=5))) <= width
        terminal.type("1", "+")
        assert "lanes, last 5 min" in "\n".join(terminal.wait_for("last 5 min", seconds=5))
        growing.grow(1.0, status="finished")
        lines = terminal.wait_for("● finished")
        assert step_of(lines) == 200
        assert terminal.in_other_screen
        terminal.type("q")
        lines = terminal.wait_for(lambda lines: any(SUM.fullmatch(line) for line in lines[3:]))
        assert "code=0" in lines
        assert not terminal.in_other_screen
        assert lines.count(settings) == 2, "the terminal is as it was"


def test_a_run_that_was_lost_is_said_to_be(growing: Growing, tmp_path: Path) -> None:
    growing.grow(0.6)
    replace(RunHandle.of_this_process(), started_ticks=1).write(growing.run)
    with Terminal(tmp_path, width=80, height=24) as terminal:
        terminal.run([*WATCH, str(growing.run.root)], then="; echo code=$?")
        lines = terminal.wait_for("● lost")
        assert "its process is gone without a word" in "\n".join(lines)
        assert "lanes, whole run" in "\n".join(lines)
        terminal.type("C-c")
        terminal.wait_for(lambda lines: "code=0" in lines)


def test_a_run_is_waited_for_and_stopping_gives_the_terminal_back(growing: Growing, tmp_path: Path) -> None:
    growing.run.state.write_text(json.dumps({"status": "starting", "step": 0, "steps": None}))
    for path in (growing.run.spans, growing.run.accounts):
        for file in path.iterdir():
            file.unlink()
    with Terminal(tmp_path, width=80, height=24) as terminal:
        terminal.run(["bash", "--norc"])
        terminal.run([*WATCH, "live", "--runs", str(tmp_path)])
        lines = terminal.wait_for("● starting")
        assert "no step was made yet" in "\n".join(lines)
        terminal.type("C-z")
        terminal.wait_for(lambda lines: any("Stopped" in line for line in lines))
        assert not terminal.in_other_screen
        terminal.run(["fg"])
        terminal.wait_for("● starting")
        growing.grow(0.3)
        terminal.wait_for("● training")
        terminal.wait_for("lanes, last 60 s")
        terminal.type("q")
        terminal.wait_for("Stopped")
        terminal.run(["echo"], then=" code=$?")  # of fg, so of the command
        terminal.wait_for(lambda lines: "code=0" in lines)
