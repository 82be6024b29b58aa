"""What `--resume` accepts and refuses, who may hold a run, and a name that is not taken by a start that was refused."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launch_material import tiny_recipe

from slipstream.config import dump_recipe, make_recipe
from slipstream.errors import CheckpointError, PlanError, PreflightError
from slipstream.launch import local
from slipstream.launch.local import train_run
from slipstream.launch.lock import LOCK_FILE, RunLock
from slipstream.launch.preflight import preflight
from slipstream.launch.resume import check_same_recipe, finished_steps
from slipstream.plan import Schedule
from slipstream.plan.throughput import StageCosts
from slipstream.runfolder import RunFolder

RAW: dict[str, Any] = {"name": "r", "target": {"model": "t"}, "corpus": {"path": "c"}}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    file = tmp_path / "recipe.toml"
    file.write_text(dump_recipe(make_recipe(RAW)))
    return file


def changed(key: str, value: object) -> dict[str, Any]:
    section, _, name = key.partition(".")
    return {**RAW, section: {**RAW.get(section, {}), name: value}}


@pytest.mark.parametrize(
    ("key", "value", "before"),
    [
        ("target.dtype", "float32", "bfloat16"),
        ("target.num_taps", 3, 5),
        ("target.packing", "alone", "auto"),
        ("plan.epochs", 7, 6),
        ("plan.max_steps", 10, None),
        ("plan.seed", 1, 0),
        ("drafter.num_layers", 2, 5),
        ("drafter.warm_start", "elsewhere", None),
        ("objective.decay_gamma", 4.0, 7.0),
        ("optimizer.lr", 1e-3, 6e-4),
        ("plan.replay_distance", 60, 50),
        ("placement.slot_dtype", "float8_e4m3", "target"),
    ],
)
def test_a_key_that_decides_the_weights_is_refused(saved: Path, key: str, value: object, before: object) -> None:
    with pytest.raises(CheckpointError) as caught:
        check_same_recipe(recipe=make_recipe(changed(key, value)), saved=saved)
    assert (caught.value.key, caught.value.value) == (key, value)
    assert f"was started with {before}" in str(caught.value)
    assert str(saved.parent) in caught.value.hint


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("placement.mode", "colocated"),
        ("placement.target_workers", 3),
        ("observe.sinks", ["jsonl"]),
        ("checkpoint.keep", 9),
        ("validation.prompts", "others.jsonl"),
        ("validation.max_new_tokens", 32),
        ("target.model", "moved/t"),
        ("corpus.path", "moved/c"),
        ("plan.allow_lossy_replays", True),
    ],
)
def test_what_may_change_between_two_starts(saved: Path, key: str, value: object) -> None:
    check_same_recipe(recipe=make_recipe(changed(key, value)), saved=saved)


def test_whether_a_run_has_finished(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert finished_steps(folder) is None
    folder.state.write_text(json.dumps({"status": "interrupted", "steps": 12}))
    assert finished_steps(folder) is None
    folder.state.write_text(json.dumps({"status": "finished", "steps": 12}))
    assert finished_steps(folder) == 12
    folder.state.write_text('{"status"')
    with pytest.raises(CheckpointError, match=r"state.json': is damaged"):
        finished_steps(folder)


# ---- the lock


def test_a_second_start_is_refused_with_the_number_of_the_first(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "busy")
    folder.create()
    script = "import sys; from slipstream.launch.lock import RunLock; from slipstream.runfolder import RunFolder; "
    script += (
        "from pathlib import Path\nwith RunLock(RunFolder(Path(sys.argv[1]))): print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script, str(folder.root)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        with pytest.raises(PreflightError, match=f"name = 'busy': process {first.pid} is training it"), RunLock(folder):
            pass
        first.kill()
    with RunLock(folder):
        assert json.loads((folder.root / LOCK_FILE).read_text())["pid"] == os.getpid()


def test_workers_hold_the_lock_of_a_supervisor_that_was_killed(tmp_path: Path) -> None:
    """An open descriptor in any process keeps it: a run is not continued beside workers of its last start."""
    folder = RunFolder(tmp_path)
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True, check=True)
    with RunLock(folder) as lock:
        kept = os.dup(lock.fd)
        os.ftruncate(kept, 0)
        os.pwrite(kept, json.dumps({"pid": int(gone.stdout), "host": os.uname().nodename}).encode(), 0)
    with pytest.raises(PreflightError, match=r"is gone, its workers are still ending .*half a minute"), RunLock(folder):
        pass
    os.close(kept)
    with RunLock(folder):
        pass


# ---- train_run, up to where children would start


class Started(Exception):
    """Raised in the place of the first child."""


@pytest.fixture
def no_children(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    jobs: list[dict[str, Any]] = []

    def refuse(**arguments: Any) -> None:
        jobs.append(arguments)
        raise Started

    monkeypatch.setattr(local, "start_child", refuse)
    return jobs


def test_a_start_that_cannot_be_planned_leaves_the_name_free(
    material: dict[str, str], tmp_path: Path, no_children: list[dict[str, Any]]
) -> None:
    impossible = tiny_recipe(material, tmp_path, name="again", plan__replays=16, plan__replay_distance=200)
    with pytest.raises(PlanError, match=r"plan\.replays = 16"):
        train_run(flight=preflight(impossible))
    crowded = tiny_recipe(material, tmp_path, name="again", placement__host_memory_gb=1e-6)
    with pytest.raises(PlanError, match=r"placement\.host_memory_gb"):
        train_run(flight=preflight(crowded))
    assert json.loads((tmp_path / "again" / "state.json").read_text())["status"] == "failed"
    with pytest.raises(Started):
        train_run(flight=preflight(tiny_recipe(material, tmp_path, name="again", plan__seed=5)))
    assert (tmp_path / "again" / "recipe.toml").is_file()


def test_a_run_that_is_being_trained_is_not_started_again(
    material: dict[str, str], tmp_path: Path, no_children: list[dict[str, Any]]
) -> None:
    flight = preflight(tiny_recipe(material, tmp_path, name="twice"))
    flight.folder.create()
    with RunLock(flight.folder), pytest.raises(PreflightError, match=f"process {os.getpid()} is training it"):
        train_run(flight=flight)
    assert not no_children
    assert not flight.folder.state.exists()


def test_resume_without_a_checkpoint_says_so_and_begins_anew(
    material: dict[str, str], tmp_path: Path, no_children: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    recipe = tiny_recipe(material, tmp_path, name="early")
    with pytest.raises(Started):
        train_run(flight=preflight(recipe))
    assert "no checkpoint" not in caplog.text
    with pytest.raises(Started):
        train_run(flight=preflight(recipe, resume=True))
    assert "early has no checkpoint yet: it starts again at step 0" in caplog.text
    assert no_children[-1]["job"]["start_step"] == 0
    assert no_children[-1]["job"]["checkpoint"] is None


@pytest.mark.parametrize(("step", "replays", "costs"), [(40, 2, None), (40, 2, 0.5), (0, 2, 0.5), (40, 1, 0.5)])
def test_a_resume_says_what_it_makes_again(
    material: dict[str, str],
    tmp_path: Path,
    no_children: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    step: int,
    replays: int,
    costs: float | None,
) -> None:
    recipe = tiny_recipe(
        material, tmp_path, name="again", plan__replays=replays, plan__epochs=8, plan__replay_distance=10,
        placement__mode="split", placement__target_workers=2,
    )  # fmt: skip
    with pytest.raises(Started):
        train_run(flight=preflight(recipe))
    known = None if costs is None else StageCosts(costs, drafter_seconds_per_use=1, tokens_per_pack=1)
    monkeypatch.setattr(local, "known_costs", lambda subject: known)
    monkeypatch.setattr(local, "latest", lambda folder: folder / "step")
    monkeypatch.setattr(local, "_cursor_step", lambda checkpoint, digest: step)
    with caplog.at_level(logging.INFO, logger="slipstream"), pytest.raises(Started):
        train_run(flight=preflight(recipe, resume=True))
    written = [json.loads(line) for line in (tmp_path / "again" / "metrics.jsonl").read_text().splitlines()]
    live = len(Schedule.load(tmp_path / "again" / "schedule").live_packs(step))
    assert (live > 0) == (step > 0 and replays > 1)
    line: dict[str, Any] = {"kind": "refill", "step": step, "packs": live}
    if costs is not None:
        line["predicted_seconds"] = -(-live // 2) * costs
    assert [{**found, "time": None} for found in written] == ([{**line, "time": None}] if live else [])
    assert (f"resumed at step {step}: {live} packs are made again first" in caplog.text) == (live > 0)


def test_children_inherit_the_lock(material: dict[str, str], tmp_path: Path, no_children: list[dict[str, Any]]) -> None:
    recipe = tiny_recipe(material, tmp_path, name="locked", validation__prompts=material["prompts"])
    with pytest.raises(Started):
        train_run(flight=preflight(recipe))
    with pytest.raises(Started):
        train_run(flight=preflight(tiny_recipe(material, tmp_path, name="held")))
    assert [arguments["name"] for arguments in no_children] == ["answers", "drafter-0"]
    assert all(arguments["descriptors"]["lock"] > 2 for arguments in no_children)


def test_a_finished_run_is_not_resumed(material: dict[str, str], tmp_path: Path, no_children: list[dict[str, Any]]) -> None:
    recipe = tiny_recipe(material, tmp_path, name="over")
    with pytest.raises(Started):
        train_run(flight=preflight(recipe))
    flight = preflight(recipe, resume=True)
    flight.folder.state.write_text(json.dumps({"status": "finished", "steps": 12}))
    with pytest.raises(PreflightError, match=r"resume = 'over': all 12 steps of this run are done \(slipstream export"):
        train_run(flight=flight)
    longer = preflight(tiny_recipe(material, tmp_path, name="over", plan__epochs=9), resume=True)
    with pytest.raises(CheckpointError, match=r"plan.epochs = 9: the run to resume was started with 2"):
        train_run(flight=longer)
    assert json.loads(flight.folder.state.read_text())["status"] == "finished"


def test_the_lock_is_the_kernels(tmp_path: Path) -> None:
    with RunLock(RunFolder(tmp_path)), (tmp_path / LOCK_FILE).open() as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
