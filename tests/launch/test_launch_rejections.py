"""Packs that come damaged: told by name in metrics, state, status, report and verdict, and nothing else is changed by them."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from launch_material import tiny_recipe
from safetensors.torch import load_file

from slipstream.launch import local
from slipstream.launch.condition import condition_of
from slipstream.launch.local import RunResult, train_run
from slipstream.launch.preflight import preflight
from slipstream.launch.processes import Child, start_child
from slipstream.launch.rejections import Rejections
from slipstream.report.figures import run_figures
from slipstream.report.reading import read_run
from slipstream.report.verdict import judge
from slipstream.runfolder import RunFolder
from slipstream.transport.ends import SourceStats

PLANTING = Path(__file__).parent / "planting"
DAMAGED = [9, 14]
MAKERS = {"split": "target-0", "colocated": "worker-0"}
TAKERS = {"split": "drafter-0", "colocated": "worker-0"}


def stats(*packs: int) -> SourceStats:
    return SourceStats(
        waiting_seconds=0.0, verifying_seconds=0.0, packs_taken=0, packs_released=0, seals_rejected=len(packs),
        rejected_packs=packs[-2:],
    )  # fmt: skip


def test_a_line_tells_of_what_is_new() -> None:
    lines: list[Any] = []
    now = stats()
    rejections = Rejections(worker="drafter-1", stats=lambda: now, step=lambda: 7, put=lines.append)
    rejections.look()
    assert lines == []
    now = stats(5, 5)
    rejections.look()
    rejections.look()
    assert lines == [{"kind": "rejected_seals", "step": 7, "worker": "drafter-1", "rejected": 2, "packs": [5]}]
    now = stats(5, 5, 3, 8, 2)
    rejections.look()
    assert (lines[-1]["rejected"], lines[-1]["packs"]) == (3, [2, 8]), "of more than are remembered, the newest"


@pytest.fixture(scope="module")
def undisturbed(material: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    runs = tmp_path_factory.mktemp("plain")
    return train_run(flight=preflight(tiny_recipe(material, runs, name="plain", placement__mode="colocated")))


@pytest.mark.parametrize("mode", ["split", "colocated"])
def test_damaged_packs_are_told_everywhere_and_trained_on_nowhere(
    material: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    undisturbed: RunResult,
    mode: str,
) -> None:
    def planting(**arguments: Any) -> Child:
        if arguments["name"] == MAKERS[mode]:
            path = os.pathsep.join([str(PLANTING), *filter(None, [os.environ.get("PYTHONPATH")])])
            plant = {"SLIPSTREAM_TEST_PLANT": json.dumps({"damage": DAMAGED}), "PYTHONPATH": path}
            arguments["environment"] = {**(arguments["environment"] or {}), **plant}
        return start_child(**arguments)

    monkeypatch.setattr(local, "start_child", planting)
    with caplog.at_level(logging.WARNING, logger="slipstream"):
        result = train_run(flight=preflight(tiny_recipe(material, tmp_path, name=mode, placement__mode=mode)))
    folder = RunFolder(result.folder)
    told = [json.loads(line) for line in folder.metrics.read_text().splitlines() if "rejected_seals" in line]
    assert [line["packs"] for line in told] == [[pack] for pack in DAMAGED]
    assert {(line["worker"], line["rejected"]) for line in told} == {(TAKERS[mode], 1)}
    assert all(line["step"] == pack // 2 for line, pack in zip(told, DAMAGED, strict=True)), "two packs a step"
    assert f"{TAKERS[mode]} refused 1 packs of hidden states" in caplog.text
    assert "packs 14: made again" in caplog.text
    assert "pack 9, slot" in (folder.logs / f"{TAKERS[mode]}.log").read_text()
    assert json.loads(folder.state.read_text())["rejected_seals"] == 2
    assert condition_of(folder).health == "2 packs of hidden states came damaged and were made again"
    run = read_run(folder.root)
    assert run_figures(run)["results"]["rejected_seals"] == 2
    assert "packs 9, 14" in judge(run).headline
    assert_same_weights(result, undisturbed)


def assert_same_weights(one: RunResult, other: RunResult) -> None:
    ours, theirs = (load_file(result.checkpoint / "weights.safetensors") for result in (one, other))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
