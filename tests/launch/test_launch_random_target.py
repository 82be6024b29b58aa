"""Rehearsals: whole runs of a target without a weight file, in both placements, and a drafter that cannot be exported."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from launch_material import tiny_recipe
from safetensors.torch import load_file

from slipstream.cli.drafter_source import read_drafter
from slipstream.errors import CheckpointError, PreflightError
from slipstream.launch.local import RunResult, train_run
from slipstream.launch.preflight import preflight
from slipstream.plan import plan_memory


@pytest.fixture(scope="module")
def bare(material: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The tiny target's folder without its weights, and the same corpus."""
    folder = tmp_path_factory.mktemp("bare") / "target"
    shutil.copytree(material["target"], folder, ignore=shutil.ignore_patterns("*.safetensors"))
    return {**material, "target": str(folder)}


def rehearse(material: dict[str, str], runs: Path, *, name: str, **changes: object) -> RunResult:
    recipe = tiny_recipe(material, runs, name=name, target__weights="random", **changes)
    return train_run(flight=preflight(recipe))


def weights_of(result: RunResult) -> dict[str, torch.Tensor]:
    return load_file(result.checkpoint / "weights.safetensors")


@pytest.fixture(scope="module")
def colocated(bare: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    return rehearse(bare, tmp_path_factory.mktemp("colocated"), name="together", placement__mode="colocated")


def test_both_placements_train_on_it_alike(
    bare: dict[str, str], colocated: RunResult, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    split = rehearse(bare, tmp_path, name="split", validation__prompts=bare["prompts"], validation__max_new_tokens=8)
    assert "worthless" in caplog.text
    one, two = weights_of(split), weights_of(colocated)
    assert [name for name in one if not torch.equal(one[name], two[name])] == []
    assert split.validations[-1]["answers"] == 4
    lines = [json.loads(line) for line in (tmp_path / "split" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["kind"] == "train"]
    assert losses[-1] < losses[0]


def test_its_drafter_is_refused_and_so_is_another_target(bare: dict[str, str], colocated: RunResult, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"target\.weights = 'random'.*drafts nothing"):
        read_drafter(colocated.folder)
    saved = tiny_recipe(bare, tmp_path, name="saved")
    with pytest.raises(PreflightError, match="lacks 1 of 1 weight files"):
        preflight(saved)


def test_experts_are_refused(bare: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "experts"
    shutil.copytree(bare["target"], folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_experts": 4}))
    recipe = tiny_recipe({**bare, "target": str(folder)}, tmp_path, name="experts", target__weights="random")
    with pytest.raises(PreflightError, match=r"target\.weights = 'random'.*experts"):
        preflight(recipe)


def test_memory_is_planned_as_for_saved_weights(
    material: dict[str, str], bare: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)

    def peak(recipe_material: dict[str, str], weights: str) -> int:
        flight = preflight(tiny_recipe(recipe_material, tmp_path, name=f"plan-{weights}", target__weights=weights))
        memory = plan_memory(recipe=flight.recipe, info=flight.info, shape=flight.shape, schedule_slots_per_column=3)
        return sum(process.peak_bytes for process in memory.of("split"))

    assert peak(bare, "random") == peak(material, "saved")
