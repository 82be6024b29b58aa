"""Laws 3, 4, 11 and 12 on whole runs: what may vary without changing a single bit, and what is left behind after a death.

Every run here replays packs, so that each cut falls into the middle of replays.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from launch_material import tiny_recipe
from safetensors.torch import load_file

from slipstream.config import Recipe
from slipstream.errors import Interrupted, WorkerFailed
from slipstream.launch import local
from slipstream.launch.local import RunResult, train_run
from slipstream.launch.preflight import preflight
from slipstream.launch.processes import Child, start_child
from slipstream.trainer.checkpoint import latest

REPLAYED = {"plan__replays": 2, "plan__replay_distance": 10, "checkpoint__every_steps": 12, "checkpoint__keep": 9}


def state_of(run: Path, *, step: int | None = None) -> dict[str, torch.Tensor]:
    """Weights, moments and counts of a run's checkpoint."""
    folder = latest(run / "checkpoints") if step is None else run / "checkpoints" / f"step-{step:06d}"
    assert folder is not None
    return {f"{file.name}:{name}": t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def assert_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    different = [name for name in left if not torch.equal(left[name], right[name])]
    assert not different, different


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[Child]:
    """Handles of the children that the run under test starts, in order."""
    handles: list[Child] = []

    def recording(**arguments: Any) -> Child:
        handles.append(start_child(**arguments))
        return handles[-1]

    monkeypatch.setattr(local, "start_child", recording)
    return handles


def run(recipe: Recipe, *, resume: bool = False, on_report: Any = None) -> RunResult:
    return train_run(flight=preflight(recipe, resume=resume), on_report=on_report)


@pytest.fixture(scope="module")
def reference(material: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """One target worker, one drafter rank, nothing disturbed."""
    runs = tmp_path_factory.mktemp("reference")
    result = run(tiny_recipe(material, runs, name="reference", **REPLAYED))
    assert result.steps > 30, "the cuts below lie in the middle"
    state = state_of(result.folder)
    assert all(torch.isfinite(tensor).all() for tensor in state.values() if tensor.is_floating_point())
    return state


def test_colocated_equals_split(material: dict[str, str], tmp_path: Path, reference: dict[str, torch.Tensor]) -> None:
    result = run(tiny_recipe(material, tmp_path, name="colocated", placement__mode="colocated", **REPLAYED))
    assert_equal(state_of(result.folder), reference)


def test_two_ranks_of_one_pack_equal_one_rank_of_two(
    material: dict[str, str], tmp_path: Path, reference: dict[str, torch.Tensor]
) -> None:
    result = run(tiny_recipe(material, tmp_path, name="ranks", placement__drafter_ranks=2, **REPLAYED))
    assert_equal(state_of(result.folder), reference)


def test_three_jittering_workers_and_one_killed_change_nothing(
    material: dict[str, str], tmp_path: Path, reference: dict[str, torch.Tensor], children: list[Child]
) -> None:
    """Workers are stopped and continued at random by their handles, and one is killed in mid-run and restarted."""
    over = threading.Event()
    seen: list[str] = []

    def jitter() -> None:
        generator = torch.Generator().manual_seed(3)
        while not over.wait(0.01):
            targets = [child for child in children if child.name.startswith("target") and child.alive]
            if targets:
                chosen = targets[int(torch.randint(len(targets), (1,), generator=generator))]
                chosen.process.send_signal(signal.SIGSTOP)
                over.wait(float(torch.rand(1, generator=generator)) * 0.05)
                chosen.process.send_signal(signal.SIGCONT)

    def on_report(worker: str, kind: str, payload: Any) -> None:
        seen.append(f"{worker} {kind}")
        if kind == "record" and payload["kind"] == "train" and payload["step"] == 8:
            next(child for child in children if child.name == "target-1").process.kill()

    thread = threading.Thread(target=jitter)
    thread.start()
    try:
        recipe = tiny_recipe(material, tmp_path, name="jitter", placement__target_workers=3, **REPLAYED)
        result = run(recipe, on_report=on_report)
    finally:
        over.set()
        thread.join()
    assert "target-1 restart" in seen
    assert sum(child.name == "target-1" for child in children) == 2
    assert_equal(state_of(result.folder), reference)


def test_a_target_worker_that_hangs_is_started_again_and_changes_nothing(
    material: dict[str, str], tmp_path: Path, reference: dict[str, torch.Tensor], children: list[Child]
) -> None:
    """Stopped in mid-run and never continued: it neither ends nor says a word, as one whose GPU or disk does not answer."""

    def on_report(worker: str, kind: str, payload: Any) -> None:
        if kind == "record" and payload["kind"] == "train" and payload["step"] == 8:
            next(child for child in children if child.name == "target-0").process.send_signal(signal.SIGSTOP)

    recipe = tiny_recipe(material, tmp_path, name="hung", placement__stall_seconds=5.0, **REPLAYED)
    result = run(recipe, on_report=on_report)
    hung, again = (child for child in children if child.name == "target-0")
    assert hung.process.returncode == -signal.SIGKILL
    assert "longer than placement.stall_seconds = 5" in str(hung.failure)
    assert again.process.returncode == 0
    assert_equal(state_of(result.folder), reference)


def test_a_drafter_that_hangs_ends_the_run_and_resume_goes_on(
    material: dict[str, str], tmp_path: Path, reference: dict[str, torch.Tensor], children: list[Child]
) -> None:
    """One of two ranks, stopped; the other waits for it, which is no hang."""
    keys: dict[str, Any] = {"name": "hung", "placement__stall_seconds": 5.0, "placement__drafter_ranks": 2, **REPLAYED}

    def on_report(worker: str, kind: str, payload: Any) -> None:
        if kind == "record" and payload["kind"] == "train" and payload["step"] == 14:
            next(child for child in children if child.name == "drafter-1").process.send_signal(signal.SIGSTOP)

    with pytest.raises(WorkerFailed, match=r"^drafter-1 hangs: no sign of life for .*placement.stall_seconds = 5"):
        run(tiny_recipe(material, tmp_path, **keys), on_report=on_report)
    assert not any(child.alive for child in children)
    result = run(tiny_recipe(material, tmp_path, **keys), resume=True)
    assert_equal(state_of(result.folder), reference)


def test_interrupted_and_resumed_equals_uninterrupted(
    material: dict[str, str], tmp_path: Path, reference: dict[str, torch.Tensor], children: list[Child]
) -> None:
    """SIGTERM finishes the step, writes a checkpoint and exits 143; colocated may continue what split began."""
    recipe = tiny_recipe(material, tmp_path, name="cut", **REPLAYED)

    def on_report(worker: str, kind: str, payload: Any) -> None:
        if kind == "record" and payload["kind"] == "train" and payload["step"] == 15:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted) as caught:
        run(recipe, on_report=on_report)
    assert caught.value.exit_code == 128 + signal.SIGTERM
    assert not any(child.alive for child in children)
    cut = latest(tmp_path / "cut" / "checkpoints")
    assert cut is not None
    assert 12 < int(cut.name.removeprefix("step-")) < 36, cut.name
    again = tiny_recipe(material, tmp_path, name="cut", placement__mode="colocated", **REPLAYED)
    result = run(again, resume=True)
    assert_equal(state_of(result.folder), reference)


def test_a_dead_drafter_ends_the_run_and_resume_goes_on(
    material: dict[str, str], tmp_path: Path, reference: dict[str, torch.Tensor], children: list[Child]
) -> None:
    recipe = tiny_recipe(material, tmp_path, name="dead", **REPLAYED)

    def on_report(worker: str, kind: str, payload: Any) -> None:
        if kind == "record" and payload["kind"] == "train" and payload["step"] == 14:
            next(child for child in children if child.name == "drafter-0").process.kill()

    with pytest.raises(WorkerFailed, match=r"drafter-0 \(signal SIGKILL\)"):
        run(recipe, on_report=on_report)
    assert not any(child.alive for child in children)
    assert '"status": "failed"' in (tmp_path / "dead" / "state.json").read_text()
    result = run(recipe, resume=True)
    assert_equal(state_of(result.folder), reference)


@pytest.mark.parametrize("mode", ["colocated", "split"])
def test_a_rank_that_fails_is_named_and_not_those_that_lost_it(
    material: dict[str, str], tmp_path: Path, children: list[Child], mode: str
) -> None:
    """Rank 0 cannot write its checkpoint; rank 1, which waits for its gradients meanwhile, and the targets hear of it."""
    recipe = tiny_recipe(material, tmp_path, name=mode, placement__mode=mode, placement__drafter_ranks=2, **REPLAYED)
    checkpoints = tmp_path / mode / "checkpoints"

    def on_report(worker: str, kind: str, payload: Any) -> None:
        if kind == "record" and payload["kind"] == "train" and payload["step"] == 5:
            checkpoints.rename(tmp_path / "elsewhere")
            checkpoints.touch()

    with pytest.raises(WorkerFailed, match=r"^(worker|drafter)-0 \(exit code 2\).*\n.*checkpoints"):
        run(recipe, on_report=on_report)
    assert not any(child.alive for child in children)


def test_a_supervisor_that_is_killed_leaves_no_process_behind(material: dict[str, str], tmp_path: Path) -> None:
    """SIGKILL of the supervisor: children hear their connections end and go; shared memory was never named."""
    recipe = tiny_recipe(material, tmp_path, name="orphans", plan__epochs=40, **REPLAYED)
    file = tmp_path / "recipe.toml"
    from slipstream.config import dump_recipe

    file.write_text(dump_recipe(recipe))
    before = set(os.listdir("/dev/shm"))
    script = textwrap.dedent(
        """
        import sys
        from slipstream.config import load_recipe
        from slipstream.launch import processes
        from slipstream.launch.local import train_run
        from slipstream.launch.preflight import preflight

        def report(worker, kind, payload):
            if kind == "record" and payload["kind"] == "train":
                print("training", flush=True)

        start = processes.start_child
        def recording(**arguments):
            child = start(**arguments)
            print("child", child.process.pid, flush=True)
            return child

        from slipstream.launch import local
        local.start_child = recording
        train_run(flight=preflight(load_recipe(sys.argv[1])), on_report=report)
        """
    )
    supervisor = subprocess.Popen([sys.executable, "-c", script, str(file)], stdout=subprocess.PIPE, text=True)
    assert supervisor.stdout is not None
    pids = []
    for line in supervisor.stdout:
        if line.startswith("child"):
            pids.append(int(line.split()[1]))
        elif line.startswith("training"):
            break
    supervisor.kill()
    supervisor.wait()
    supervisor.stdout.close()
    assert len(pids) == 2
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and any(_running(pid) for pid in pids):
        time.sleep(0.1)
    assert not any(_running(pid) for pid in pids)
    assert set(os.listdir("/dev/shm")) == before


def _running(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"
