"""The verdict on real runs with a planted cause, and its predicted gain against what the advised change really gives.

Processes, transport and trainer are the product's own; `planting/sitecustomize.py` puts sleeps into their stages that are far
longer than the work of a tiny model, so that what is measured does not depend on the machine.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from launch_material import tiny_recipe

from slipstream.launch import local
from slipstream.launch.local import train_run
from slipstream.launch.preflight import preflight
from slipstream.launch.processes import Child, start_child
from slipstream.report.reading import read_run
from slipstream.report.verdict import Finding, Verdict, judge

PLANTING = Path(__file__).parent / "planting"
CORES = 3
"""Of the machine that the verdict is told of: sleeping processes need none of ours."""

Plant = Callable[[str], Mapping[str, Any]]


class Ground:
    """Runs a recipe with something planted in its children, and judges it."""

    def __init__(self, material: dict[str, str], runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._material, self._runs, self._monkeypatch = material, runs, monkeypatch
        self._count = 0

    def judged(self, plant: Plant, *, steps: int, cores: int = CORES, **changes: Any) -> Verdict:
        """The verdict on a whole run, on a machine of so many cores; `plant(name)` of a child is what slows it."""

        def planting(**arguments: Any) -> Child:
            planted = json.dumps(dict(plant(arguments["name"])))
            path = os.pathsep.join([str(PLANTING), *filter(None, [os.environ.get("PYTHONPATH")])])
            environment = {**(arguments["environment"] or {}), "SLIPSTREAM_TEST_PLANT": planted, "PYTHONPATH": path}
            return start_child(**{**arguments, "environment": environment})

        self._monkeypatch.setattr(local, "start_child", planting)
        self._count += 1
        settings: dict[str, Any] = {"plan__max_steps": steps, "plan__epochs": 4, **changes}
        result = train_run(flight=preflight(tiny_recipe(self._material, self._runs, name=f"run-{self._count}", **settings)))
        run = read_run(result.folder)
        verdict = judge(replace(run, starts=[{**run.starts[-1], "cores": cores}]))
        assert verdict.tokens_per_second is not None, verdict.headline
        return verdict

    def check_gain(self, before: Verdict, after: Verdict, finding: Finding) -> None:
        """Predicted and real speed after the change differ by a tenth at most."""
        assert finding.predicted_gain is not None
        assert before.tokens_per_second is not None
        assert after.tokens_per_second is not None
        real = after.tokens_per_second / before.tokens_per_second
        assert (1 + finding.predicted_gain) / real == pytest.approx(1, abs=0.10), (finding, real)


@pytest.fixture
def ground(material: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ground:
    return Ground(material, tmp_path, monkeypatch)


def changes_of(finding: Finding) -> dict[str, Any]:
    """The advised change as arguments of `tiny_recipe`."""
    assert finding.change, finding
    return {key.replace(".", "__"): value for key, value in finding.change.items()}


def named(verdict: Verdict, kind: str) -> Finding:
    assert verdict.findings[0].kind == kind, verdict.headline
    return verdict.findings[0]


def test_a_slow_target_and_more_of_them(ground: Ground) -> None:
    def plant(name: str) -> Mapping[str, Any]:
        return {"target": 0.15} if name.startswith("target") else {"use": 0.02}

    before = ground.judged(plant, steps=14)
    finding = named(before, "target_bound")
    assert finding.change["placement.target_workers"] == 2
    ground.check_gain(before, ground.judged(plant, steps=18, **changes_of(finding)), finding)


@pytest.mark.slow
def test_a_slow_target_and_both_stages_in_each_process(ground: Ground) -> None:
    """With two cores alone there is no third process to add: each does both instead."""

    def plant(name: str) -> Mapping[str, Any]:
        return {"target": 0.15, "use": 0.05}

    before = ground.judged(plant, steps=20, cores=2)
    finding = named(before, "target_bound")
    assert finding.change == {"placement.mode": "colocated", "placement.drafter_ranks": 2}
    ground.check_gain(before, ground.judged(plant, steps=20, cores=2, **changes_of(finding)), finding)


@pytest.mark.slow
def test_a_slow_drafter_and_more_ranks(ground: Ground) -> None:
    def plant(name: str) -> Mapping[str, Any]:
        return {"use": 0.3} if name.startswith("drafter") else {"target": 0.02}

    before = ground.judged(plant, steps=20)
    finding = named(before, "drafter_bound")
    assert finding.change["placement.drafter_ranks"] == 2
    ground.check_gain(before, ground.judged(plant, steps=20, **changes_of(finding)), finding)


@pytest.mark.slow
def test_a_slow_loader_and_a_faster_one(ground: Ground) -> None:
    def plant(name: str) -> Mapping[str, Any]:
        return {"use": 0.1, "batch": 0.3} if name.startswith("drafter") else {"target": 0.05}

    before = ground.judged(plant, steps=20)
    finding = named(before, "slow_loader")
    after = ground.judged(lambda name: {**plant(name), "batch": 0.0}, steps=20)
    ground.check_gain(before, after, finding)


@pytest.mark.slow
def test_uneven_ranks_and_even_ones(ground: Ground) -> None:
    def plant(name: str) -> Mapping[str, Any]:
        return {"use": 0.4 if name == "drafter-1" else 0.15} if name.startswith("drafter") else {"target": 0.03}

    before = ground.judged(plant, steps=20, placement__drafter_ranks=2)
    finding = named(before, "rank_imbalance")
    assert finding.sentence.startswith("drafter-1 works"), finding.sentence

    def even(name: str) -> Mapping[str, Any]:
        return {"use": 0.15} if name.startswith("drafter") else {"target": 0.03}

    ground.check_gain(before, ground.judged(even, steps=20, placement__drafter_ranks=2), finding)


@pytest.mark.slow
def test_a_bursty_target_and_a_deeper_queue(ground: Ground) -> None:
    def plant(name: str) -> Mapping[str, Any]:
        return {"burst": [10, 1.5]} if name.startswith("target") else {"use": 0.2}

    before = ground.judged(plant, steps=40)
    finding = named(before, "sawtooth")
    ground.check_gain(before, ground.judged(plant, steps=40, **changes_of(finding)), finding)


@pytest.mark.slow
def test_a_run_without_a_cause_is_balanced(ground: Ground) -> None:
    def plant(name: str) -> Mapping[str, Any]:
        return {"use": 0.2} if name.startswith("drafter") else {"target": 0.2}

    verdict = ground.judged(plant, steps=20, plan__packs_per_step=3)
    assert [finding.kind for finding in verdict.findings] == ["balanced"], verdict.headline
