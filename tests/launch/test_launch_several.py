"""The split placement of an eight-GPU machine, in small: five target processes, three drafter ranks, and one death."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from launch_material import tiny_recipe
from safetensors.torch import load_file

from slipstream.launch import local
from slipstream.launch.local import RunResult, train_run
from slipstream.launch.preflight import preflight
from slipstream.launch.processes import Child, start_child
from slipstream.runfolder import RunFolder

pytestmark = pytest.mark.slow

KILLED_AT = 10
SEVERAL = {"plan__packs_per_step": 3, "plan__epochs": 6, "plan__replays": 2, "plan__replay_distance": 10}


def state_of(result: RunResult) -> dict[str, torch.Tensor]:
    return {f"{file.name}:{name}": t for file in result.checkpoint.glob("*.safetensors") for name, t in load_file(file).items()}


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[Child]:
    """Handles of the children that a run starts, in order."""
    handles: list[Child] = []

    def recording(**arguments: Any) -> Child:
        handles.append(start_child(**arguments))
        return handles[-1]

    monkeypatch.setattr(local, "start_child", recording)
    return handles


def train(material: dict[str, str], runs: Path, *, name: str, on_report: Any = None, **placement: int) -> RunResult:
    keys = {f"placement__{key}": value for key, value in placement.items()}
    return train_run(flight=preflight(tiny_recipe(material, runs, name=name, **SEVERAL, **keys)), on_report=on_report)


def test_five_targets_and_three_drafters(material: dict[str, str], tmp_path: Path, children: list[Child]) -> None:
    """Whatever the number of targets and whoever dies: the same bits as one target gives, and close to what one rank gives."""
    seen: list[str] = []

    def on_report(worker: str, kind: str, payload: Any) -> None:
        seen.append(f"{worker} {kind}")
        if kind == "record" and payload["kind"] == "train" and payload["step"] == KILLED_AT:
            next(child for child in children if child.name == "target-3").process.kill()

    quiet = train(material, tmp_path, name="quiet", target_workers=1, drafter_ranks=3)
    children.clear()
    result = train(material, tmp_path, name="five-three", on_report=on_report, target_workers=5, drafter_ranks=3)
    assert sorted({child.name for child in children}) == [f"drafter-{i}" for i in range(3)] + [f"target-{i}" for i in range(5)]
    assert seen.count("target-3 restart") == 1
    ours, expected = state_of(result), state_of(quiet)
    assert [name for name in expected if not torch.equal(ours[name], expected[name])] == []
    alone = state_of(train(material, tmp_path, name="alone", target_workers=1, drafter_ranks=1))
    for name, tensor in alone.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-3, atol=1e-5, msg=name)
    _check_books(result)


def _check_books(result: RunResult) -> None:
    """Every step is there once, every rank trained its share, and the rate after the death is that of before."""
    lines = [json.loads(line) for line in RunFolder(result.folder).metrics.read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "train"]
    assert [line["step"] for line in steps] == list(range(result.steps))
    assert not any(line["skipped"] for line in steps)
    before = statistics.median(line["seconds"] for line in steps[2:KILLED_AT])
    after = statistics.median(line["seconds"] for line in steps[-KILLED_AT:])
    assert after < 3 * before, (before, after)
