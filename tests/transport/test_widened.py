"""Eight-bit slots through every end: the same states come out of each, and a flipped bit of value or scale is found."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from staged_harness import LAYOUT, OPERATIONS, STREAMS, StagedHost, make_buffers, make_host, make_slots, states_of

from slipstream.device.float8 import quantise_rows
from slipstream.records import HiddenPack
from slipstream.transport.device_inline import Berth, DeviceInline
from slipstream.transport.ends import HiddenSource
from slipstream.transport.inline import InlineTransport
from slipstream.transport.layout import SlotLayout
from slipstream.transport.ledger import Assignment, PackOrder
from slipstream.transport.operations import DeviceSlot
from slipstream.transport.planned import PlannedUse
from slipstream.transport.slots import SlotPool
from slipstream.transport.staged_inline import StagedInline
from slipstream.transport.widened import Widened, widened

SCALED = SlotLayout(pack_tokens=128, num_taps=2, hidden_size=16, dtype="float8_e4m3", last_hidden=True)
NUM_PACKS, NUM_SLOTS = 7, 4
USES = [PlannedUse(pack_id, is_last) for first in range(NUM_PACKS) for pack_id, is_last in ((first, False), (first - 1, True))]
USES = [use for use in USES if use.pack_id >= 0] + [PlannedUse(NUM_PACKS - 1, True)]
"""Each pack twice, the second time behind the first use of the next one."""


def write(assignment: Assignment, slot: DeviceSlot) -> None:
    states = states_of(assignment.pack_id)
    assert slot.scale_TK is not None
    assert slot.last_hidden_TD is not None
    bad = torch.zeros(len(states), dtype=torch.bool)
    for tap in range(SCALED.num_taps):
        quantise_rows(states[:, tap], values_RD=slot.hidden_TKD[:, tap], scale_R=slot.scale_TK[:, tap], bad_R=bad)
    slot.last_hidden_TD.copy_(states[:, 1])


def order() -> list[PackOrder]:
    return [PackOrder(pack_id=i, rank=0, slot=i % NUM_SLOTS) for i in range(NUM_PACKS)]


class Made:
    """A source of eight-bit slots, the memory that it reads them from, and how it ends."""

    def __init__(self, source: HiddenSource, parts: Callable[[int], tuple[torch.Tensor, torch.Tensor | None]]) -> None:
        self.source, self.parts = widened(source, layout=SCALED, dtype="bfloat16", device="cpu"), parts
        self.stop: Callable[[], None] = self.source.close


def inline() -> Made:
    pool = SlotPool.private(SCALED, NUM_SLOTS)

    def produce(assignment: Assignment) -> None:
        slot = assignment.slot
        write(assignment, DeviceSlot(pool.hidden(slot), pool.last_hidden(slot), torch.zeros(1), pool.scale(slot)))

    source = InlineTransport(order(), pool, produce, fingerprint="target")
    return Made(source, lambda slot: (pool.hidden(slot), pool.scale(slot)))


def staged() -> Made:
    """Two ends, a broker, and shared memory: what a split run has; its CPU ends are those of `shared`."""
    host = StagedHost(order(), USES, num_slots=NUM_SLOTS, produce=write, layout=SCALED)
    made = Made(host.source, lambda slot: (host.pool.hidden(slot), host.pool.scale(slot)))
    made.stop = host.stop
    return made


def staged_inline() -> Made:
    *buffers, guest = make_buffers(3, SCALED)
    pool = SlotPool.private(SCALED, NUM_SLOTS)
    source = StagedInline(
        order=order(),
        uses=USES,
        produce=write,
        host=make_host(pool),
        slots=make_slots(2, SCALED),
        buffers=buffers,
        guest=guest,
        fingerprint="target",
        streams=STREAMS,
        operations=OPERATIONS,
    )
    return Made(source, lambda slot: (pool.hidden(slot), pool.scale(slot)))


def device_inline() -> Made:
    event, slots = STREAMS.event, make_slots(NUM_SLOTS, SCALED)
    source = DeviceInline(
        order=order(),
        uses=USES,
        produce=write,
        berths=[
            Berth(slot, *(torch.zeros(1, dtype=torch.int64) for _ in range(3)), packed=event(), checked=event())
            for slot in slots
        ],
        slot_bytes=SCALED.nbytes,
        fingerprint="target",
        streams=STREAMS,
        operations=OPERATIONS,
    )
    return Made(source, lambda slot: (slots[slot].hidden_TKD, slots[slot].scale_TK))


@pytest.fixture(params=[inline, staged, staged_inline, device_inline], ids=lambda make: make.__name__)
def made(request: pytest.FixtureRequest) -> Iterator[Made]:
    ends: Made = request.param()
    yield ends
    ends.stop()


def assert_is(pack: HiddenPack, pack_id: int) -> None:
    """Bit for bit what quantising the target's states and multiplying with their scales gives."""
    slot = make_slots(1, SCALED)[0]
    write(Assignment(pack_id, 0, 0, 0), slot)
    assert slot.scale_TK is not None
    assert torch.equal(pack.hidden_TKD, (slot.hidden_TKD.float() * slot.scale_TK[..., None]).to(torch.bfloat16))
    assert torch.allclose(pack.hidden_TKD.float(), states_of(pack_id).float(), rtol=1 / 16, atol=0.02)
    assert pack.pack_id == pack_id
    assert pack.scale_TK is None, "a drafter needs none"
    assert pack.last_hidden_TD is not None
    assert torch.equal(pack.last_hidden_TD, states_of(pack_id)[:, 1])


def test_every_end_gives_the_same_states_in_one_buffer(made: Made) -> None:
    addresses = set()
    for use in USES:
        pack = made.source.take(use.pack_id)
        assert_is(pack, use.pack_id)
        addresses.add(pack.hidden_TKD.data_ptr())
        assert_is(made.source.take(use.pack_id), use.pack_id)
        if use.is_last:
            made.source.release(use.pack_id)
    assert len(addresses) == 1
    assert made.source.stats().packs_released == NUM_PACKS
    assert made.source.stats().seals_rejected == 0


@pytest.mark.parametrize("part", [0, 1], ids=["value", "scale"])
def test_a_flipped_bit_between_two_uses_is_found_and_the_pack_made_again(made: Made, part: int) -> None:
    generations = []
    for place, use in enumerate(USES):
        pack = made.source.take(use.pack_id)
        assert_is(pack, use.pack_id)
        generations.append(pack.generation)
        if place == 0:
            damaged = made.parts(0)[part]
            assert damaged is not None
            damaged.view(torch.uint8)[77, 1] ^= 64
        if use.is_last:
            made.source.release(use.pack_id)
    assert isinstance(made.source, Widened)
    assert made.source.stats().seals_rejected == sum(generations) == 1


def test_other_slots_are_handed_out_as_they_are() -> None:
    pool = SlotPool.private(LAYOUT, 1)
    source = InlineTransport([PackOrder(0, 0, 0)], pool, lambda assignment: None, fingerprint="target")
    assert widened(source, layout=LAYOUT, dtype="bfloat16", device="cpu") is source
    source.close()
