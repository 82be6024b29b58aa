"""What a run says of itself: `state.json`, metrics, validations."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from slipstream.config import make_recipe
from slipstream.errors import PreflightError
from slipstream.launch.runbook import RunBook
from slipstream.runfolder import RunFolder

RECIPE = make_recipe({"name": "told", "target": {"model": "t"}, "corpus": {"path": "c"}, "observe": {"sinks": ["jsonl"]}})


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "told")
    folder.create()
    return folder


def state(folder: RunFolder) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(folder.state.read_text())
    return content


def lines(folder: RunFolder) -> list[dict[str, Any]]:
    return [json.loads(line) for line in folder.metrics.read_text().splitlines()]


def test_the_state_from_start_to_end(folder: RunFolder) -> None:
    book = RunBook(folder=folder, recipe=RECIPE, on_report=None)
    book.state("starting")
    assert state(folder) | {"time": 0} == {
        "status": "starting",
        "step": 0,
        "steps": None,
        "cause": None,
        "restarts": 0,
        "rejected_seals": 0,
        "pid": os.getpid(),
        "time": 0,
    }
    book.begin(start_step=4, num_steps=9)
    assert (state(folder)["status"], state(folder)["step"], state(folder)["steps"]) == ("training", 4, 9)
    book.take("drafter-0", "record", {"kind": "train", "step": 6, "loss": 1.0})
    book.take("drafter-0", "record", {"kind": "train", "step": 5, "loss": 1.0})
    book.state("failed", cause="the reason")
    assert (state(folder)["status"], state(folder)["step"], state(folder)["cause"]) == ("failed", 6, "the reason")
    book.state("finished", step=9)
    assert (state(folder)["status"], state(folder)["step"], state(folder)["cause"]) == ("finished", 9, None)
    book.close()


def test_the_state_is_replaced_whole(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever interrupts the writing, what is read is one state or the other."""
    book = RunBook(folder=folder, recipe=RECIPE, on_report=None)
    book.state("starting")
    written: list[str] = []

    def full(path: Path, text: str) -> int:
        written.append(path.name)
        with path.open("w") as file:
            file.write(text[: len(text) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space"):
        book.state("training")
    assert written
    assert written[0] != folder.state.name
    assert state(folder)["status"] == "starting"


def test_records_go_to_the_sinks_and_validations_are_collected(folder: RunFolder) -> None:
    heard: list[tuple[str, str, Any]] = []
    book = RunBook(folder=folder, recipe=RECIPE, on_report=lambda *report: heard.append(report))
    book.begin(start_step=0, num_steps=2)
    first = {"kind": "validation", "step": 0, "acceptance_length": 1.5}
    book.take("drafter-0", "record", first)
    book.take("drafter-0", "record", {"kind": "train", "step": 1, "loss": 2.0})
    book.take("drafter-0", "ready", {"parameters": 3})
    book.close()
    assert book.validations == [first]
    assert lines(folder) == [first, {"kind": "train", "step": 1, "loss": 2.0}]
    assert [kind for _, kind, _ in heard] == ["record", "record", "ready"]


def test_a_restart_is_counted_and_written(folder: RunFolder) -> None:
    book = RunBook(folder=folder, recipe=RECIPE, on_report=None)
    book.begin(start_step=0, num_steps=9)
    book.take("drafter-0", "record", {"kind": "train", "step": 3, "loss": 1.0})
    book.take("target-1", "restart", {"attempt": 1})
    book.close()
    assert state(folder)["status"] == "training"
    assert state(folder)["restarts"] == 1
    assert lines(folder)[-1] == {"kind": "restart", "step": 3, "worker": "target-1", "attempt": 1}


def test_late_work_of_a_target_is_told_and_written_at_the_step_of_training(
    folder: RunFolder, caplog: pytest.LogCaptureFixture
) -> None:
    book = RunBook(folder=folder, recipe=RECIPE, on_report=None)
    book.begin(start_step=5, num_steps=9)
    late = {"pack": 40, "recompiles": 1, "names": ["graph 3/0"]}
    with caplog.at_level(logging.WARNING):
        book.take("target-1", "late_work", late)
    book.close()
    assert "target-1 compiled or allocated something after warm-up" in caplog.text
    assert lines(folder) == [{"kind": "late_work", "step": 5, "worker": "target-1", **late}]


def test_rows_that_were_not_finite_are_told(folder: RunFolder, caplog: pytest.LogCaptureFixture) -> None:
    book = RunBook(folder=folder, recipe=RECIPE, on_report=None)
    book.begin(start_step=5, num_steps=9)
    with caplog.at_level(logging.WARNING):
        book.take("target-0", "done", {"packs": 12, "bad_rows": 0})
        book.take("drafter-0", "done", {"step": 9, "status": "finished"})
    assert caplog.text == ""
    assert lines(folder) == []
    with caplog.at_level(logging.WARNING):
        book.take("target-1", "done", {"packs": 12, "bad_rows": 7})
    book.close()
    assert "target-1 made 7 hidden-state rows that are not finite" in caplog.text
    assert lines(folder) == [{"kind": "bad_rows", "step": 5, "worker": "target-1", "rows": 7}]


def test_a_sink_that_does_not_start_stops_the_run(folder: RunFolder) -> None:
    folder.metrics.mkdir()
    book = RunBook(folder=folder, recipe=RECIPE, on_report=None)
    with pytest.raises(PreflightError, match=r"observe.sinks = 'jsonl': this sink does not start"):
        book.begin(start_step=0, num_steps=1)


def test_a_failure_is_logged_with_its_worker(folder: RunFolder, caplog: pytest.LogCaptureFixture) -> None:
    book = RunBook(folder=folder, recipe=RECIPE, on_report=None)
    book.take("target-0", "failed", {"kind": "TargetError", "message": "is damaged"})
    assert "target-0 failed: TargetError: is damaged" in caplog.text
