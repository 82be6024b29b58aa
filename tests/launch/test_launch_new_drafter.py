"""The drafter a run begins with: drawn beside other work, the same values; not drawn where they are loaded anyway."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from launch_material import tiny_recipe

from slipstream.config import DrafterShape, Recipe, read_target_info, resolve_drafter
from slipstream.drafter import DFlashDrafter
from slipstream.launch.new_drafter import NewDrafter, new_drafter
from slipstream.trainer.optim import FlatAdamW

JOB: dict[str, Any] = {"device": "cpu", "checkpoint": None}


@pytest.fixture
def given(material: dict[str, str], tmp_path: Path) -> tuple[Recipe, DrafterShape]:
    recipe = tiny_recipe(material, tmp_path, name="new")
    return recipe, resolve_drafter(recipe=recipe, info=read_target_info(recipe.target.model))


def fill(drafter: DFlashDrafter, value: float) -> None:
    with torch.no_grad():
        for weight in drafter.parameters():
            weight.fill_(value)


def test_drawn_in_a_thread_they_are_the_same(given: tuple[Recipe, DrafterShape]) -> None:
    recipe, shape = given
    wanted = new_drafter(recipe=recipe, shape=shape, device="cpu").state_dict()
    with NewDrafter(job=JOB, recipe=recipe, shape=shape) as new:
        state = new.ready().state_dict()
    assert state.keys() == wanted.keys()
    assert all(torch.equal(state[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("loaded_from", ["checkpoint", "warm_start"])
def test_weights_that_are_loaded_are_not_drawn(given: tuple[Recipe, DrafterShape], loaded_from: str) -> None:
    recipe, shape = given
    job = JOB
    if loaded_from == "checkpoint":
        job = {**JOB, "checkpoint": "runs/before/checkpoints/step-000004"}
    else:
        section = recipe.drafter.model_copy(update={"warm_start": "exports/before"})
        recipe = recipe.model_copy(update={"drafter": section})
    new = NewDrafter(job=job, recipe=recipe, shape=shape)
    fill(new.drafter, 3.0)
    with new:
        assert all((weight == 3.0).all() for weight in new.ready().parameters())


def test_what_memory_held_does_not_outlive_loading(given: tuple[Recipe, DrafterShape]) -> None:
    recipe, shape = given
    before = new_drafter(recipe=recipe, shape=shape, device="cpu").state_dict()
    drafter = new_drafter(recipe=recipe, shape=shape, device="cpu", draws=False)
    fill(drafter, float("nan"))
    optimizer = FlatAdamW(drafter, section=recipe.optimizer)
    optimizer.load_weights(before)
    assert torch.isfinite(optimizer.master).all()
    assert all(torch.equal(weight, before[name]) for name, weight in drafter.state_dict().items())


def test_an_error_comes_where_the_weights_are_awaited(
    given: tuple[Recipe, DrafterShape], monkeypatch: pytest.MonkeyPatch
) -> None:
    def drawing(self: DFlashDrafter, *, seed: int) -> Iterator[None]:
        yield
        raise RuntimeError(f"no memory for seed {seed}")

    monkeypatch.setattr(DFlashDrafter, "drawing", drawing)
    recipe, shape = given
    with NewDrafter(job=JOB, recipe=recipe, shape=shape) as new, pytest.raises(RuntimeError, match="no memory for seed"):
        new.ready()


def test_leaving_early_ends_the_thread(given: tuple[Recipe, DrafterShape], monkeypatch: pytest.MonkeyPatch) -> None:
    begun = threading.Event()

    def drawing(self: DFlashDrafter, *, seed: int) -> Iterator[None]:
        while True:
            begun.set()
            yield

    monkeypatch.setattr(DFlashDrafter, "drawing", drawing)
    recipe, shape = given
    with NewDrafter(job=JOB, recipe=recipe, shape=shape):
        assert begun.wait(timeout=30)
    assert not [thread for thread in threading.enumerate() if thread.name == "first-weights"]
