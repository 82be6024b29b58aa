"""The staged ends with real threads: the contract of a source that is told the order of its uses."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from staged_harness import (
    LAYOUT,
    OPERATIONS,
    STREAMS,
    Slow,
    StagedHost,
    make_buffers,
    make_host,
    make_slots,
    states_of,
    write_states,
)

from slipstream.errors import SealBroken, TransportClosed, TransportError
from slipstream.records import HiddenPack
from slipstream.transport.device_inline import Berth, DeviceInline
from slipstream.transport.ends import HiddenSink, HiddenSource
from slipstream.transport.ledger import Assignment, PackOrder
from slipstream.transport.operations import DeviceSlot
from slipstream.transport.planned import PlannedUse, without_repeats
from slipstream.transport.slots import SlotPool
from slipstream.transport.staged_inline import StagedInline

Inline = StagedInline | DeviceInline
Produce = Callable[[Assignment, DeviceSlot], None]


def ring(num_packs: int, *, num_slots: int) -> list[PackOrder]:
    return [PackOrder(pack_id=i, rank=0, slot=i % num_slots) for i in range(num_packs)]


def once(*pack_ids: int) -> list[PlannedUse]:
    """Each pack used once, or, if it is there again, for the last time at its last place."""
    return [PlannedUse(pack_id, pack_id not in pack_ids[place + 1 :]) for place, pack_id in enumerate(pack_ids)]


def wait_until(true: Callable[[], bool], *, seconds: float = 30.0) -> bool:
    """Whether it became so in time."""
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.005)
    return true()


def assert_is(pack: HiddenPack, pack_id: int) -> None:
    assert pack.pack_id == pack_id
    assert torch.equal(pack.hidden_TKD, states_of(pack_id))
    assert pack.last_hidden_TD is not None
    assert torch.equal(pack.last_hidden_TD, states_of(pack_id)[:, 1])


@pytest.fixture
def hosts() -> Iterator[list[StagedHost]]:
    made: list[StagedHost] = []
    yield made
    for host in made:
        host.stop()
        with pytest.raises(TransportClosed):
            host.source.take(0)
        host.stop()  # closing twice is allowed


def staged_inline(order: list[PackOrder], uses: list[PlannedUse], produce: Produce = write_states) -> StagedInline:
    *buffers, guest = make_buffers(3)
    return StagedInline(
        order=order,
        uses=uses,
        produce=produce,
        host=make_host(SlotPool.private(LAYOUT, 1 + max(pack.slot for pack in order))),
        slots=make_slots(2),
        buffers=buffers,
        guest=guest,
        fingerprint="target",
        streams=STREAMS,
        operations=OPERATIONS,
    )


def device_inline(order: list[PackOrder], uses: list[PlannedUse], produce: Produce = write_states) -> DeviceInline:
    event = STREAMS.event
    return DeviceInline(
        order=order,
        uses=uses,
        produce=produce,
        berths=[
            Berth(slot, *(torch.zeros(1, dtype=torch.int64) for _ in range(3)), packed=event(), checked=event())
            for slot in make_slots(1 + max(pack.slot for pack in order))
        ],
        slot_bytes=LAYOUT.nbytes,
        fingerprint="target",
        streams=STREAMS,
        operations=OPERATIONS,
    )


INLINE = pytest.mark.parametrize("make", [staged_inline, device_inline])


def test_they_are_the_ends_of_a_transport(hosts: list[StagedHost]) -> None:
    hosts.append(host := StagedHost(ring(1, num_slots=1), once(0), num_slots=1))
    source: HiddenSource = host.source
    sink: HiddenSink = host.sink
    assert_is(source.take(0), 0)
    source.release(0)
    assert sink is host.sink


def test_packs_come_in_order_with_the_right_bytes(hosts: list[StagedHost]) -> None:
    hosts.append(host := StagedHost(ring(20, num_slots=3), once(*range(20)), num_slots=3))
    for pack_id in range(20):
        pack = host.source.take(pack_id)
        assert (pack.slot, pack.generation) == (pack_id % 3, 0)
        assert_is(pack, pack_id)
        assert host.source.take(pack_id) == pack
        host.source.release(pack_id)
    stats = host.source.stats()
    assert (stats.packs_taken, stats.packs_released, stats.seals_rejected) == (20, 20, 0)
    assert [assignment.pack_id for assignment in host.written] == list(range(20))


def test_a_pack_is_used_again_and_its_slot_freed_behind_its_last_copy(hosts: list[StagedHost]) -> None:
    order = [PackOrder(0, 0, 0), PackOrder(1, 0, 1), PackOrder(2, 0, 2), PackOrder(3, 0, 1), PackOrder(4, 0, 0)]
    uses = once(0, 1, 2, 0, 3, 4)
    hosts.append(host := StagedHost(order, uses, num_slots=3))
    for use in uses:
        assert_is(host.source.take(use.pack_id), use.pack_id)
        if use.is_last:
            host.source.release(use.pack_id)
    assert host.source.stats().packs_released == 5


def test_kept_packs_are_taken_at_any_time(hosts: list[StagedHost]) -> None:
    order = [PackOrder(100, 0, 2, kept=True), PackOrder(101, 0, 3, kept=True), *ring(5, num_slots=2)]
    hosts.append(host := StagedHost(order, once(*range(5)), num_slots=4))
    for pack_id in range(5):
        assert_is(host.source.take(pack_id), pack_id)
        for kept in (100, 101, 100):
            assert_is(host.source.take(kept), kept)
        assert_is(host.source.take(pack_id), pack_id)  # its use is not over: kept packs have a buffer of their own
        host.source.release(pack_id)


def damage_once(memory: torch.Tensor, done: list[int]) -> None:
    if not done:
        memory.view(torch.int16)[77, 1, 3] ^= 1 << 9
        done.append(1)


def test_a_damaged_slot_is_found_and_the_pack_made_again(hosts: list[StagedHost]) -> None:
    hosts.append(host := StagedHost(ring(6, num_slots=6), once(0, 1, 2, 3, 4, 0, 5), num_slots=6))
    assert_is(host.source.take(0), 0)
    host.pool.hidden(0).view(torch.int16)[77, 1, 3] ^= 1 << 9
    for pack_id in (1, 2, 3, 4):
        assert_is(host.source.take(pack_id), pack_id)
        host.source.release(pack_id)
    again = host.source.take(0)
    assert again.generation == 1
    assert_is(again, 0)
    assert host.source.stats().seals_rejected == 1


def test_a_slot_that_is_never_as_sealed_ends_the_run(hosts: list[StagedHost], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.transport.arrivals.make_seal", lambda **_: -1)
    hosts.append(host := StagedHost(ring(2, num_slots=2), once(0, 1), num_slots=2))
    with pytest.raises(SealBroken, match=r"slot 0 of rank 0, generation 2: .* 3 times"):
        host.source.take(0)


def test_closing_ends_a_wait(hosts: list[StagedHost]) -> None:
    stuck, closed = threading.Event(), threading.Event()

    def produce(assignment: Assignment, slot: DeviceSlot) -> None:
        if assignment.pack_id == 1:
            stuck.set()
            assert closed.wait(30)
        write_states(assignment, slot)

    def close() -> None:
        assert stuck.wait(30)
        host.broker.close()
        closed.set()

    hosts.append(host := StagedHost(ring(2, num_slots=2), once(0, 1), num_slots=2, produce=produce))
    assert_is(host.source.take(0), 0)
    closer = threading.Thread(target=close)
    closer.start()
    with pytest.raises(TransportClosed):
        host.source.take(1)
    closer.join(30)


def test_a_worker_takes_no_more_packs_than_keep_its_device_busy(hosts: list[StagedHost]) -> None:
    device = Slow()
    hosts.append(host := StagedHost(ring(8, num_slots=8), once(*range(8)), num_slots=8, target_streams=device))
    assert wait_until(lambda: len(host.written) == 3)
    assert not wait_until(lambda: len(host.written) > 3, seconds=0.3), "two device slots, and one pack launched behind them"
    assert host.broker.depths()[0].issued == 3
    device.go_on.set()
    for pack_id in range(8):
        assert_is(host.source.take(pack_id), pack_id)
        host.source.release(pack_id)


@pytest.mark.parametrize("num_slots", [2, 8], ids=["waiting for a slot", "waiting for its device"])
def test_a_worker_whose_device_fails_says_so_and_does_not_wait_for_slots(hosts: list[StagedHost], num_slots: int) -> None:
    device = Slow()
    device.broken = True
    order = ring(8, num_slots=num_slots)
    hosts.append(host := StagedHost(order, once(*range(8)), num_slots=num_slots, target_streams=device))
    assert wait_until(lambda: len(host.written) == min(num_slots, 3))
    device.go_on.set()
    host.thread.join(30)
    assert not host.thread.is_alive(), "it waits for packs that never land to free their slots"
    assert "illegal memory access" in host.failures.pop()


@INLINE
def test_inline_packs_come_in_order_and_one_is_made_ahead(make: Callable[..., Inline]) -> None:
    made: list[int] = []

    def produce(assignment: Assignment, slot: DeviceSlot) -> None:
        made.append(assignment.pack_id)
        write_states(assignment, slot)

    source = make(ring(9, num_slots=3), once(*range(9)), produce)
    for pack_id in range(9):
        assert_is(source.take(pack_id), pack_id)
        assert made[: pack_id + 1] == list(range(pack_id + 1))
        assert pack_id == 8 or pack_id + 1 in made, "the target has work while the drafter's is launched"
        source.release(pack_id)
    stats = source.stats()
    assert (stats.packs_taken, stats.packs_released) == (9, 9)
    source.close()
    with pytest.raises(TransportClosed):
        source.take(0)


def test_two_device_slots_are_enough_for_packs_used_once() -> None:
    source = device_inline(ring(9, num_slots=2), once(*range(9)))
    for pack_id in range(9):
        assert_is(source.take(pack_id), pack_id)
        source.release(pack_id)
    source.close()


def test_a_device_slot_that_changed_between_two_uses_is_made_again() -> None:
    source = device_inline(ring(3, num_slots=3), once(0, 1, 2, 0))
    first = source.take(0)
    source.take(1)  # the next one is looked at while this one is trained on
    first.hidden_TKD[5] += 1
    for pack_id in (2, 0):
        pack = source.take(pack_id)
        assert_is(pack, pack_id)
    assert pack.generation == 1
    assert source.stats().seals_rejected == 1
    source.close()


@INLINE
def test_inline_a_failing_target_is_heard_and_its_pack_issued_again(make: Callable[..., Inline]) -> None:
    failed: list[int] = []

    def produce(assignment: Assignment, slot: DeviceSlot) -> None:
        if not failed:
            failed.append(assignment.pack_id)
            raise RuntimeError("out of memory")
        write_states(assignment, slot)

    source = make(ring(2, num_slots=2), once(0, 1), produce)
    with pytest.raises(RuntimeError, match="out of memory"):
        source.take(0)
    assert_is(source.take(0), 0)
    source.close()


@INLINE
def test_inline_a_pack_that_cannot_come_is_an_error_not_a_wait(make: Callable[..., Inline]) -> None:
    source = make(ring(3, num_slots=1), once(0, 1, 2, 0))
    source.take(0)
    with pytest.raises(TransportError, match="its slot is still held"):
        source.take(1)
    source.close()


def test_uses_of_a_pack_that_follow_each_other_are_one() -> None:
    uses = [PlannedUse(1, False), PlannedUse(1, True), PlannedUse(2, False), PlannedUse(3, True), PlannedUse(2, True)]
    assert list(without_repeats(uses)) == [uses[1], *uses[2:]]
    assert list(without_repeats([])) == []
