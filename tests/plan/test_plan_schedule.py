"""Columns, replays, slots and the digest."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from plan_corpora import make_corpus

from slipstream.config.recipe import PlanSection
from slipstream.errors import PlanError
from slipstream.plan import CorpusIndex, Planner, Schedule, make_schedule, replays
from slipstream.plan.replays import smallest_allowed, steady_distance
from slipstream.plan.slots import hold_from


def index_of(num_packs: int) -> CorpusIndex:
    """Documents that fill a pack of 128 tokens each."""
    sizes = np.full(num_packs, 128, dtype=np.int32)
    return CorpusIndex(num_tokens=sizes, num_anchors=sizes - 1, fingerprint="packs")


def schedule_of(num_packs: int, **plan: int) -> Schedule:
    """A schedule of exactly so many packs."""
    section = PlanSection(**({"pack_tokens": 128, "pack_anchors": 32, "epochs": 1} | plan))
    return make_schedule(index=index_of(num_packs), plan=section, block_size=4)


def uses_of(schedule: Schedule, pack: int) -> list[int]:
    """Steps that use a pack, in order of use number."""
    steps, columns = np.nonzero(schedule.pack_of_use == pack)
    assert (columns == schedule.column_of_pack[pack]).all()
    numbers = schedule.use_number[steps, columns]
    assert sorted(numbers.tolist()) == list(range(schedule.replays))
    return steps[np.argsort(numbers)].tolist()


runs = st.fixed_dictionaries(
    {
        "num_packs": st.integers(1, 260),
        "packs_per_step": st.integers(1, 5),
        "replays": st.integers(1, 5),
        "replay_distance": st.integers(1, 30),
        "allow_lossy_replays": st.just(True),
        "ahead_packs": st.integers(1, 4),
    }
)


def made(run: dict[str, int]) -> Schedule:
    """The schedule, or a discarded example where the run is too short."""
    try:
        return schedule_of(**run)
    except PlanError as error:
        assert error.key == "plan.replays"  # noqa: PT017 (refusals of short runs have a test of their own)
        assume(False)
        raise


@settings(max_examples=80, deadline=None)
@given(run=runs)
def test_every_pack_is_used_so_many_times_at_the_planned_distance(run):
    schedule = made(run)
    replays, distance = run["replays"], run["replay_distance"]
    assert schedule.num_packs % run["packs_per_step"] == 0
    assert schedule.num_steps * run["packs_per_step"] == schedule.num_packs * replays
    assert schedule.num_packs - run["num_packs"] == schedule.summary().empty_packs < run["packs_per_step"]
    uses = np.array([uses_of(schedule, pack) for pack in range(schedule.num_packs)])
    assert (uses[:, 0] == schedule.first_step).all()
    assert (uses[:, -1] == schedule.last_step).all()
    order = list(zip(schedule.first_step.tolist(), schedule.column_of_pack.tolist(), strict=True))
    assert order == sorted(order)
    if replays == 1:
        return
    gaps = np.diff(uses, axis=1)
    assert gaps.min() == schedule.summary().smallest_distance
    assert gaps.min() >= smallest_allowed(replays=replays, replay_distance=distance) >= min(4, distance // 2 - 1)
    assert (gaps.min(axis=1) < distance).sum() <= schedule.summary().ramp_packs


@settings(max_examples=80, deadline=None)
@given(run=runs)
def test_no_slot_is_written_before_its_last_use_ended_and_nothing_deadlocks(run):
    """Plays the run: targets make packs in issue order as soon as a slot is free, the trainer takes step after step."""
    schedule = made(run)
    planner = Planner(schedule=schedule, document=lambda number: pytest.fail("no token is needed"))
    coming = planner.issue_order()
    assert [order.pack_id for order in coming] == list(range(schedule.num_packs))
    holder: dict[tuple[int, int], int] = {}
    most = 0
    for step in range(schedule.num_steps):
        while coming and (coming[0].column, coming[0].slot) not in holder:
            made_now = coming.pop(0)
            holder[made_now.column, made_now.slot] = made_now.pack_id
        most = max(most, len(holder))
        for column in range(schedule.num_columns):
            pack = int(schedule.pack_of_use[step, column])
            key = (column, int(schedule.slot_of_pack[pack]))
            assert holder.get(key) == pack, "the pack of this step was never made"
            if schedule.last_step[pack] == step:
                del holder[key]
    assert not coming
    assert not holder
    assert most <= schedule.num_columns * schedule.slots_per_column
    for column in range(schedule.num_columns):
        packs = np.flatnonzero(schedule.column_of_pack == column)
        held = hold_from(schedule.first_step[packs], ahead_packs=run["ahead_packs"])
        assert (held[run["ahead_packs"] :] == schedule.first_step[packs][: -run["ahead_packs"]]).all()
        slots, last = schedule.slot_of_pack[packs], schedule.last_step[packs]
        for slot in range(schedule.slots_per_column):
            mine = np.flatnonzero(slots == slot)
            assert (held[mine[1:]] > last[mine[:-1]]).all(), "a slot is held by two packs"
        busiest = max(int(((held <= step) & (last >= step)).sum()) for step in range(-1, schedule.num_steps))
        assert slots.max() + 1 == busiest, "more slots than intervals overlap"


@settings(max_examples=40, deadline=None)
@given(run=runs, data=st.data())
def test_a_run_can_be_refilled_at_any_step(run, data):
    schedule = made(run)
    start = data.draw(st.integers(0, schedule.num_steps))
    live = schedule.live_packs(start)
    used_before = set(schedule.pack_of_use[:start].ravel().tolist())
    used_after = set(schedule.pack_of_use[start:].ravel().tolist())
    assert set(live) == used_before & used_after
    order = Planner(schedule=schedule, document=lambda number: pytest.fail("no token")).issue_order(start)
    assert [item.pack_id for item in order[: len(live)]] == live
    assert {item.pack_id for item in order} == used_after
    assert len({(item.column, item.slot) for item in order[: len(live)]}) == len(live)


@pytest.mark.parametrize(
    ("replays", "distance", "columns", "steady"),
    [(2, 50, 1, 53), (2, 50, 2, 53), (3, 50, 1, 52), (3, 50, 4, 55), (4, 20, 4, 25)],
)
def test_a_long_run_is_steady(replays, distance, columns, steady):
    assert steady_distance(replays=replays, replay_distance=distance, num_columns=columns) == steady
    schedule = schedule_of(60 * steady, replays=replays, replay_distance=distance, packs_per_step=columns, ahead_packs=2)
    summary = schedule.summary()
    assert distance <= summary.steady_distance <= steady
    assert summary.smallest_distance >= distance // 2 - 1
    # Each ramp has (D' - 1)(R - 1) / 2 open steps a column, for packs of R uses.
    assert summary.ramp_packs == columns * (steady - 1) * (replays - 1) // replays
    assert schedule.slots_per_column <= -(-steady * (replays - 1) // replays) + 1 + 2
    first_uses = (schedule.use_number == 0).sum(axis=1)
    middle = first_uses[(replays - 1) * steady : -(replays - 1) * steady]
    assert middle.max() - middle.min() <= 1, "the target's load is even"


def test_without_replays_a_column_needs_one_slot_and_those_ahead():
    for ahead in (1, 2, 5):
        schedule = schedule_of(50, packs_per_step=2, ahead_packs=ahead)
        assert schedule.slots_per_column == 1 + ahead
        assert schedule.summary().smallest_distance is None


def test_a_run_too_short_for_its_replays_is_refused_with_what_works():
    with pytest.raises(PlanError) as refused:
        schedule_of(18, replays=3, replay_distance=50, packs_per_step=1)
    message = str(refused.value)
    assert message.startswith("plan.replays = 3: the run is too short: 54 steps")
    assert "plan.replay_distance = 50" in message
    assert "plan.replay_distance = 39 or plan.replays = 1 would work" in message
    assert schedule_of(18, replays=3, replay_distance=39, packs_per_step=1).summary().smallest_distance == 18
    with pytest.raises(PlanError):
        schedule_of(18, replays=3, replay_distance=40, packs_per_step=1)


@pytest.mark.parametrize(("replays", "distance", "steady"), [(2, 1, 1), (2, 5, 5), (2, 20, 21), (3, 1, 1), (3, 5, 7)])
def test_uses_may_follow_each_other_directly_where_the_recipe_allows_it(replays, distance, steady):
    keys = {"replays": replays, "replay_distance": distance, "packs_per_step": 1}
    summary = schedule_of(200, **keys, allow_lossy_replays=True).summary()
    assert summary.steady_distance == steady
    assert summary.smallest_distance >= max(1, distance // 2 - 1)


def test_a_distance_that_costs_acceptance_is_refused_by_the_measured_table(monkeypatch):
    """The nearest that is accepted: 10 while nothing is measured, then the first from which on nothing costs too much."""
    keys = {"replays": 2, "packs_per_step": 1}

    def nearest() -> int:
        return next(distance for distance in range(1, 99) if accepted(distance))

    def accepted(distance: int) -> bool:
        try:
            schedule_of(200, replay_distance=distance, **keys)
        except PlanError as error:
            assert (error.key, error.value) == ("plan.replay_distance", distance)  # noqa: PT017
            assert schedule_of(200, replay_distance=distance, allow_lossy_replays=True, **keys)
            return False
        return True

    for losses, safe in [
        ([], 10),
        ([(1, 0.2), (5, 0.06), (20, 0.05), (50, 0.0)], 20),
        ([(1, 0.01), (5, 0.0), (20, -0.02)], 1),
        ([(1, 0.0), (5, 0.051), (20, 0.0)], 20),
        ([(1, 0.3), (5, 0.2)], 6),
    ]:
        table = tuple(replays.MeasuredDistance(distance, loss, loss - 0.02, loss + 0.02) for distance, loss in losses)
        monkeypatch.setattr(replays, "MEASURED", table)
        assert nearest() == safe
        assert replays.safe_distance() == safe
    with pytest.raises(PlanError, match=r"5 steps cost 0.200 of acceptance length, 0.05 is the most accepted"):
        schedule_of(200, replay_distance=4, **keys)
    assert schedule_of(200, replays=1, replay_distance=1, packs_per_step=1), "without replays it says nothing"


def test_the_measured_table_is_in_order():
    distances = [row.distance for row in replays.MEASURED]
    assert distances == sorted(set(distances))
    assert all(row.low <= row.loss <= row.high for row in replays.MEASURED)


def test_max_steps_keeps_whole_sets_of_uses():
    schedule = schedule_of(300, replays=3, replay_distance=10, packs_per_step=2, max_steps=100)
    assert schedule.num_steps == 99
    assert all(len(uses_of(schedule, pack)) == 3 for pack in range(schedule.num_packs))
    with pytest.raises(PlanError, match=r"plan.max_steps = 2: must be at least plan.replays \(3\)"):
        schedule_of(300, replays=3, replay_distance=10, packs_per_step=2, max_steps=2)


def test_packs_do_not_change_with_columns_or_replays_nor_the_first_ones_with_epochs():
    """What is in pack p of epoch 0 follows from the corpus, the packing keys and the seed alone."""
    corpus = make_corpus(lengths=[20 + 7 * i % 100 for i in range(60)])
    packs = []
    for changes in ({}, {"packs_per_step": 3}, {"epochs": 3}, {"ahead_packs": 7}):
        plan = PlanSection(**({"pack_tokens": 128, "pack_anchors": 32, "packs_per_step": 1, "epochs": 1} | changes))
        schedule = make_schedule(index=corpus.index(), plan=plan, block_size=4)
        packs.append([schedule.documents_of_pack(pack).tolist() for pack in range(5)])
    assert packs[1:] == packs[:1] * 3


def test_the_digest_covers_corpus_plan_and_block_size():
    index = index_of(40)
    plan = PlanSection(pack_tokens=128, pack_anchors=32, packs_per_step=2, epochs=2)
    digest = make_schedule(index=index, plan=plan, block_size=4).digest
    assert make_schedule(index=index, plan=plan, block_size=4).digest == digest
    others = [
        make_schedule(index=dataclasses.replace(index, fingerprint="other"), plan=plan, block_size=4),
        make_schedule(index=index, plan=plan, block_size=8),
        *(
            make_schedule(index=index, plan=plan.model_copy(update=change), block_size=4)
            for change in ({"seed": 1}, {"packs_per_step": 4}, {"window": 7}, {"ahead_packs": 3}, {"epochs": 3})
        ),
    ]
    digests = {digest, *(other.digest for other in others)}
    assert len(digests) == 1 + len(others)


def test_mixing_is_zero_when_a_step_is_like_the_corpus_and_one_when_it_shares_no_length():
    lengths = np.array([8, 100] * 64, dtype=np.int32)
    index = CorpusIndex(num_tokens=lengths, num_anchors=lengths - 1, fingerprint="x")
    schedule = make_schedule(
        index=index, plan=PlanSection(pack_tokens=128, pack_anchors=32, packs_per_step=64, epochs=1), block_size=4
    )
    assert schedule.mixing.tolist() == [0.0]
    assert schedule.summary().mixing_worst == 0.0
    lone = make_schedule(
        index=CorpusIndex(
            num_tokens=np.array([128] * 9 + [8], dtype=np.int32), num_anchors=np.full(10, 7, dtype=np.int32), fingerprint="x"
        ),
        plan=PlanSection(pack_tokens=128, pack_anchors=32, packs_per_step=1, epochs=1),
        block_size=4,
    )
    assert sorted(lone.mixing.tolist()) == pytest.approx([0.1] * 9 + [0.9])


@settings(deadline=None, max_examples=40)
@given(run=runs)
def test_the_largest_refill_is_that_of_the_worst_step_to_resume_at(run):
    schedule = made(run)
    sizes = [len(schedule.live_packs(step)) for step in range(schedule.num_steps + 1)]
    assert schedule.largest_refill == max(sizes)
    assert schedule.largest_refill <= schedule.slots_per_column * schedule.num_columns
    assert (schedule.largest_refill > 0) == (schedule.replays > 1)
