"""A run's handle: whose process it is, and how a detached run is stopped, whatever it is doing, and nothing else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from launch_material import tiny_recipe
from typer.testing import CliRunner

from slipstream.cli.main import app
from slipstream.config import dump_recipe
from slipstream.errors import UsageError
from slipstream.launch.condition import condition_of
from slipstream.launch.handle import RunHandle, all_runs, find_run, read_handle, stop_run
from slipstream.runfolder import RunFolder
from slipstream.trainer.checkpoint import latest

PATIENCE_SECONDS = 120.0


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """A process that has nothing to do with the run."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def folder_with(root: Path, handle: RunHandle) -> RunFolder:
    root.mkdir()
    folder = RunFolder(root)
    handle.write(folder)
    folder.state.write_text(json.dumps({"status": "training", "step": 3, "steps": 9}))
    return folder


def handle_of(process: subprocess.Popen[bytes]) -> RunHandle:
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(") ")[2].split()
    return replace(RunHandle.of_this_process(), pid=process.pid, started_ticks=int(fields[19]))


def test_a_handle_is_read_back_and_its_process_found_alive(tmp_path: Path) -> None:
    own = RunHandle.of_this_process()
    folder = folder_with(tmp_path / "run", own)
    assert read_handle(folder) == own
    assert own.is_alive
    assert condition_of(folder).state == "training"


@pytest.mark.parametrize("change", [{"started_ticks": 1}, {"boot": "another"}, {"host": "elsewhere"}])
def test_a_process_that_only_has_the_same_number_is_left_alone(
    tmp_path: Path, bystander: subprocess.Popen[bytes], change: dict[str, Any]
) -> None:
    folder = folder_with(tmp_path / "run", replace(handle_of(bystander), **change))
    with pytest.raises(UsageError, match="run"):
        stop_run(folder, grace_seconds=0.1)
    time.sleep(0.2)
    assert bystander.poll() is None


def test_a_run_whose_process_is_gone_is_lost_and_cannot_be_stopped(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    folder = folder_with(tmp_path / "run", handle_of(process))
    process.kill()
    process.wait()
    found = condition_of(folder)
    assert (found.state, found.pid) == ("lost", None)
    assert "--resume" in found.health
    with pytest.raises(UsageError, match="is over"):
        stop_run(folder, grace_seconds=0.1)


def test_one_that_does_not_listen_is_killed_in_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.launch.handle.SECOND_SIGNAL_SECONDS", 0.3)
    program = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"deaf\n"
        said: list[str] = []
        folder = folder_with(tmp_path / "run", handle_of(process))
        assert stop_run(folder, grace_seconds=0.1, say=said.append) == "killed"
        assert process.wait(timeout=5) == -signal.SIGKILL
        assert len(said) == 2


def test_runs_are_found_by_path_and_by_name(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "first", RunHandle.of_this_process())
    assert find_run("first", runs=tmp_path) == folder
    assert find_run(str(folder.root), runs=tmp_path / "nowhere") == folder
    assert [one.root.name for one in all_runs(tmp_path)] == ["first"]
    with pytest.raises(UsageError, match="first"):
        find_run("second", runs=tmp_path)


def test_status_of_a_broken_folder_still_answers(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "run", RunHandle.of_this_process())
    folder.state.write_text('{"status": "trai')
    folder.metrics.write_text('{"kind": "train", "step": 0, "seconds": 0.5, "context_tokens": 100, "loss": 2.0}\n{"kind": "tr')
    found = condition_of(folder)
    assert (found.state, found.step, found.context_tokens_per_second) == ("starting", 1, 200.0)


def test_the_step_of_a_run_that_trains_is_that_of_its_metrics(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "run", RunHandle.of_this_process())
    line = {"kind": "train", "seconds": 0.5, "context_tokens": 100, "loss": 2.0}
    folder.metrics.write_text("".join(json.dumps({**line, "step": step}) + "\n" for step in range(7)))
    found = condition_of(folder)
    assert (found.step, found.steps, found.seconds_left) == (7, 9, 1.0)


def wait_until(ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not ready():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.05)


def lines_of(folder: RunFolder, kind: str) -> int:
    return folder.metrics.read_text().count(f'"kind": "{kind}"') if folder.metrics.is_file() else 0


MOMENTS: dict[str, tuple[dict[str, Any], Callable[[RunFolder], bool]]] = {
    "loads": ({}, lambda folder: folder.logs.joinpath("worker-0.log").is_file()),
    "trains": ({}, lambda folder: lines_of(folder, "train") >= 2),
    "validates": ({"validation__every_steps": 1}, lambda folder: lines_of(folder, "validation") >= 2),
    "checkpoints": ({"checkpoint__every_steps": 1}, lambda folder: latest(folder.checkpoints) is not None),
}
"""What a run spends most of its time with under these settings, and when it has come to it."""


@pytest.mark.parametrize(
    "moment", ["loads", "trains", *(pytest.param(name, marks=pytest.mark.slow) for name in ("validates", "checkpoints"))]
)
def test_a_detached_run_is_stopped_and_goes_on_later(
    material: dict[str, str], tmp_path: Path, bystander: subprocess.Popen[bytes], moment: str
) -> None:
    changes, reached = MOMENTS[moment]
    if moment == "validates":
        changes = {**changes, "validation__prompts": material["prompts"], "validation__max_new_tokens": 48}
    base = {"plan__epochs": 200, "placement__device": "cpu", "placement__mode": "colocated"}
    recipe = tiny_recipe(material, tmp_path / "runs", name="r", **{**base, **changes})
    file = tmp_path / "recipe.toml"
    file.write_text(dump_recipe(recipe))
    folder = RunFolder(tmp_path / "runs" / "r")
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "slipstream.cli.main", "train", str(file), "--detach", "--json"]
    started = json.loads(subprocess.run(command, env=environ, check=True, capture_output=True, text=True).stdout)
    handle = read_handle(folder)
    assert handle is not None
    assert handle.detached
    assert started["pid"] == handle.pid
    wait_until(lambda: reached(folder))
    if moment != "loads":
        assert condition_of(folder).state == "training"
    assert stop_run(folder, grace_seconds=60) == "in order"
    found = condition_of(folder)
    assert (found.state, found.pid) == ("interrupted", None)
    assert bystander.poll() is None
    if moment == "loads":
        assert "loaded" in found.health or "before training began" in found.health
    else:
        saved = latest(folder.checkpoints)
        assert saved is not None
        assert saved.name.endswith(str(found.step)), "the last step that was made is the one that was saved"
    shown = CliRunner().invoke(app, ["status", "r", "--runs", str(tmp_path / "runs"), "--json"])
    assert json.loads(shown.stdout)["state"] == "interrupted"
    log = CliRunner().invoke(app, ["logs", "r", "--runs", str(tmp_path / "runs"), "--worker", "supervisor", "-f"])
    assert log.exit_code == 0
    assert "supervisor: " in log.stdout
