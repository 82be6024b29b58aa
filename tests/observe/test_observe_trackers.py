"""Trackers, the real packages: what is written can be read back. Each runs in an interpreter of its own, which it changes."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from slipstream.observe.trackers import PACKAGES, missing_package, numbers

LINES = [
    {"kind": "start", "step": 0, "run": "words only"},
    {"kind": "train", "step": 0, "loss": 2.5, "accuracy_per_slot": [0.5, None, 0.25], "skipped": False},
    {"kind": "train", "step": 1, "loss": 2.0, "accuracy_per_slot": [0.75, None, 0.5], "skipped": True},
    {"kind": "validation", "step": 1, "acceptance_length": 1.5, "histogram": [3, 1]},
]
TAGS = {
    "train/loss": [2.5, 2.0],
    "train/accuracy_per_slot/1": [0.5, 0.75],
    "train/accuracy_per_slot/3": [0.25, 0.5],
    "train/skipped": [0.0, 1.0],
    "validation/acceptance_length": [1.5],
    "validation/histogram/0": [3.0],
    "validation/histogram/1": [1.0],
}
SCRIPT = """
import json, sys
from pathlib import Path
from slipstream.observe import RunFacts, open_metric_log
folder = Path(sys.argv[1])
facts = RunFacts(name="tracked", num_steps=2, metrics_path=folder / "m.jsonl", console_every_steps=1, folder=folder,
                 recipe={"plan": {"seed": 3}}, project="tests", wandb_mode="offline")
for _ in range(int(sys.argv[3])):
    with open_metric_log([sys.argv[2]], facts=facts) as log:
        for line in json.loads(sys.stdin.readline()):
            log.write(line)
    assert not any(log.failures.values()), log.failures
assert "torch" not in sys.modules and "tensorflow" not in sys.modules
"""


def track(sink: str, folder: Path, *, starts: int = 1) -> None:
    """Write `LINES` through a sink, as often as given."""
    home = {"HOME": str(folder / "home"), "TRACKIO_DIR": str(folder / "trackio"), "WANDB_ERROR_REPORTING": "false"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder), sink, str(starts)],
        input=(json.dumps(LINES) + "\n") * starts,
        env={**os.environ, **home},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "", "a program may read stdout"


def test_numbers_of_a_line_by_tag() -> None:
    found: dict[str, list[float]] = {}
    for line in LINES:
        for tag, value in numbers(line).items():
            found.setdefault(tag, []).append(value)
    assert found == TAGS


def test_every_package_is_there() -> None:
    assert [missing_package(sink) for sink in ("console", "jsonl", *PACKAGES)] == [None] * (2 + len(PACKAGES))


def test_a_package_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PACKAGES, "wandb", "no_such_package")  # type: ignore[arg-type]
    assert missing_package("wandb") == "no_such_package"


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    track("tensorboard", tmp_path)
    (file,) = (tmp_path / "tensorboard").iterdir()
    found: dict[str, list[float]] = {}
    steps: dict[str, list[int]] = {}
    for event in EventFileLoader(str(file)).Load():
        for value in event.summary.value:
            found.setdefault(value.tag, []).append(value.tensor.float_val[0])
            steps.setdefault(value.tag, []).append(event.step)
    assert found == TAGS
    assert steps["train/loss"] == [0, 1]
    assert steps["validation/acceptance_length"] == [1]


def test_wandb_offline_keeps_what_was_written_under_one_id(tmp_path: Path) -> None:
    track("wandb", tmp_path, starts=2)
    files = sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    name = (tmp_path / "wandb" / "run-id").read_text().strip()
    assert [file.name for file in files] == [f"run-{name}.wandb"] * 2
    content = files[0].read_bytes()
    for tag in TAGS:
        assert tag.split("/")[1].encode() in content, tag
    assert b"tracked" in content
    assert b"tests" in content


def test_trackio_keeps_what_was_written(tmp_path: Path) -> None:
    track("trackio", tmp_path)
    with sqlite3.connect(tmp_path / "trackio" / "tests.db") as database:
        rows = database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id").fetchall()
    found: dict[str, list[float]] = {}
    for name, _, metrics in rows:
        assert name == "tracked"
        for tag, value in json.loads(metrics).items():
            found.setdefault(tag, []).append(value)
    assert found == TAGS
    assert [step for _, step, _ in rows] == [0, 1, 1]
