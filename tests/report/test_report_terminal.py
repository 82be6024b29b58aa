"""The view of a run in a terminal, without one: frames of fixed sizes, cells of lanes and curves, keys, missing files."""

from __future__ import annotations

import io
import json
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text
from run_maker import make_run
from typer.testing import CliRunner

from slipstream.cli.main import app
from slipstream.report.reading import read_run
from slipstream.report.terminal import NAMES, WHOLE_RUN, WINDOWS, View, frame
from slipstream.report.terminal_lanes import UNKNOWN, WAIT, WORK, read_lanes, take_turns
from slipstream.report.terminal_live import Judge
from slipstream.report.terminal_panels import Health
from slipstream.report.terminal_plots import Curve, bar, braille, curve_rows, sparkline
from slipstream.report.terminal_screen import split_keys
from slipstream.report.terminal_text import beside, cut, duration, fitted, short
from slipstream.runfolder import RunFolder

SIZES = [(80, 24), (200, 50), (120, 30), (60, 14), (40, 10), (30, 8), (20, 5), (9, 2)]
EIGHT = (*(f"target-{rank}" for rank in range(6)), "drafter-0", "drafter-1")
FOUR = ("target-0", "target-1", "drafter-0", "drafter-1")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "made"
    return make_run(folder, steps=400, validate_every=100, checkpoint_every=150, workers=FOUR, status="training").root


def shown(folder: Path, *, width: int, height: int, view: View | None = None, health: Health | None = None) -> list[str]:
    """The frame as plain lines, after a rich console of that size has drawn it."""
    run, view = read_run(folder), view or View()
    verdict = Judge().verdict(run, seconds=view.seconds)
    how = health or Health(str(run.state.get("status", "starting")))
    rows = frame(run, verdict=verdict, health=how, view=view, width=width, height=height).rows
    assert len(rows) == height
    assert all(row.cell_len <= width for row in rows)
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True, highlight=False)
    for row in rows:
        console.print(row)
    assert console.file.getvalue().count("\n") == height, "a line was wrapped"  # type: ignore[attr-defined]
    return [row.plain for row in rows]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_every_view_fits_every_size(made: Path, name: str, width: int, height: int) -> None:
    for window in (0, WHOLE_RUN):
        lines = shown(made, width=width, height=height, view=View(name=name, window=window))
        assert "made" in lines[0]
        if (width, height) >= (60, 14):
            assert name in lines[-1]


@pytest.mark.parametrize(("width", "height"), SIZES[:3])
def test_the_overview_has_every_part(made: Path, width: int, height: int) -> None:
    lines = shown(made, width=width, height=height)
    text = "\n".join(lines)
    assert "● training" in lines[0]
    assert "step 400/400" in lines[0]
    assert "left 0:00:00" in lines[0]
    for part in (
        "verdict",
        "tokens/s: drafters wait",
        "lanes, last 60 s",
        "target-1",
        "drafter-1",
        "wait_input",
        "rank 0",
        "GPUs",
    ):
        assert part in text, part
    for curve in ("tokens/s ─", "loss ─", "● validated"):
        assert curve in text, curve
    assert any(0x2800 < ord(character) < 0x2900 for character in text)
    assert sum(line.count(WORK) + line.count(WAIT) for line in lines if line.startswith(("target", "drafter"))) > 150


def test_where_workers_are_many_each_role_is_seen(tmp_path: Path) -> None:
    run = make_run(tmp_path / "big", steps=120, workers=EIGHT, packs_per_step=12)
    lines = shown(run.root, width=80, height=24)
    assert [line.split()[0] for line in lines if line.startswith(("target", "drafter"))] == list(FOUR)
    assert "and 4 more workers, see lanes (3)" in lines
    assert any(line.startswith("8 GPUs ") for line in lines)
    whole = shown(run.root, width=80, height=16, view=View(name="lanes"))
    assert "↑ 0 lines above" in whole[-3]
    scrolled = shown(run.root, width=80, height=16, view=View(name="lanes", scrolled=99))
    assert "0 below" in scrolled[-3]
    assert any(line.startswith("drafter-1") for line in scrolled)
    tall = shown(run.root, width=200, height=50, view=View(name="lanes"))
    assert any("Waits for hidden states." in line for line in tall)


def test_a_worker_that_is_over_leaves_the_overview(tmp_path: Path) -> None:
    run = make_run(tmp_path / "made", steps=400, workers=("target-0", "drafter-0"))
    rows = (run.spans / "target-0.jsonl").read_text().splitlines(keepends=True)
    cpu = [row for row in rows if not row.startswith('["gpu"')]
    (run.spans / "answers.jsonl").write_text("".join(cpu[:20]).replace("target-0", "answers"))
    for name, seen in (("overview", False), ("lanes", True)):
        lines = shown(run.root, width=80, height=30, view=View(name))
        assert any(line.startswith("answers") for line in lines) is seen
    assert any(line.startswith("answers cpu") and line.rstrip().endswith("nothing written") for line in lines)
    for worker in ("target-0", "drafter-0"):
        spans = (run.spans / f"{worker}.jsonl").read_text().splitlines(keepends=True)
        (run.spans / f"{worker}.jsonl").write_text("".join(row for row in spans if not row.startswith('["gpu"')))
    lines = shown(run.root, width=80, height=24)
    assert any(re.match("target-0  [█▒]", line) for line in lines), "one lane needs no name"


def test_a_run_that_has_not_begun_has_its_parts_once_they_are_there(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "soon")
    folder.root.mkdir()
    folder.process.write_text("{}")
    for name in NAMES:
        assert "starting" in shown(folder.root, width=80, height=24, view=View(name=name))[0]
    folder.state.write_text(json.dumps({"status": "starting", "step": 0, "steps": None}))
    lines = shown(folder.root, width=80, height=24)
    text = "\n".join(lines)
    assert "step 0/?" in lines[0]
    assert "no step was made yet" in text
    assert "too few steps to judge" in text
    assert text.count("no value yet") == 3
    assert "lanes," not in text
    assert "queues" not in text


@pytest.mark.parametrize(
    ("missing", "gone"),
    [
        ("queues.jsonl", "rank 0"), ("gpus.jsonl", "% busy"), ("spans", "lanes,"), ("metrics.jsonl", "validated 1."),
        ("recipe.toml", None), ("prediction.json", "predicted before"), ("accounts", None), ("environment.jsonl", None),
        ("state.json", None),
    ],
)  # fmt: skip
def test_what_has_no_file_is_left_out(made: Path, tmp_path: Path, missing: str, gone: str | None) -> None:
    folder = tmp_path / "made"
    shutil.copytree(made, folder)
    path = folder / missing
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    text = "\n".join(line for name in NAMES for line in shown(folder, width=120, height=40, view=View(name=name)))
    assert gone is None or gone not in text
    assert gone is None or gone in "\n".join(shown(made, width=120, height=40))


def test_a_run_that_was_lost_or_failed_says_why(made: Path) -> None:
    lines = shown(made, width=80, height=24, health=Health("lost", "its process is gone without a word; " + "so " * 60))
    assert "● lost" in lines[0]
    assert "left" not in lines[0]
    assert lines[3].startswith(" its process is gone without a word")
    assert lines[4].endswith("…")


def test_curves_of_the_window_are_of_its_steps(made: Path) -> None:
    whole = shown(made, width=80, height=24, view=View("curves"))
    recent = shown(made, width=80, height=24, view=View("curves", window=0, curves_in_window=True))
    ends = lambda lines: next(line.split() for line in lines[4:] if line.strip() and line.split()[0].isdigit())  # noqa: E731
    assert ends(whole)[:2] == ["1", "400"]
    assert 360 < int(ends(recent)[0]) < 375


def test_a_long_run_is_drawn_in_little_time(long_run: Path) -> None:
    run = read_run(long_run)
    verdict = Judge().verdict(run, seconds=60.0)
    began = time.process_time()
    for name in NAMES:
        frame(run, verdict=verdict, health=Health("training"), view=View(name), width=200, height=50)
    assert time.process_time() - began < 2.0


def test_states_take_turns_in_proportion() -> None:
    cells = take_turns(np.array([[0.7] * 100, [0.3] * 100]), known=np.ones(100))
    assert cells.count(0) == 70
    assert max(len(run) for run in "".join(map(str, cells)).split("1")) <= 4, "they alternate"
    table = np.zeros((3, 10))
    table[0, :4], table[1, 4:6], table[2, 6:] = 1.0, 1.0, 1.0
    assert take_turns(table, known=np.ones(10)) == [0] * 4 + [1] * 2 + [2] * 4
    assert take_turns(table, known=np.array([0.0, 0.2] + [1.0] * 8))[:3] == [UNKNOWN, UNKNOWN, 0]
    assert take_turns(np.zeros((1, 3)), known=np.zeros(3)) == [UNKNOWN] * 3


def test_lanes_hold_the_seconds_of_their_window(made: Path) -> None:
    run = read_run(made)
    begin, end = run.end - 50, run.end
    lanes = read_lanes(run, begin=begin, end=end, width=70)
    assert [(lane.worker, lane.lane) for lane in lanes][:3] == [("target-0", "gpu"), ("target-0", "cpu"), ("target-1", "gpu")]
    for lane in lanes:
        spans = run.spans[lane.worker].of_lane(lane.lane).between(begin, end)
        for state, seconds in spans.seconds_by_state().items():
            assert lane.seconds[state] == pytest.approx(seconds, abs=1e-4)
        assert lane.known_seconds <= 50 + 1e-3
        assert sum(share for _, share in lane.shares()) == pytest.approx(1, abs=0.03)
    before = read_lanes(run, begin=run.begin - 100, end=run.begin + 100, width=10, names=("cpu",))
    assert before[0].cells[:5] == [None] * 5
    assert None not in before[0].cells[5:]


def test_braille_joins_the_dots() -> None:
    assert braille(np.array([3.0, 2.0, 1.0, 0.0]), low=0, high=3, rows=1) == ["⠑⢄"]
    assert braille(np.array([0.0, 3.0]), low=0, high=3, rows=1) == ["⡸"]
    assert braille(np.array([0.0, np.nan, np.nan, 3.0]), low=0, high=3, rows=1) == ["⡀⠈"]
    rows = braille(np.linspace(0, 1, 40), low=0, high=1, rows=5)
    assert [len(row) for row in rows] == [20] * 5
    assert rows[0].startswith("⠀" * 15)
    assert rows[4].endswith("⠀" * 15)


def curve(values: list[float], **more: object) -> Curve:
    steps = np.arange(1, len(values) + 1, dtype=np.int64)
    return Curve(titles=("the loss", "l"), steps=steps, values=np.array(values), colour="red", short=short, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("values", [[], [np.nan], [2.0], [2.0, 2.0], [0.0, 0.0, 0.0], [np.nan, 1.0, np.nan], [3e9, -1.0]])
@pytest.mark.parametrize(("width", "height"), [(40, 9), (25, 4), (8, 3), (12, 1)])
def test_curves_fit_whatever_they_are_of(values: list[float], width: int, height: int) -> None:
    rows = curve_rows(curve(values), width=width, height=height)
    assert len(rows) == height
    assert all(row.cell_len <= width for row in rows)


def test_a_curve_has_its_title_range_steps_and_marks() -> None:
    rows = [row.plain for row in curve_rows(curve([4.0, 3.0, 2.0], marks=[(3, 5.0)]), width=30, height=7)]
    assert rows[0].startswith("the loss ─")
    assert rows[0].endswith(" 2")
    assert rows[1].startswith("     5┤")
    assert rows[1].endswith("●")
    assert rows[5].startswith("     2┤")
    assert rows[6].split() == ["1", "3"]
    assert curve_rows(curve([4.0, 3.0], from_zero=True), width=30, height=7)[5].plain.startswith("     0┤")
    assert curve_rows(curve([4.0]), width=9, height=3)[0].plain.startswith("l ")


def test_bars_and_sparklines() -> None:
    assert bar(0.5, width=8) == "████    "
    assert bar(1 / 16, width=8) == "▌       "
    assert bar(7, width=2) == "██"
    assert sparkline(np.array([0.0, 0.5, np.nan, 1.0]), width=4, low=0, high=1) == "▁▅ █"
    assert sparkline(np.array([0.0, 1.0]), width=4, low=0, high=1) == "▁▁██"
    assert sparkline(np.arange(8.0), width=2, low=0, high=8) == "▂▆"
    assert sparkline(np.zeros(0), width=3, low=0, high=1) == "   "


@given(st.floats(min_value=0, max_value=1e15, allow_nan=False))
def test_numbers_are_short(value: float) -> None:
    assert len(short(value)) <= 6


def test_numbers_and_times_as_people_read_them() -> None:
    assert [short(value) for value in (15_930, 2_300_000, 9e9, 812.34, 3.14159, 0.0123, 0.0006, 6e-5, 0)] == [
        "15.9K", "2.3M", "9.0G", "812.3", "3.14", "0.0123", "0.0006", "6e-05", "0",
    ]  # fmt: skip
    assert [duration(seconds) for seconds in (59, 3661, 90061)] == ["0:00:59", "1:01:01", "1d 1:01:01"]


def test_lines_are_fitted_joined_and_cut() -> None:
    rows = fitted([Text("四四四四"), Text("a")], width=5, height=3)
    assert [row.cell_len <= 5 for row in rows] == [True] * 3
    assert [row.plain for row in beside([[Text("ab")], [Text("c"), Text("d")]], width=8)] == ["ab   c  ", "     d  "]
    assert [row.plain for row in cut([Text("one"), Text("two"), Text("three")], width=5, height=2)] == ["one", "two …"]


def test_keys_lead_from_view_to_view() -> None:
    view = View()
    assert view.after("tab").name == "curves"
    assert view.after("back_tab").name == NAMES[-1]
    assert view.after("5").after("tab").name == "overview"
    assert [view.after("-").seconds, view.after("+").seconds] == [WINDOWS[0], WINDOWS[2]]
    longest = view
    for _ in range(10):
        longest = longest.after("+")
    assert longest.seconds is None
    assert view.after("c").curves_in_window
    assert view.after("down").after("down").after("up").scrolled == 1
    assert view.after("down").after("3").scrolled == 0
    assert all(view.after(key) == view for key in ("x", "9", "0", "é", "²", "up"))


def test_keys_are_told_from_what_a_terminal_sends() -> None:
    assert split_keys("q\x1b[A\x1b[Z\t+\x1bOB") == ["q", "up", "back_tab", "tab", "+", "down"]
    assert split_keys("\x1b[15~a\x1b[1;5Cb\x1b") == ["a", "b"]


def test_a_verdict_is_made_anew_when_it_is_due(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, now, windows = read_run(made), [0.0], []
    real: Callable[..., object] = __import__("slipstream.report.verdict", fromlist=["judge"]).judge

    def counting(run: object, *, window: float | None = None) -> object:
        windows.append(window)
        return real(run, window=window)

    monkeypatch.setattr("slipstream.report.terminal_live.judge", counting)
    judged = Judge(clock=lambda: now[0])
    first = judged.verdict(run, seconds=60.0)
    assert judged.verdict(run, seconds=60.0) is first
    assert judged.verdict(run, seconds=15.0) is first, "both look back as far as a verdict must"
    assert windows == [300.0]
    judged.verdict(run, seconds=None)
    assert windows == [300.0, None]
    now[0] = 100.0
    assert judged.verdict(run, seconds=None).window is not None
    assert windows == [300.0, None], "nothing new was written"


def test_a_window_with_too_few_steps_is_judged_by_the_whole_run(tmp_path: Path) -> None:
    slow = read_run(make_run(tmp_path / "slow", steps=40, seconds_per_step=400.0).root)
    assert Judge().verdict(slow, seconds=60.0).steps > 20


def invoke(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "90", "LINES": "24"})
    return result.exit_code, result.stdout, result.stderr


def test_the_command_prints_once_and_takes_a_name(made: Path) -> None:
    code, out, _ = invoke("watch", "made", "--runs", made.parent, "--once")
    lines = out.splitlines()
    assert (code, len(lines)) == (0, 24)
    assert max(map(len, lines)) <= 90
    assert "made" in lines[0]
    assert "● lost" in lines[0] or "● training" in lines[0]


def test_the_command_refuses_what_it_cannot_do(made: Path, tmp_path: Path) -> None:
    code, _, error = invoke("watch", made)
    assert (code, "--once prints the view" in error) == (2, True)
    code, _, error = invoke("watch", "none", "--runs", made.parent)
    assert (code, "made" in error) == (2, True)
    assert invoke("watch", made, "--port", 80)[0] == 2
    assert invoke("watch", made, "--web", "--once")[0] == 2
