"""The replay measurement: statistics of pairs by hand-made cases, conditions that differ in one thing, and a tiny whole one."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launch_material import tiny_recipe
from typer.testing import CliRunner

from slipstream.cli.main import app
from slipstream.config import Recipe, dump_recipe
from slipstream.corpus.store import CorpusStore
from slipstream.errors import UsageError
from slipstream.launch.bench.paired import Difference, PromptCounts, paired_difference
from slipstream.launch.bench.replays import BASELINE, EIGHT_BITS, ReplayWork, equal_recipes, make_conditions
from slipstream.launch.planning import corpus_index
from slipstream.plan import make_schedule

WORK = ReplayWork(distances=(1, 5), seeds=2, eight_bits=True)


def base(material: dict[str, str], runs: Path, **changes: Any) -> Recipe:
    keys = {
        "target__dtype": "bfloat16",
        "plan__packs_per_step": 1,
        "plan__epochs": 2,
        "validation__prompts": material["prompts"],
        "validation__max_new_tokens": 24,
    }
    return tiny_recipe(material, runs, name="base", **(keys | changes))


def counted(*pairs: tuple[int, int]) -> PromptCounts:
    return PromptCounts(tokens=tuple(tokens for tokens, _ in pairs), steps=tuple(steps for _, steps in pairs))


def test_acceptance_length_is_tokens_a_step_over_all_prompts() -> None:
    assert counted((30, 10), (10, 10)).acceptance_length == 2.0


def test_the_mean_and_students_interval_are_those_of_the_differences() -> None:
    partners = [counted((20, 10), (20, 10))] * 3
    runs = [counted((21, 10), (21, 10)), counted((22, 10), (22, 10)), counted((24, 10), (24, 10))]
    found = paired_difference(runs, partners=partners)
    assert found.by_seed == pytest.approx((0.1, 0.2, 0.4))
    assert found.mean == pytest.approx(7 / 30)
    half = 4.303 * math.sqrt(np.var([0.1, 0.2, 0.4], ddof=1) / 3)
    assert found.over_seeds == pytest.approx((7 / 30 - half, 7 / 30 + half))
    assert found.over_prompts[0] == pytest.approx(0.1)
    assert found.over_prompts[1] == pytest.approx(0.4)


def test_prompts_that_are_hard_for_both_runs_cancel() -> None:
    """The prompts differ widely, the runs by the same share on each: a bootstrap that drew them apart would see nothing."""
    steps = [10 + 3 * number for number in range(40)]
    partner = counted(*((200, count) for count in steps))
    run = counted(*((200, count - 1) for count in steps))
    found = paired_difference([run], partners=[partner])
    assert found.over_seeds is None
    low, high = found.over_prompts
    assert 0 < low < found.mean < high
    alone = [partner.acceptance_length * factor for factor in (0.9, 1.1)]
    assert high - low < (alone[1] - alone[0]) / 2
    again = paired_difference([run], partners=[partner])
    assert again == found, "the draws are the same"


def test_a_bootstrap_covers_the_truth_about_as_often_as_it_says() -> None:
    draw = np.random.default_rng(1)
    covered = 0
    for _ in range(60):
        steps = draw.integers(20, 60, size=(2, 80))
        runs = [counted(*zip([100] * 80, row, strict=True)) for row in steps]
        low, high = paired_difference(runs[:1], partners=runs[1:]).over_prompts
        covered += low <= 0 <= high
    assert 50 <= covered <= 60


def test_conditions_have_equal_steps_and_anchors_and_differ_in_one_thing(material: dict[str, str], tmp_path: Path) -> None:
    recipe = base(material, tmp_path, plan__seed=3)
    conditions = make_conditions(recipe, WORK)
    assert [condition.name for condition in conditions] == [BASELINE, EIGHT_BITS, "distance 1", "distance 5"]
    named = equal_recipes(recipe, conditions=conditions, seeds=WORK.seeds)
    assert [(name, item.plan.seed) for name, item in named] == [
        (condition.name, seed) for seed in (3, 4) for condition in conditions
    ]
    index = corpus_index(CorpusStore.open(Path(material["corpus"])))
    for seed in (3, 4):
        schedules = {
            name: make_schedule(index=index, plan=item.plan, block_size=item.drafter.block_size)
            for name, item in named
            if item.plan.seed == seed
        }
        summaries = {name: schedule.summary() for name, schedule in schedules.items()}
        assert len({schedule.num_steps for schedule in schedules.values()}) == 1
        assert schedules[BASELINE].digest == schedules[EIGHT_BITS].digest
        assert summaries["distance 1"].steady_distance == summaries["distance 1"].smallest_distance == 1
        assert summaries["distance 5"].steady_distance == 5
        assert summaries["distance 5"].packs * 2 == summaries[BASELINE].packs
        anchors = [summary.anchors for summary in summaries.values()]
        assert max(anchors) <= 1.05 * min(anchors)
    plain, rounded, near, _ = (item for name, item in named[:4])
    assert rounded.slot_dtype == "float8_e4m3"
    assert plain.slot_dtype == near.slot_dtype == "bfloat16"
    assert {item.optimizer for _, item in named} == {recipe.optimizer}


@pytest.mark.parametrize(
    ("work", "changes", "key"),
    [
        ({"replays": 3}, {}, "--replays"),
        ({"replays": 1}, {}, "--replays"),
        ({"seeds": 0}, {}, "--seeds"),
        ({"distances": (5, 1)}, {}, "--distances"),
        ({"distances": (0, 1)}, {}, "--distances"),
        ({}, {"validation__prompts": None}, "validation.prompts"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    material: dict[str, str], tmp_path: Path, work: dict[str, Any], changes: dict[str, Any], key: str
) -> None:
    with pytest.raises(UsageError) as caught:
        make_conditions(base(material, tmp_path, **changes), ReplayWork(**work))
    assert caught.value.key == key


def figures_of(material: dict[str, str], folder: Path, *options: str) -> tuple[dict[str, Any], str]:
    folder.mkdir()
    file, out = folder / "recipe.toml", folder / "figures.json"
    file.write_text(dump_recipe(base(material, folder, plan__max_steps=12)))
    result = CliRunner(env={"COLUMNS": "140"}).invoke(app, ["bench", "replays", str(file), "--out", str(out), *options])
    assert result.exit_code == 0, result.output
    left = {path.name for path in folder.iterdir()}
    assert left == {"recipe.toml", "figures.json", ".answers"}, "no run is left behind"
    return json.loads(out.read_text()), result.output


def measured(figures: dict[str, Any], *, seed: int) -> set[tuple[Any, ...]]:
    return {(run["name"], tuple(run["counts"]["steps"])) for run in figures["runs"] if run["seed"] == seed}


def test_a_whole_measurement(material: dict[str, str], tmp_path: Path) -> None:
    found, shown = figures_of(material, tmp_path / "one", "--distances", "1", "--seeds", "2", "--float8-slots")
    conditions = {condition["name"]: condition for condition in found["conditions"]}
    assert list(conditions) == [BASELINE, EIGHT_BITS, "distance 1"]
    assert conditions[BASELINE]["difference"] is None
    assert conditions[EIGHT_BITS]["rounded_acceptance_length"] is not None
    for name in (EIGHT_BITS, "distance 1"):
        difference = conditions[name]["difference"]
        assert difference["over_seeds"][0] <= difference["mean"] <= difference["over_seeds"][1]
        assert len(difference["by_seed"]) == 2
    assert len(found["runs"]) == 6
    assert {run["steps"] for run in found["runs"]} == {12}
    assert {len(run["counts"]["tokens"]) for run in found["runs"]} == {4}
    assert len({tuple(run["counts"]["tokens"]) for run in found["runs"]}) == 1, "every drafter decodes the same answers"
    assert "distance 1" in shown


@pytest.mark.slow
def test_processes_that_share_the_work_change_nothing(material: dict[str, str], tmp_path: Path) -> None:
    alone, _ = figures_of(material, tmp_path / "one", "--distances", "1,5", "--seeds", "1")
    shared, _ = figures_of(material, tmp_path / "two", "--distances", "1,5", "--seeds", "1", "--workers", "2")
    assert measured(alone, seed=0) == measured(shared, seed=0)
    assert len(measured(alone, seed=0)) == 3


def test_difference_is_a_plain_record() -> None:
    found = paired_difference([counted((2, 1))], partners=[counted((2, 1))])
    assert found == Difference(mean=0.0, by_seed=(0.0,), over_seeds=None, over_prompts=(0.0, 0.0))
