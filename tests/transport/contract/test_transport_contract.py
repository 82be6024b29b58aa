"""The contract of every transport: order, back-pressure, slots, seals, closing, resume."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from transport_harness import (
    FINGERPRINT,
    HARNESSES,
    LAYOUT,
    InlineHarness,
    SharedHarness,
    ring,
    states_of,
    write_states,
)

from slipstream.errors import SealBroken, TransportClosed
from slipstream.records import HiddenPack
from slipstream.transport import SOURCES, source_class
from slipstream.transport.ends import Verify
from slipstream.transport.ledger import Assignment, PackOrder
from slipstream.transport.slots import SlotPool

Harness = InlineHarness | SharedHarness


@pytest.fixture(params=[made for kind in SOURCES for made in HARNESSES[kind]], ids=lambda made: made.__name__)
def harness(request: pytest.FixtureRequest) -> Iterator[Harness]:
    made: Harness = request.param()
    yield made
    made.stop()
    with pytest.raises(TransportClosed):
        made.source.take(0)
    made.stop()  # closing twice is allowed


def assert_is(pack: HiddenPack, pack_id: int) -> None:
    hidden, last = states_of(pack_id)
    assert pack.pack_id == pack_id
    assert torch.equal(pack.hidden_TKD, hidden)
    assert pack.last_hidden_TD is not None
    assert torch.equal(pack.last_hidden_TD, last)
    assert pack.target_fingerprint == FINGERPRINT


def test_kinds_have_a_harness_of_their_class(harness: Harness) -> None:
    source = harness.start(ring(1, num_slots=1), num_slots=1)
    assert type(source) is source_class(harness.kind)


def test_packs_come_in_order_with_the_right_bytes(harness: Harness) -> None:
    source = harness.start(ring(20, num_slots=3), num_slots=3)
    for pack_id in range(20):
        pack = source.take(pack_id)
        assert (pack.slot, pack.generation) == (pack_id % 3, 0)
        assert_is(pack, pack_id)
        harness.release(pack_id)
    written = [pack_id for what, pack_id, _ in harness.log if what == "write"]
    assert sorted(written) == list(range(20))
    if not (isinstance(harness, SharedHarness) and harness.num_producers > 1):  # two of them note down in either order
        assert written == list(range(20))
    stats = source.stats()
    assert (stats.packs_taken, stats.packs_released, stats.seals_rejected) == (20, 20, 0)
    assert stats.waiting_seconds > 0
    assert stats.verifying_seconds > 0


def test_back_pressure_and_no_slot_reused_early(harness: Harness) -> None:
    source = harness.start(ring(6, num_slots=2), num_slots=2)
    first = source.take(0)
    source.take(1)
    harness.release(1)
    harness.hold_back(2)  # slot 1 is free, but pack 2 goes into slot 0 and 3 may not overtake it
    assert_is(first, 0)
    harness.release(0)
    for pack_id in range(2, 6):
        assert_is(source.take(pack_id), pack_id)
        harness.release(pack_id)
    events = [(what, pack_id) for what, pack_id, _ in harness.log]
    for pack_id in range(2, 6):
        assert events.index(("release", pack_id - 2)) < events.index(("write", pack_id))


def test_a_live_pack_is_taken_again_without_being_made_again(harness: Harness) -> None:
    source = harness.start(ring(2, num_slots=2), num_slots=2)
    first, other, again = source.take(0), source.take(1), source.take(0)
    assert first == again
    assert again.hidden_TKD is first.hidden_TKD
    assert_is(again, 0)
    assert_is(other, 1)
    assert sum(what == "write" for what, _, _ in harness.log) == 2
    assert source.stats().packs_taken == 3


def test_a_flipped_bit_is_found_and_the_pack_made_again(harness: Harness) -> None:
    source = harness.start(ring(3, num_slots=2), num_slots=2)
    source.take(0)
    harness.slot_tensor(0).view(torch.int16)[77, 1, 3] ^= 1 << 9
    again = source.take(0)
    assert again.generation == 1
    assert_is(again, 0)
    assert source.stats().seals_rejected == 1
    assert source.stats().rejected_packs == (0,)
    for pack_id in range(3):
        assert_is(source.take(pack_id), pack_id)
        harness.release(pack_id)


def test_swapped_rows_are_found(harness: Harness) -> None:
    source = harness.start(ring(1, num_slots=1), num_slots=1)
    source.take(0)
    slot = harness.slot_tensor(0)
    slot[[3, 90]] = slot[[90, 3]]
    assert source.take(0).generation == 1
    assert_is(source.take(0), 0)


def test_a_stale_but_whole_slot_is_found(harness: Harness) -> None:
    source = harness.start(ring(2, num_slots=1), num_slots=1)
    stale = source.take(0).hidden_TKD.clone()
    harness.release(0)
    source.take(1)
    harness.slot_tensor(0).copy_(stale)
    again = source.take(1)
    assert again.generation == 1
    assert_is(again, 1)


def test_checking_the_first_take_only_is_a_choice(harness: Harness) -> None:
    source = harness.start(ring(1, num_slots=1), num_slots=1, verify=Verify.FIRST_TAKE)
    source.take(0)
    harness.slot_tensor(0)[0, 0, 0] = 1234
    again = source.take(0)
    assert again.generation == 0
    assert float(again.hidden_TKD[0, 0, 0]) == 1232  # 1234 in bf16


class NeverTheSameSeal(SlotPool):
    """Memory that is never found as it was sealed."""

    calls = 0

    def seal(self, slot: int, pack_id: int, generation: int) -> int:
        NeverTheSameSeal.calls += 1
        return NeverTheSameSeal.calls


def test_a_pack_that_is_refused_again_and_again_ends_the_run(harness: Harness) -> None:
    source = harness.start(ring(9, num_slots=4, first=5), num_slots=4, pool_class=NeverTheSameSeal)
    with pytest.raises(SealBroken, match=r"pack 5, slot 0 of rank 0, generation 2: .* 3 times"):
        source.take(5)
    assert source.stats().seals_rejected == 3


def test_closing_ends_a_wait(harness: Harness) -> None:
    """Pack 1 never comes: its producer is stuck until the transport is closed by somebody else."""
    stuck, closed = threading.Event(), threading.Event()

    def produce(assignment: Assignment, hidden: torch.Tensor, last_hidden: torch.Tensor) -> None:
        if assignment.pack_id == 1:
            stuck.set()
            assert closed.wait(30)
        write_states(assignment, hidden, last_hidden)

    def close() -> None:
        assert stuck.wait(30)
        harness.close_from_elsewhere()
        closed.set()

    source = harness.start(ring(2, num_slots=2), num_slots=2, produce=produce)
    source.take(0)
    closer = threading.Thread(target=close)
    closer.start()
    with pytest.raises(TransportClosed):
        source.take(1)
    closer.join(30)


def test_kept_packs_come_first_and_stay(harness: Harness) -> None:
    kept = [PackOrder(pack_id=1000 + i, rank=0, slot=2 + i, kept=True) for i in range(2)]
    source = harness.start([*kept, *ring(7, num_slots=2)], num_slots=4)
    for pack_id in range(7):
        for order in kept:
            assert_is(source.take(order.pack_id), order.pack_id)
        assert_is(source.take(pack_id), pack_id)
        harness.release(pack_id)
    with pytest.raises(AssertionError, match="kept"):
        source.release(1000)
    harness.slot_tensor(3)[5] = 0  # damaged after the last training pack: still made again
    assert source.take(1001).generation == 1
    assert_is(source.take(1001), 1001)


def test_resume_starts_with_the_packs_that_are_alive(harness: Harness) -> None:
    """At the cursor packs 4 and 2 live; the rest of the order follows; each comes as in the unbroken run."""
    order = [
        PackOrder(pack_id=4, rank=0, slot=1),
        PackOrder(pack_id=2, rank=0, slot=2),
        *ring(4, num_slots=1, first=6),
        PackOrder(pack_id=10, rank=0, slot=2),
    ]
    source = harness.start(order, num_slots=3)
    for pack_id in (4, 2, 6, 7, 4, 8, 2):
        assert_is(source.take(pack_id), pack_id)
        if pack_id >= 6:
            harness.release(pack_id)
    for pack_id in (2, 9, 10, 4):
        assert_is(source.take(pack_id), pack_id)
        harness.release(pack_id)
    assert source.stats().packs_released == 7


def test_a_slot_carries_gradients_while_others_are_written(harness: Harness) -> None:
    """The next pack is written between forward and backward of this one; one's own slot written is still noticed."""
    source = harness.start(ring(3, num_slots=2), num_slots=2)
    weight = torch.ones(LAYOUT.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    with torch.inference_mode():  # a consumer that first takes inside inference mode must not spoil the slots
        source.take(0)
    loss = (source.take(0).hidden_TKD * weight).sum()
    source.take(1)
    loss.backward()
    assert weight.grad is not None
    expected = states_of(0)[0].float().sum((0, 1))
    assert torch.allclose(weight.grad.float(), expected, rtol=0.05, atol=0.5)
    if isinstance(harness, InlineHarness):
        loss = (source.take(1).hidden_TKD * weight).sum()
        harness.slot_tensor(1)[0] = 0
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_waiting_is_counted(harness: Harness) -> None:
    pause = threading.Event()

    def slow(assignment: Assignment, hidden: torch.Tensor, last_hidden: torch.Tensor) -> None:
        pause.wait(0.05)
        write_states(assignment, hidden, last_hidden)

    source = harness.start(ring(3, num_slots=1), num_slots=1, produce=slow)
    for pack_id in range(3):
        source.take(pack_id)
        harness.release(pack_id)
    assert 0.14 < source.stats().waiting_seconds < 10
