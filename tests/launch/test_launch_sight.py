"""What a run folder says of where time went: every worker's every second, in both placements, and the queues between."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from launch_material import tiny_recipe

from slipstream.launch.local import train_run
from slipstream.launch.preflight import preflight
from slipstream.observe import STATES
from slipstream.runfolder import RunFolder

WORK = {
    "colocated": {"worker-0": ("load", "target", "publish", "forward", "backward", "optimizer", "validate", "checkpoint")},
    "split": {
        "drafter-0": ("load", "forward", "backward", "optimizer", "validate", "checkpoint", "wait_input"),
        "target-0": ("load", "target", "publish", "wait_slot"),
    },
}


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def finished(material: dict[str, str], runs: Path, mode: str) -> RunFolder:
    recipe = tiny_recipe(
        material,
        runs,
        name=mode,
        placement__mode=mode,
        validation__prompts=material["prompts"],
        validation__max_new_tokens=20,
        checkpoint__every_steps=4,
    )
    return RunFolder(train_run(flight=preflight(recipe)).folder)


@pytest.mark.parametrize("mode", ["colocated", "split"])
def test_every_second_of_every_worker_has_a_state(material: dict[str, str], tmp_path: Path, mode: str) -> None:
    folder = finished(material, tmp_path, mode)
    assert {path.stem for path in folder.accounts.iterdir()} == set(WORK[mode])
    assert {path.stem for path in folder.spans.iterdir()} == {*WORK[mode], "answers"}
    for worker, states in WORK[mode].items():
        last = lines(folder.accounts / f"{worker}.jsonl")[-1]
        assert last["closed"]
        assert sum(last["states"].values()) == pytest.approx(last["wall_seconds"], abs=1e-6)
        assert set(states) <= {name for name, seconds in last["states"].items() if seconds > 0}
        assert last["states"].keys() <= STATES.keys()
        header, *spans = lines(folder.spans / f"{worker}.jsonl")
        assert (header["worker"], header["rank"], header["gpu"]) == (worker, 0, None)
        assert header["role"] == {"worker-0": "colocated", "drafter-0": "drafter", "target-0": "target"}[worker]
        cpu = [span for span in spans if span[0] == "cpu"]
        assert sum(span[3] for span in cpu) == pytest.approx(last["wall_seconds"] * 1e6, rel=0.01)
        for name, seconds in last["states"].items():
            of_spans = sum(span[3] for span in cpu if span[1] == name) / 1e6
            assert of_spans == pytest.approx(seconds, abs=0.01 * last["wall_seconds"]), name
    trainer = "worker-0" if mode == "colocated" else "drafter-0"
    spans = lines(folder.spans / f"{trainer}.jsonl")[1:]
    steps = json.loads(folder.state.read_text())["steps"]
    assert {span[5] for span in spans if span[0] == "loader"} == set(range(steps))
    assert max(span[5] for span in spans if span[0] == "writer") == steps
    made = lines(folder.spans / ("worker-0.jsonl" if mode == "colocated" else "target-0.jsonl"))[1:]
    trained = {span[4] for span in spans if span[1] == "forward"}
    assert trained <= {span[4] for span in made if span[1] == "target"}
    assert {span[5] for span in spans if span[1] == "backward"} == set(range(steps))
    uses = len([span for span in spans if span[1] == "forward"])
    assert len([span for span in spans if span[0] == "cpu"]) <= 30 * uses + 200, "states cost little since they are few"
    check_queues(folder)


def check_queues(folder: RunFolder) -> None:
    found = lines(folder.queues)
    assert found
    for line in found:
        assert line["slots"] == line["ready"] + line["held"] + line["issued"] + line["free"] > 0
        assert line["ready_bytes"] % max(1, line["ready"]) == 0
    assert not folder.gpus.exists()
