"""Predicted tokens a second: the closed forms by hand, their limits, and the simulation of a queue that they agree with."""

from __future__ import annotations

import json

import pytest

from slipstream.plan.flow import simulate
from slipstream.plan.throughput import (
    Layout,
    StageCosts,
    Workload,
    best,
    busiest_new_packs,
    layouts,
    predict,
    predict_all,
)

COSTS = StageCosts(target_seconds_per_pack=1.2, drafter_seconds_per_use=0.4, tokens_per_pack=8000, source="test")
WORK = Workload(packs_per_step=24, replays=1, num_steps=900)


def split(targets: int, drafters: int) -> Layout:
    return Layout("split", targets, drafters)


def test_a_split_is_as_fast_as_its_slower_side() -> None:
    """Eight devices: 6 + 2 has both sides at 5 packs a second; every other split waits on one of them."""
    even = predict(costs=COSTS, layout=split(6, 2), work=WORK)
    assert even.trained_tokens_per_second == pytest.approx(8000 * 5)
    assert (even.limit, even.target_wait, even.drafter_wait) == ("both", pytest.approx(0), pytest.approx(0))
    few_targets = predict(costs=COSTS, layout=split(4, 4), work=WORK)
    assert few_targets.trained_tokens_per_second == pytest.approx(8000 * 4 / 1.2)
    assert few_targets.limit == "target"
    assert few_targets.drafter_wait == pytest.approx(1 - (24 / 4 * 0.4) / (24 * 1.2 / 4))
    few_drafters = predict(costs=COSTS, layout=split(7, 1), work=WORK)
    assert few_drafters.trained_tokens_per_second == pytest.approx(8000 / 0.4)
    assert few_drafters.limit == "drafter"
    assert few_drafters.target_wait == pytest.approx(1 - (1.2 / 7) / 0.4)


def test_colocated_is_the_sum_of_both_stages() -> None:
    found = predict(costs=COSTS, layout=Layout("colocated", 0, 8), work=WORK)
    assert found.trained_tokens_per_second == pytest.approx(8000 * 8 / 1.6)
    assert found.hours == pytest.approx(900 * 24 / 8 * 1.6 / 3600)
    assert found.device_hours == pytest.approx(8 * found.hours)


def test_replays_cost_the_target_once() -> None:
    """min(t R / t_T, d / t_D) uses a second; unique tokens are a share of the trained ones."""
    thrice = Workload(packs_per_step=24, replays=3, num_steps=900)
    found = predict(costs=COSTS, layout=split(4, 4), work=thrice)
    assert found.trained_tokens_per_second == pytest.approx(8000 * min(4 * 3 / 1.2, 4 / 0.4))
    assert found.unique_tokens_per_second == pytest.approx(found.trained_tokens_per_second / 3)
    together = predict(costs=COSTS, layout=Layout("colocated", 0, 8), work=thrice)
    assert together.trained_tokens_per_second == pytest.approx(8000 * 8 / (1.2 / 3 + 0.4))


def test_ranks_that_get_new_packs_in_turn_wait_for_each_other() -> None:
    """Four columns, two replays: rank 0 of 2 owns columns 0 and 2, whose new packs fall into the same steps."""
    assert busiest_new_packs(packs_per_step=4, replays=2, ranks=2) == 2
    assert busiest_new_packs(packs_per_step=6, replays=2, ranks=3) == 1
    assert busiest_new_packs(packs_per_step=4, replays=1, ranks=2) == 2
    found = predict(costs=COSTS, layout=Layout("colocated", 0, 2), work=Workload(4, 2, 10))
    assert found.step_seconds == pytest.approx(2 * 0.4 + 2 * 1.2)
    assert found.drafter_wait == pytest.approx(1 * 1.2 / found.step_seconds)


def test_what_comes_once_a_step_is_not_shared_out() -> None:
    costs = StageCosts(0.1, 0.4, 8000, step_seconds=0.5, pause_seconds_per_step=0.25, reduce_seconds=0.2)
    alone = predict(costs=costs, layout=split(1, 1), work=Workload(4, 1, 10))
    two = predict(costs=costs, layout=split(1, 2), work=Workload(4, 1, 10))
    four = predict(costs=costs, layout=split(1, 4), work=Workload(4, 1, 10))
    assert alone.step_seconds == pytest.approx(4 * 0.4 + 0.75)
    assert two.step_seconds == pytest.approx(2 * 0.4 + 0.75 + 0.2)
    assert four.step_seconds == pytest.approx(1 * 0.4 + 0.75 + 0.3)


def test_layouts_take_all_devices_and_share_packs_out_evenly() -> None:
    good, refused = layouts(devices=8, packs_per_step=24)
    assert [str(layout) for layout in good] == ["colocated on 8", "7 + 1", "6 + 2", "5 + 3", "4 + 4", "2 + 6"]
    assert [str(found.layout) for found in refused] == ["3 + 5", "1 + 7"]
    assert "do not divide plan.packs_per_step = 24" in refused[0].reason
    assert [str(layout) for layout in layouts(devices=1, packs_per_step=3)[0]] == ["colocated on 1"]


def test_the_best_has_the_most_tokens_and_the_first_of_equals_is_taken() -> None:
    good, _ = layouts(devices=8, packs_per_step=24)
    found = predict_all(costs=COSTS, candidates=good, work=WORK)
    assert str(best(found).layout) == "colocated on 8", "as fast as 6 + 2, and nothing crosses a process"
    slow_together = StageCosts(1.2, 0.4, 8000, colocated_ratio=0.9)
    assert str(best(predict_all(costs=slow_together, candidates=good, work=WORK)).layout) == "6 + 2"


def test_costs_survive_json_and_what_is_missing_is_named() -> None:
    assert StageCosts.from_dict(json.loads(json.dumps(COSTS.as_dict()))) == COSTS
    with pytest.raises(KeyError, match="drafter_seconds_per_use"):
        StageCosts.from_dict({"target_seconds_per_pack": 1, "tokens_per_pack": 3})


@pytest.mark.parametrize(("targets", "ranks", "replays"), [(1, 1, 1), (3, 1, 1), (4, 2, 1), (6, 2, 1), (2, 2, 2), (1, 4, 2)])
def test_the_simulation_of_even_packs_agrees_with_the_closed_form(targets: int, ranks: int, replays: int) -> None:
    work = Workload(packs_per_step=4, replays=replays, num_steps=200)
    costs = StageCosts(1.2, 0.4, 8000, step_seconds=0.1)
    flow = simulate(
        pack_seconds=[1.2], use_seconds=0.4, once_seconds=0.1, work=work, targets=targets, ranks=ranks, ahead_packs=2
    )
    closed = predict(costs=costs, layout=split(targets, ranks), work=work)
    assert flow.step_seconds == pytest.approx(closed.step_seconds, rel=0.02)
    assert flow.drafter_wait == pytest.approx(closed.drafter_wait, abs=0.03)
    assert flow.target_wait == pytest.approx(closed.target_wait, abs=0.03)


def test_a_burst_is_seen_through_a_shallow_queue_and_not_through_a_deep_one() -> None:
    """Ten packs of 0.02 s but one of 1.0: 1.18 s of target for 1.5 s of drafter, yet two slots ahead bridge 0.3 s only."""
    work = Workload(packs_per_step=1, replays=1, num_steps=400)
    pattern = [1.0] + [0.02] * 9

    def run(ahead: int) -> float:
        flow = simulate(
            pack_seconds=pattern, use_seconds=0.15, once_seconds=0.0, work=work, targets=1, ranks=1, ahead_packs=ahead
        )
        return flow.step_seconds * 10

    assert run(2) == pytest.approx(1.5 + 1.0 - 2 * 0.15, rel=0.02)
    assert run(4) == pytest.approx(1.5 + 1.0 - 4 * 0.15, rel=0.02)
    assert run(8) == pytest.approx(1.5, rel=0.01)
    assert run(64) == pytest.approx(1.5, rel=0.01)
