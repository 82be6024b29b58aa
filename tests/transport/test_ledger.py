"""The ledger under faults: workers die at any moment, seals are refused, slots are released in any order."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from slipstream.transport.ledger import Assignment, Ledger, PackOrder

SLOT_BYTES = 1000
WORKERS = ["a", "b", "c"]


def random_order(draw_slot, num_packs: int, num_ranks: int, num_slots: int) -> list[PackOrder]:
    """Each rank keeps its last slot for one pack that stays; all others share the slots before it."""
    kept = [PackOrder(pack_id=900 + rank, rank=rank, slot=num_slots, kept=True) for rank in range(num_ranks)]
    packs = [PackOrder(pack_id=i, rank=i % num_ranks, slot=draw_slot(i)) for i in range(num_packs)]
    return [*kept, *packs]


class LedgerUnderFaults(RuleBasedStateMachine):
    """Drives a ledger at random, beside a model that knows only what every slot holds and what was issued."""

    def __init__(self) -> None:
        super().__init__()
        self.order = random_order(lambda i: (i * 7 // 3) % 3, num_packs=17, num_ranks=2, num_slots=3)
        self.ledger = Ledger(self.order, slot_bytes=SLOT_BYTES)
        self.flying: dict[str, list[Assignment]] = {worker: [] for worker in WORKERS}
        self.late: list[tuple[str, Assignment]] = []
        self.ready: dict[int, Assignment] = {}
        self.holder: dict[tuple[int, int], int] = {}
        self.issued: set[tuple[int, int]] = set()
        self.first_issues: dict[int, list[int]] = {0: [], 1: []}
        self.released: set[int] = set()
        self.gone: set[int] = set()

    def take(self, worker: str) -> bool:
        assignment = self.ledger.issue(worker)
        if assignment is None:
            return False
        assert assignment.pack_id not in self.ready, "a slot is written while its consumer may read it"
        assert assignment.rank not in self.gone
        key = (assignment.pack_id, assignment.generation)
        assert key not in self.issued, "issued twice at one generation"
        assert assignment.generation == 0 or (assignment.pack_id, assignment.generation - 1) in self.issued
        self.issued.add(key)
        place = (assignment.rank, assignment.slot)
        assert self.holder.setdefault(place, assignment.pack_id) == assignment.pack_id, "a held slot is given away"
        if assignment.generation == 0:
            self.first_issues[assignment.rank].append(assignment.pack_id)
        self.flying[worker].append(assignment)
        return True

    @rule(worker=st.sampled_from(WORKERS))
    def issue(self, worker: str) -> None:
        self.take(worker)

    @rule(worker=st.sampled_from(WORKERS), data=st.data())
    def publish(self, worker: str, data: st.DataObject) -> None:
        if self.flying[worker]:
            assignment = data.draw(st.sampled_from(self.flying[worker]))
            self.flying[worker].remove(assignment)
            expected = assignment.rank not in self.gone
            assert self.ledger.published(worker, assignment) is expected
            assert not self.ledger.published(worker, assignment), "published twice"
            if expected:
                self.ready[assignment.pack_id] = assignment

    @rule(worker=st.sampled_from(WORKERS))
    def die(self, worker: str) -> None:
        lost = self.ledger.worker_lost(worker)
        alive = [a.pack_id for a in self.flying[worker] if a.rank not in self.gone]
        assert sorted(lost) == sorted(alive)
        self.late += [(worker, assignment) for assignment in self.flying[worker]]
        self.flying[worker] = []

    @precondition(lambda self: self.late)
    @rule(data=st.data())
    def hear_from_the_dead(self, data: st.DataObject) -> None:
        worker, assignment = data.draw(st.sampled_from(self.late))
        before = self.ledger.counts()
        assert not self.ledger.published(worker, assignment)
        assert self.ledger.counts() == before

    @precondition(lambda self: self.ready)
    @rule(data=st.data())
    def reject(self, data: st.DataObject) -> None:
        assignment = self.ready.pop(data.draw(st.sampled_from(sorted(self.ready))))
        assert not self.ledger.rejected(assignment.pack_id, assignment.generation + 1)
        assert self.ledger.rejected(assignment.pack_id, assignment.generation)
        assert not self.ledger.rejected(assignment.pack_id, assignment.generation)

    @precondition(lambda self: any(pack_id < 900 for pack_id in self.ready))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.free(data.draw(st.sampled_from(sorted(pack_id for pack_id in self.ready if pack_id < 900))))

    def free(self, pack_id: int) -> None:
        assignment = self.ready.pop(pack_id)
        self.ledger.released(pack_id)
        del self.holder[assignment.rank, assignment.slot]
        self.released.add(pack_id)

    @precondition(lambda self: len(self.released) > 12)
    @rule()
    def second_rank_leaves(self) -> None:
        self.leave(1)

    def leave(self, rank: int) -> None:
        self.ledger.rank_left(rank)
        self.gone.add(rank)
        self.ready = {pack_id: a for pack_id, a in self.ready.items() if a.rank != rank}
        self.holder = {place: pack for place, pack in self.holder.items() if place[0] != rank}

    @invariant()
    def nothing_is_lost(self) -> None:
        counts = self.ledger.counts()
        fates = (counts.unissued, counts.waiting, counts.in_flight, counts.ready, counts.released, counts.abandoned)
        assert counts.planned == sum(fates) == len(self.order)
        assert counts.ready == len(self.ready)
        assert counts.in_flight == sum(a.rank not in self.gone for flying in self.flying.values() for a in flying)

    @invariant()
    def bytes_add_up(self) -> None:
        for rank, account in self.ledger.accounts().items():
            held = account.in_flight_bytes + account.waiting_bytes + account.ready_bytes
            assert held == SLOT_BYTES * sum(place[0] == rank for place in self.holder)
            assert held <= account.capacity_bytes == 4 * SLOT_BYTES

    @invariant()
    def depths_are_those_of_packs_that_pass(self) -> None:
        depths = self.ledger.depths()
        assert set(depths) == {0, 1} - self.gone
        for rank, depth in depths.items():
            assert set(depth.ready) == {pack for pack, held in self.ready.items() if held.rank == rank and pack < 900}
            held_slots = sum(place[0] == rank and pack < 900 for place, pack in self.holder.items())
            assert (depth.slots, depth.free) == (3, 3 - held_slots)

    @invariant()
    def ranks_are_served_in_order(self) -> None:
        for rank, issued in self.first_issues.items():
            assert issued == [pack.pack_id for pack in self.order if pack.rank == rank][: len(issued)]

    def teardown(self) -> None:
        """Whatever happened, a healthy worker and prompt consumers bring everything home."""
        for worker in WORKERS:
            self.die(worker)
        self.free_all()
        while self.take("a"):
            assignment = self.flying["a"].pop()
            assert self.ledger.published("a", assignment)
            self.ready[assignment.pack_id] = assignment
            self.free_all()
        assert not self.ledger.finished  # the kept pack of rank 0 waits for its consumer
        served = {0, 1} - self.gone
        assert {p.pack_id for p in self.order if p.rank in served and not p.kept} <= self.released
        for rank in served:
            self.leave(rank)
        assert self.ledger.finished
        assert len(served) == 1 or self.ledger.counts().released == len(self.order)

    def free_all(self) -> None:
        for pack_id in [pack_id for pack_id in self.ready if pack_id < 900]:
            self.free(pack_id)


TestLedgerUnderFaults = LedgerUnderFaults.TestCase
TestLedgerUnderFaults.settings = settings(max_examples=100, stateful_step_count=80, deadline=None)


def test_a_full_rank_holds_up_no_other() -> None:
    ledger = Ledger([PackOrder(0, 0, 0), PackOrder(1, 0, 0), PackOrder(2, 1, 0)], slot_bytes=1)
    assert ledger.issue("a") == Assignment(pack_id=0, rank=0, slot=0, generation=0)
    assert ledger.issue("a") == Assignment(pack_id=2, rank=1, slot=0, generation=0)
    assert ledger.issue("b") is None
    assert not ledger.finished


def test_a_pack_issued_again_goes_before_all_others() -> None:
    ledger = Ledger([PackOrder(i, 0, i) for i in range(4)], slot_bytes=1)
    ledger.issue("a")
    ledger.issue("b")
    assert ledger.worker_lost("b") == (1,)
    assert ledger.worker_lost("a") == (0,)
    assert [ledger.issue("c") for _ in range(3)] == [
        Assignment(pack_id=0, rank=0, slot=0, generation=1),
        Assignment(pack_id=1, rank=0, slot=1, generation=1),
        Assignment(pack_id=2, rank=0, slot=2, generation=0),
    ]
    assert ledger.counts().reissued == 2


def test_what_a_consumer_leaves_behind_is_counted() -> None:
    ledger = Ledger([PackOrder(0, 0, 9, kept=True), *(PackOrder(i, 0, i % 2) for i in range(1, 6))], slot_bytes=1)
    for _ in range(3):
        assignment = ledger.issue("a")
        assert assignment is not None
        ledger.published("a", assignment)
    ledger.released(1)
    ledger.rank_left(0)
    ledger.rank_left(0)
    ledger.rank_left(7)
    counts = ledger.counts()
    assert (counts.released, counts.abandoned) == (2, 4)
    assert ledger.finished


@pytest.mark.parametrize(
    ("order", "reason"),
    [
        ([PackOrder(0, 0, 0), PackOrder(0, 0, 1)], "twice"),
        ([PackOrder(0, 0, -1)], "slot -1"),
        ([PackOrder(0, 0, 0, kept=True), PackOrder(1, 0, 0)], "kept"),
    ],
)
def test_an_order_that_breaks_its_promises_is_refused(order: list[PackOrder], reason: str) -> None:
    with pytest.raises(AssertionError, match=reason):
        Ledger(order, slot_bytes=1)


def test_release_is_for_ready_packs_that_are_not_kept() -> None:
    ledger = Ledger([PackOrder(0, 0, 0, kept=True), PackOrder(1, 0, 1)], slot_bytes=1)
    kept, other = ledger.issue("a"), ledger.issue("a")
    assert kept is not None
    assert other is not None
    with pytest.raises(AssertionError, match="in_flight"):
        ledger.released(1)
    assert ledger.published("a", kept)
    assert ledger.kept(0)
    with pytest.raises(AssertionError, match="kept"):
        ledger.released(0)
