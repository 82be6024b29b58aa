"""Schedules at their edges."""

from __future__ import annotations

from itertools import pairwise

import pytest

from slipstream.config.recipe import OptimizerSection
from slipstream.trainer.learning_rate import learning_rate


def rates(num_steps: int, **keys: object) -> list[float]:
    section = OptimizerSection(lr=1.0, **keys)
    return [learning_rate(step=step, num_steps=num_steps, optimizer=section) for step in range(num_steps)]


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_warm_up_rises_linearly_to_the_peak(schedule: str) -> None:
    found = rates(100, schedule=schedule, warmup_ratio=0.04)
    assert found[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert max(found) == found[4]


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
@pytest.mark.parametrize("num_steps", [1, 2, 3, 25])
@pytest.mark.parametrize("warmup", [0.0, 0.04, 0.5])
@pytest.mark.parametrize("minimum", [0.0, 0.1])
def test_never_zero_never_above_the_peak(schedule: str, num_steps: int, warmup: float, minimum: float) -> None:
    found = rates(num_steps, schedule=schedule, warmup_ratio=warmup, min_lr_ratio=minimum)
    assert all(0 < rate <= 1 for rate in found)
    assert found[-1] == 1 or found[-1] >= minimum
    assert max(found) == 1.0


def test_cosine_halves_in_the_middle_and_ends_above_the_minimum() -> None:
    found = rates(100, schedule="cosine", warmup_ratio=0.0, min_lr_ratio=0.1)
    assert found[0] == 1
    assert found[50] == pytest.approx(0.55)
    assert 0.1 < found[-1] < 0.101
    assert all(one > two for one, two in pairwise(found))


def test_wsd_holds_then_falls_linearly() -> None:
    found = rates(100, schedule="wsd", warmup_ratio=0.0, decay_ratio=0.2)
    assert found[:81] == [1.0] * 81
    assert found[81:] == pytest.approx([left / 20 for left in range(19, 0, -1)])


def test_wsd_with_a_decay_over_everything_after_warm_up() -> None:
    found = rates(10, schedule="wsd", warmup_ratio=0.5, decay_ratio=0.5)
    assert found[5:] == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])


def test_constant_stays() -> None:
    assert set(rates(50, schedule="constant", warmup_ratio=0.0, min_lr_ratio=0.1)) == {1.0}


def test_outside_the_plan_is_our_mistake() -> None:
    with pytest.raises(AssertionError):
        learning_rate(step=10, num_steps=10, optimizer=OptimizerSection())
