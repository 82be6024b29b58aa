"""A probe with sleeps planted in the stages: it finds them, keeps them, and predicts what the run then does."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from launch_material import tiny_recipe

from slipstream.device.threads import ThreadShare
from slipstream.launch import local, probe
from slipstream.launch.forecast import forecast, layout_of, workload
from slipstream.launch.local import train_run
from slipstream.launch.preflight import Preflight, preflight
from slipstream.launch.probe import probe_costs
from slipstream.launch.processes import Child, start_child
from slipstream.launch.stage_costs import Subject, known_costs, store_costs, usual_pack
from slipstream.plan.throughput import StageCosts

PLANTING = Path(__file__).parent / "planting"


def plant(monkeypatch: pytest.MonkeyPatch, sleeps: Mapping[str, float]) -> None:
    """Every child from here on sleeps in its stages (`planting/sitecustomize.py`)."""

    def planting(**arguments: Any) -> Child:
        path = os.pathsep.join([str(PLANTING), *filter(None, [os.environ.get("PYTHONPATH")])])
        planted = {"SLIPSTREAM_TEST_PLANT": json.dumps(dict(sleeps)), "PYTHONPATH": path}
        return start_child(**{**arguments, "environment": {**(arguments["environment"] or {}), **planted}})

    monkeypatch.setattr(probe, "start_child", planting)
    monkeypatch.setattr(local, "start_child", planting)


def subject_of(flight: Preflight) -> Subject:
    return Subject.of(recipe=flight.recipe, info=flight.info, shape=flight.shape, device=flight.device, gpus=())


def test_a_probe_measures_both_stages_side_by_side(
    material: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, {"target": 0.15, "use": 0.1})
    flight = preflight(tiny_recipe(material, tmp_path, name="probed"))
    costs = probe_costs(flight, seconds=1.0)
    assert costs.target_seconds_per_pack == pytest.approx(0.15, rel=0.25)
    assert costs.drafter_seconds_per_use == pytest.approx(0.1, rel=0.35)
    assert 0 <= costs.step_seconds < 0.05
    assert costs.source.startswith("probe of ")
    assert list(tmp_path.iterdir()) == [], "a probe leaves nothing behind"


@pytest.mark.slow
def test_a_run_does_what_its_probe_predicted_and_says_how_far_off_it_was(
    material: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, {"target": 0.15, "use": 0.2})
    changes: dict[str, Any] = {"plan__max_steps": 20, "plan__epochs": 4}
    flight = preflight(tiny_recipe(material, tmp_path, name="predicted", **changes))
    store_costs(subject_of(flight), probe_costs(flight, seconds=2.0))
    result = train_run(flight=flight)
    predicted = json.loads(flight.folder.prediction.read_text())
    assert predicted["stages"]["source"].startswith("probe of ")
    assert predicted["throughput"]["layout"] == "1 + 1"
    assert result.verdict is not None
    assert result.verdict.prediction_error == pytest.approx(0, abs=0.10)
    assert "were predicted before the run" in result.verdict.headline
    assert json.loads(flight.folder.state.read_text())["verdict"] == result.verdict.headline


COSTS = StageCosts(target_seconds_per_pack=1.0, drafter_seconds_per_use=0.25, tokens_per_pack=100, source="test")


def test_costs_are_kept_for_what_they_depend_on_and_for_nothing_else(material: dict[str, str], tmp_path: Path) -> None:
    flight = preflight(tiny_recipe(material, tmp_path, name="one"))
    subject = subject_of(flight)
    assert known_costs(subject) is None
    store_costs(subject, COSTS)
    found = known_costs(subject)
    assert found is not None
    assert found.target_seconds_per_pack == 1.0
    assert found.tokens_per_pack == pytest.approx(0.99 * 128), "of this recipe's packs, not of the probe's"
    same = preflight(tiny_recipe(material, tmp_path, name="two", optimizer__lr=1e-3, plan__packs_per_step=4))
    assert known_costs(subject_of(same)) is not None
    for change in (
        {"plan__pack_tokens": 256},
        {"plan__pack_anchors": 64},
        {"drafter__num_layers": 2},
        {"placement__target_threads": 2},
        {"target__dtype": "bfloat16"},
    ):
        assert known_costs(subject_of(preflight(tiny_recipe(material, tmp_path, name="other", **change)))) is None, change


def automatic(material: dict[str, str], runs: Path, **changes: Any) -> Preflight:
    """A recipe in automatic mode, on whatever cores the test says there are."""
    settings = {"placement__mode": "auto", "plan__packs_per_step": 4, **changes}
    return preflight(tiny_recipe(material, runs, name="auto", **settings))


def test_automatic_placement_goes_by_costs_where_they_are_known(
    material: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.launch.preflight.available_cores", lambda: 4)
    before = automatic(material, tmp_path)
    assert str(layout_of(before.placement)) == "1 + 1", "without costs: two devices are split"
    store_costs(subject_of(before), COSTS)
    after = automatic(material, tmp_path)
    assert str(layout_of(after.placement)) == "colocated on 4"
    assert after.chosen == "colocated on 4, predicted to be fastest: 406 tokens/s (test)"
    assert (after.recipe.placement.mode, after.recipe.placement.drafter_ranks) == ("colocated", 4)
    named = automatic(material, tmp_path, placement__drafter_ranks=1, placement__target_workers=3)
    assert str(layout_of(named.placement)) == "3 + 1", "counts that the recipe names stay"
    uneven = automatic(material, tmp_path, plan__packs_per_step=3)
    assert str(layout_of(uneven.placement)) == "3 + 1", "four ranks do not divide three packs"
    given = automatic(material, tmp_path, placement__mode="split")
    assert str(layout_of(given.placement)) == "1 + 1", "a mode that is named is kept"


def test_threads_that_differ_leave_the_placement_alone(
    material: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.launch.preflight.available_cores", lambda: 4)
    flight = automatic(material, tmp_path, placement__drafter_threads=2)
    assert subject_of(flight).threads == ThreadShare(target=1, drafter=2)
    store_costs(subject_of(flight), COSTS)
    assert str(layout_of(automatic(material, tmp_path, placement__drafter_threads=2).placement)) == "1 + 1"


def test_a_forecast_leaves_out_what_does_not_fit(material: dict[str, str], tmp_path: Path) -> None:
    from slipstream.launch.resources import Resources

    flight = preflight(tiny_recipe(material, tmp_path, name="fits"))
    memory = Resources.of(flight).plan_memory(slots_per_column=3, validation_slots=0)
    drafter = next(process for process in memory.of("split") if process.role == "drafter")
    found = forecast(
        costs=COSTS,
        work=workload(flight.recipe, num_steps=10),
        devices=3,
        memory=memory,
        gpu_memory_bytes=drafter.device_bytes - 1,
    )
    assert found.best is None
    reasons = [refused.reason for refused in found.refused]
    assert any("a drafter process needs" in reason for reason in reasons)
    assert any("do not divide plan.packs_per_step = 2" in reason for reason in reasons)
    everything = forecast(
        costs=COSTS, work=workload(flight.recipe, num_steps=10), devices=3, memory=memory, gpu_memory_bytes=2**40
    )
    assert everything.best is not None
    assert json.loads(json.dumps(everything.as_dict()))["best"] == str(everything.best.layout)


def test_the_usual_pack_is_nearly_full(material: dict[str, str], tmp_path: Path) -> None:
    pack = usual_pack(preflight(tiny_recipe(material, tmp_path, name="pack")).recipe)
    assert pack.tokens == pytest.approx(0.99 * 128)
    assert pack.tokens < pack.squared_tokens < pack.tokens * 128
    assert pack.anchors == 32
