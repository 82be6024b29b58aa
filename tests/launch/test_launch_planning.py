"""What all processes derive from a run folder: the order of packs, whose slot is whose when, and validation packs."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launch_material import tiny_recipe, write_conversations

from slipstream.config import Recipe
from slipstream.corpus.prepare import prepare
from slipstream.errors import PlanError
from slipstream.launch.answers import ANSWERS_FILE, Answer, write_answers
from slipstream.launch.planning import RunPlan, open_run_plan, validation_packs, write_schedule
from slipstream.runfolder import RunFolder

REPLAYED: dict[str, Any] = {"plan__replays": 2, "plan__replay_distance": 10, "plan__packs_per_step": 4, "plan__epochs": 4}


def answers(*lengths: tuple[int, int]) -> list[Answer]:
    """Answers of given lengths of prompt and answer."""
    rng = np.random.default_rng(4)
    draw = [(rng.integers(4, 200, p).tolist(), rng.integers(4, 200, a).tolist()) for p, a in lengths]
    return [Answer(prompt_ids=tuple(prompt), answer_ids=tuple(answer)) for prompt, answer in draw]


def planned(recipe: Recipe, *, ranks: int = 2, start_step: int = 0) -> RunPlan:
    folder = RunFolder(Path(recipe.runs) / recipe.name)
    write_schedule(recipe=recipe, folder=folder)
    if recipe.validation.prompts is not None:
        write_answers(path=folder.validation / ANSWERS_FILE, answers=answers((10, 50), (20, 60), (5, 90)))
    return open_run_plan(recipe=recipe, folder=folder, ranks=ranks, start_step=start_step)


@pytest.fixture
def recipe(material: dict[str, str], tmp_path: Path) -> Recipe:
    return tiny_recipe(material, tmp_path, name="planned", validation__prompts=material["prompts"], **REPLAYED)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("start_step", [0, 13])
def test_no_two_packs_share_a_slot_of_a_rank_at_any_time(recipe: Recipe, ranks: int, start_step: int) -> None:
    """A pack holds its slot from its order to the end of its last use; slots are counted within each rank's pool."""
    plan = planned(recipe, ranks=ranks, start_step=start_step)
    schedule = plan.schedule
    held: dict[tuple[int, int], int] = {}
    for order in plan.orders():
        place = (order.rank, order.slot)
        assert 0 <= order.slot < plan.num_slots(order.rank)
        if order.kept:
            assert place not in held, "a validation pack's slot is its own for ever"
            held[place] = schedule.num_steps
            continue
        assert order.slot < plan.training_slots
        assert schedule.column_of_pack[order.pack_id] in plan.owned_columns(order.rank)
        assert held.get(place, -1) < schedule.first_step[order.pack_id]
        held[place] = int(schedule.last_step[order.pack_id])
    assert len(plan.validation) > 1


def test_validation_comes_first_then_what_is_alive_then_the_rest_in_order(recipe: Recipe) -> None:
    plan = planned(recipe, start_step=13)
    orders, schedule = plan.orders(), plan.schedule
    kept = [order for order in orders if order.kept]
    assert orders[: len(kept)] == kept
    assert [order.pack_id for order in kept] == [schedule.num_packs + index for index in range(len(plan.validation))]
    training = [order.pack_id for order in orders[len(kept) :]]
    alive = schedule.live_packs(13)
    assert alive
    assert set(training[: len(alive)]) == set(alive)
    needed = {pack for pack in range(schedule.num_packs) if schedule.last_step[pack] >= 13}
    assert sorted(training) == sorted(needed), "each once, those that are over not at all"
    first_steps = [int(schedule.first_step[pack]) for pack in training[len(alive) :]]
    assert first_steps == sorted(first_steps)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_validation_pack_is_measured_by_the_rank_that_keeps_it(recipe: Recipe, ranks: int) -> None:
    """In turn; of four ranks some keep none."""
    plan = planned(recipe, ranks=ranks)
    kept = [order for order in plan.orders() if order.kept]
    shares = [plan.measured_by(rank) for rank in range(ranks)]
    assert [[item.pack.pack_id for item in share] for share in shares] == [
        [order.pack_id for order in kept if order.rank == rank] for rank in range(ranks)
    ]
    assert [order.rank for order in kept] == [index % ranks for index in range(len(plan.validation))]
    assert [plan.num_slots(rank) - plan.training_slots for rank in range(ranks)] == [len(share) for share in shares]
    assert 2 <= len(kept) < 4


def test_every_column_has_one_owner(recipe: Recipe) -> None:
    for ranks in (1, 2, 4):
        plan = planned(recipe, ranks=ranks)
        owned = [plan.owned_columns(rank) for rank in range(ranks)]
        assert sorted(column for columns in owned for column in columns) == list(range(plan.schedule.num_columns))
        assert {len(columns) for columns in owned} == {plan.schedule.num_columns // ranks}


def test_packs_are_found_by_the_ids_of_their_orders(recipe: Recipe) -> None:
    plan = planned(recipe)
    for order in plan.orders():
        assert plan.pack(order.pack_id).pack_id == order.pack_id
    for item in plan.validation:
        assert {use.pack_id for use in item.uses} == {item.pack.pack_id}


def test_every_position_of_an_answer_is_an_anchor_once(recipe: Recipe) -> None:
    plan = planned(recipe)
    for item in plan.validation:
        anchors = np.concatenate([use.anchors[use.anchor_valid] for use in item.uses])
        mask = item.pack.loss_mask
        assert sorted(anchors.tolist()) == np.flatnonzero(mask[:-1] & mask[1:]).tolist()
    limit = recipe.validation.max_new_tokens
    assert plan.validation[0].max_lengths == {0: 10 + limit, 1: 20 + limit, 2: 5 + limit}


def test_without_prompts_answers_of_an_earlier_start_are_not_read(
    material: dict[str, str], tmp_path: Path, recipe: Recipe
) -> None:
    assert planned(recipe).validation
    silent = tiny_recipe(material, tmp_path, name="planned", **REPLAYED)
    assert planned(silent).validation == ()
    assert not any(order.kept for order in planned(silent).orders())


def test_answers_longer_than_a_pack_are_left_out_unless_all_are(recipe: Recipe, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = validation_packs(answers=answers((100, 50), (10, 20)), recipe=recipe, first_pack=7)
    assert [item.pack.document_ids.tolist() for item in found] == [[1]]
    assert "1 of 2 validation answers are longer than a pack" in caplog.text
    with pytest.raises(PlanError) as caught:
        validation_packs(answers=answers((100, 50)), recipe=recipe, first_pack=7)
    assert (caught.value.key, caught.value.value) == ("plan.pack_tokens", 128)
    assert validation_packs(answers=[], recipe=recipe, first_pack=7) == ()


def test_a_schedule_is_made_once_and_proved_afterwards(material: dict[str, str], tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "planned")
    recipe = tiny_recipe(material, tmp_path, name="planned")
    first = write_schedule(recipe=recipe, folder=folder)
    stamp = (folder.schedule / "schedule.json").stat().st_mtime_ns
    assert write_schedule(recipe=recipe, folder=folder).digest == first.digest
    assert (folder.schedule / "schedule.json").stat().st_mtime_ns == stamp
    with pytest.raises(PlanError) as caught:
        write_schedule(recipe=tiny_recipe(material, tmp_path, name="planned", plan__seed=1), folder=folder)
    assert caught.value.key == "corpus.path"
    assert f"the run was started with {first.digest[:12]}" in caught.value.rule


def test_a_corpus_that_changed_under_a_run_is_refused(material: dict[str, str], tmp_path: Path) -> None:
    """Also where only its path was to change: `--resume` lets it move, not become another."""
    folder = RunFolder(tmp_path / "planned")
    write_schedule(recipe=tiny_recipe(material, tmp_path, name="planned"), folder=folder)
    source = write_conversations(tmp_path / "other.jsonl", count=60, seed=9)
    prepare([source], target=material["target"], out=tmp_path / "other")
    with pytest.raises(PlanError, match=r"corpus\.path = .*other"):
        write_schedule(
            recipe=tiny_recipe(material, tmp_path, name="planned", corpus__path=str(tmp_path / "other")), folder=folder
        )
