"""Validation in the middle of training measures what `evaluate` measures on the same answers."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from launch_material import tiny_recipe
from measuring import STEPS, Measuring, leave_before_measuring, measure_as_rank, write_made_up_answers
from torch import Tensor

from slipstream.config import Recipe
from slipstream.evaluate.measure import simulate_set
from slipstream.evaluate.prompts import PromptSet
from slipstream.evaluate.summary import summarise
from slipstream.launch.planning import write_schedule
from slipstream.records import Pack
from slipstream.runfolder import RunFolder

LENGTHS = [(5, 40), (12, 33), (30, 1), (9, 21), (40, 40)]
"""Of prompts and answers: one of a single token, one as long as allowed."""


@pytest.fixture
def make_run(material: dict[str, str], tmp_path: Path) -> Callable[..., Recipe]:
    """A run whose schedule is written, six packs a step, so that it can be shared by 1, 2, 3 or 6 ranks."""

    def make(name: str = "measured") -> Recipe:
        changes: dict[str, Any] = {"validation__prompts": material["prompts"], "validation__max_new_tokens": 40}
        recipe = tiny_recipe(
            material, tmp_path, name=name, drafter__initializer_range=0.3, plan__packs_per_step=6, **changes
        )  # fmt: skip
        write_schedule(recipe=recipe, folder=RunFolder(Path(recipe.runs) / recipe.name))
        return recipe

    return make


def test_acceptance_during_training_is_that_of_evaluate(make_run: Callable[..., Recipe]) -> None:
    recipe = make_run()
    answered = write_made_up_answers(recipe, LENGTHS)
    measuring = Measuring.open(recipe)
    shape, target = measuring.shape, measuring.target
    assert len(measuring.plan.validation) > 1

    def capture(pack: Pack) -> Tensor:
        hidden_TKD = torch.empty(pack.capacity_tokens, shape.num_taps, shape.hidden_size)
        target.capture(pack, hidden_TKD=hidden_TKD)
        return hidden_TKD

    prompts = PromptSet(name="same", prompts=tuple(answer.prompt_ids for answer in answered), skipped=0)
    paths = simulate_set(
        prompts,
        answers=[answer.answer_ids for answer in answered],
        max_new_tokens=recipe.validation.max_new_tokens,
        capture=capture,
        drafter=measuring.drafter,
        ends=measuring.ends,
        shape=shape,
    )
    expected = summarise(paths, block_size=shape.block_size)
    assert expected.tau_steps is not None
    assert 1.05 < expected.tau_steps < shape.block_size, "some drafts stand, or nothing is compared"
    for step in STEPS:
        found = measuring.validation.measure(step)
        assert found["acceptance_length"] == expected.tau_steps
        assert found["acceptance_length_by_request"] == expected.tau_requests
        assert found["slot_acceptance"] == list(expected.slot_acceptance)
        assert found["histogram"] == list(expected.histogram)
        assert found["answers"] == len(answered) == expected.requests


def spawn(count: int, function: Callable[..., None], *arguments: Any) -> list[int | None]:
    """Exit codes of that many processes; `function` is given its number first."""
    context = multiprocessing.get_context("spawn")
    children = [context.Process(target=function, args=(number, *arguments)) for number in range(count)]
    for child in children:
        child.start()
    for child in children:
        child.join(timeout=120)
    return [child.exitcode for child in children]


def without_time(metrics: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in metrics.items() if name != "seconds"}


def test_any_number_of_ranks_finds_the_very_same(make_run: Callable[..., Recipe], tmp_path: Path) -> None:
    """Each pack is captured by one rank alone; also where there are fewer packs than ranks."""
    many, few = make_run("many"), make_run("few")
    write_made_up_answers(many, [*LENGTHS, (50, 40), (3, 17), (60, 30)])
    write_made_up_answers(few, LENGTHS[:2])
    expected, packs = [], []
    for recipe in (many, few):
        alone = Measuring.open(recipe)
        expected.append([without_time(alone.validation.measure(step)) for step in STEPS])
        packs.append(alone.captured)
    assert len(packs[0]) > 3 > 2 > len(packs[1]) == 1, "each of three ranks has some of the one, only the first of the other"
    for found in expected:
        assert found[0]["acceptance_length"] > 1.05
    for ranks in (2, 3):
        recipes = [recipe.model_dump(mode="json") for recipe in (many, few)]
        assert spawn(ranks, measure_as_rank, ranks, tmp_path, recipes) == [0] * ranks
        shares = [json.loads((tmp_path / f"found-{rank}-of-{ranks}.json").read_text()) for rank in range(ranks)]
        for number, whole in enumerate(packs):
            for rank, share in enumerate(shares):
                assert [without_time(metrics) for metrics in share[number]["metrics"]] == expected[number]
                assert share[number]["captured"] == whole[rank::ranks]


def test_a_rank_that_fails_at_its_share_is_missed(make_run: Callable[..., Recipe], tmp_path: Path) -> None:
    recipe = make_run()
    write_made_up_answers(recipe, LENGTHS)
    assert spawn(2, leave_before_measuring, tmp_path, recipe.model_dump(mode="json")) == [0, 7]
    assert (tmp_path / "error").read_text().startswith("PeerDied: drafter rank 0 lost another rank")
