"""On CUDA: the seal's kernel, the planted faults shown by poison, two processes, loops that neither wait nor allocate."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import pytest
import torch

from slipstream.device.completer import CompleterThread
from slipstream.device.float8 import quantise_rows
from slipstream.device.streams import CudaStreams, Stream
from slipstream.launch.bench.transport import TransportWork, bench_transport
from slipstream.launch.on_gpu import Gpu
from slipstream.records import HiddenPack
from slipstream.transport.arrivals import Arrivals
from slipstream.transport.departures import Departures
from slipstream.transport.device_inline import DeviceInline
from slipstream.transport.host_slots import HostSlots, lock_slots
from slipstream.transport.layout import SlotLayout
from slipstream.transport.ledger import Assignment, PackOrder
from slipstream.transport.messages import Ready
from slipstream.transport.operations import DeviceSlot, plain_checksum, tensors_of
from slipstream.transport.planned import PlannedUse
from slipstream.transport.slots import SlotPool
from slipstream.transport.staged_inline import StagedInline
from slipstream.transport.widened import widened

pytestmark = pytest.mark.gpu
LAYOUT = SlotLayout(pack_tokens=1024, num_taps=4, hidden_size=512, dtype="bfloat16")
SCALED = SlotLayout(pack_tokens=1024, num_taps=4, hidden_size=512, dtype="float8_e4m3")
LONG = 100_000_000
"""Clock cycles of a sleep that no launch outlasts, on busy cores neither: some 50 ms."""


class Sleepy(CudaStreams):
    """Streams that sleep before whatever they are given: an order that is not kept shows every time."""

    def __init__(self, device: torch.device, *, sides: bool) -> None:
        super().__init__(device)
        self.sides = sides

    @contextmanager
    def within(self, stream: Stream) -> Iterator[None]:
        with super().within(stream):
            if self.sides:
                torch.cuda._sleep(LONG)
            yield


def expected(pack_id: int) -> torch.Tensor:
    return torch.full((LAYOUT.pack_tokens, LAYOUT.num_taps, LAYOUT.hidden_size), 1.0 + pack_id, dtype=torch.bfloat16)


def poisoned_host(gpu: Gpu, num_slots: int, layout: SlotLayout = LAYOUT) -> HostSlots:
    pool = SlotPool.private(layout, num_slots)
    for slot in range(num_slots):
        pool.hidden(slot).fill_(float("nan"))
    host = lock_slots(pool, order=range(num_slots), streams=gpu.streams, operations=gpu.operations)
    for slot in range(num_slots):
        host.locked.ensure(slot)  # now: the driver may wait for the device, which would hide a fault
    return host


def open_gpu(*, sides: bool) -> Gpu:
    gpu = Gpu.open()
    return Gpu(device=gpu.device, streams=Sleepy(gpu.device, sides=sides), operations=gpu.operations)


@pytest.mark.parametrize("shape", [(128, 1, 16), (1024, 4, 512), (8192, 5, 640), (384, 3, 80)])
@pytest.mark.parametrize("last_hidden", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3"])
def test_the_kernels_seal_is_the_cpus(
    shape: tuple[int, int, int], last_hidden: bool, dtype: Literal["bfloat16", "float8_e4m3"]
) -> None:
    gpu = Gpu.open()
    layout = SlotLayout(*shape, dtype, last_hidden=last_hidden)
    (slot,) = gpu.slots(layout, 1)
    for tensor in tensors_of(slot):
        tensor.view(torch.int16).random_(-(2**15), 2**15)
    gpu.operations.add_up(slot, parts_P=slot.parts_P)
    last = None if slot.last_hidden_TD is None else slot.last_hidden_TD.cpu()
    scale = None if slot.scale_TK is None else slot.scale_TK.cpu()
    on_cpu = DeviceSlot(slot.hidden_TKD.cpu(), last, slot.parts_P.cpu(), scale)
    found = gpu.operations.read(on_cpu.parts_P)
    assert found == plain_checksum(on_cpu)
    slot.hidden_TKD.view(torch.int32).view(-1)[-7] ^= 1
    gpu.operations.add_up(slot, parts_P=slot.parts_P)
    assert gpu.operations.read(slot.parts_P.cpu()) != found


# ---- the producer's side: faults 1 and 2


def packs_in_the_hook(activations: torch.Tensor, slot: DeviceSlot, gpu: Gpu) -> None:
    slot.hidden_TKD.copy_(activations)


class PacksOnASideStream:
    """Fault 1: packing handed to a second stream, which is slow, while the next forward runs."""

    def __init__(self) -> None:
        self.side: Stream | None = None

    def __call__(self, activations: torch.Tensor, slot: DeviceSlot, gpu: Gpu) -> None:
        self.side = self.side or gpu.streams.side("packing")
        gpu.streams.order(after=self.side, before=gpu.streams.current(), event=gpu.streams.event())
        with gpu.streams.within(self.side):
            torch.cuda._sleep(LONG)
            slot.hidden_TKD.copy_(activations)


class CapturesTooLate(Departures):
    """Fault 2: the producer's stream is asked for inside the copy stream's context; the copy waits for itself."""

    def depart(self, assignment: Assignment) -> None:
        berth = self._open.pop(assignment)
        self._operations.add_up(berth.slot, parts_P=berth.slot.parts_P)
        with self._streams.within(self._copying):
            self._streams.record(berth.packed, on=self._streams.current())
            self._streams.wait(berth.packed, by=self._copying)
            self._hosts[0].copy_out(assignment.slot, source=berth.slot, operations=self._operations)
        self._streams.record(berth.copied, on=self._copying)


def sent(pack: Callable[..., None], departures_class: type[Departures], *, slow_sides: bool) -> list[bool]:
    """Four packs through two device slots; whether each arrived. The forward's memory is poisoned right behind each."""
    gpu = open_gpu(sides=slow_sides)
    host = poisoned_host(gpu, 4)
    failures: list[Exception] = []
    published: list[int] = []
    completer = CompleterThread(streams=gpu.streams, name="test", failed=failures.append)
    departures = departures_class(
        streams=gpu.streams,
        operations=gpu.operations,
        slots=gpu.slots(LAYOUT, 2),
        hosts={0: host},
        completer=completer,
        publish=lambda assignment, *, seal: published.append(assignment.pack_id),
    )
    activations = torch.empty(LAYOUT.pack_tokens, LAYOUT.num_taps, LAYOUT.hidden_size, dtype=torch.bfloat16, device="cuda")
    for pack_id in range(4):
        assignment = Assignment(pack_id=pack_id, rank=0, slot=pack_id, generation=0)
        slot = departures.begin(assignment)
        if not slow_sides:
            torch.cuda._sleep(LONG)
        activations.fill_(1.0 + pack_id)
        pack(activations, slot, gpu)
        activations.fill_(float("nan"))
        departures.depart(assignment)
    torch.cuda.synchronize()
    completer.close()
    arrived = [torch.equal(host.pool.hidden(pack_id), expected(pack_id)) for pack_id in range(4)]
    assert not failures
    assert departures_class is not Departures or published == [0, 1, 2, 3]
    host.close()
    return arrived


@pytest.mark.parametrize("slow_sides", [True, False])
def test_packs_leave_whole_however_slow_either_stream_is(slow_sides: bool) -> None:
    assert all(sent(packs_in_the_hook, Departures, slow_sides=slow_sides))


def test_packing_on_a_second_stream_while_the_next_forward_runs_shows() -> None:
    assert not any(sent(PacksOnASideStream(), Departures, slow_sides=False))


def test_capturing_the_producer_inside_the_side_streams_context_shows() -> None:
    assert not any(sent(packs_in_the_hook, CapturesTooLate, slow_sides=False)[:2])


# ---- the consumer's side: fault 3


class FreesWhenTaken(Arrivals):
    """Fault 3: the host slot goes back when its copy was started."""

    def _start(self, trip) -> None:  # type: ignore[no-untyped-def]
        super()._start(trip)
        if trip.ready is not None and trip.use.is_last:
            self._link.release(trip.use.pack_id)
            trip.use = PlannedUse(pack_id=trip.use.pack_id, is_last=False)


class EagerProducer:
    """A link whose producer writes NaN into a host slot the moment that it is free."""

    def __init__(self, host: HostSlots, num_packs: int) -> None:
        self.host = host
        self.refused: list[int] = []
        self.readies: dict[int, Ready] = {}
        for pack_id in range(num_packs):
            host.pool.hidden(pack_id).copy_(expected(pack_id))
            seal = host.pool.seal(pack_id, pack_id, 0)
            self.readies[pack_id] = Ready(Assignment(pack_id, 0, pack_id, 0), seal=seal, fingerprint="", kept=False)

    def ready(self, pack_id: int) -> Ready | None:
        return self.readies.get(pack_id)

    def accept(self, pack_id: int) -> None:
        pass

    def refuse(self, pack_id: int) -> None:
        self.refused.append(pack_id)
        self.readies.pop(pack_id)

    def release(self, pack_id: int) -> None:
        self.host.pool.hidden(pack_id).fill_(float("nan"))


def received(arrivals_class: type[Arrivals]) -> tuple[list[bool], list[int]]:
    """Four packs through two buffers, their copies slow and training slower: whether each was whole, and what was refused."""
    gpu = open_gpu(sides=True)
    host = poisoned_host(gpu, 4)
    link = EagerProducer(host, 4)
    changed = threading.Condition()
    failures: list[Exception] = []
    completer = CompleterThread(streams=gpu.streams, name="test", failed=failures.append)
    arrivals = arrivals_class(
        streams=gpu.streams,
        operations=gpu.operations,
        buffers=gpu.buffers(LAYOUT, 2),
        guest=None,
        host=host,
        uses=[PlannedUse(pack_id, True) for pack_id in range(4)],
        link=link,
        completer=completer,
        changed=changed,
    )
    seen = []
    for pack_id in range(4):
        with changed:
            while (pack := arrivals.take(pack_id)) is None and not link.refused:
                assert changed.wait(30)
        if pack is None:
            break
        torch.cuda._sleep(2 * LONG)  # the buffer is read late: it must not have been refilled by then
        seen.append(pack.hidden_TKD.clone())
    with changed:
        arrivals.stop()
    torch.cuda.synchronize()
    completer.close()
    whole = [torch.equal(found.cpu(), expected(pack_id)) for pack_id, found in enumerate(seen)]
    assert not failures
    host.close()
    return whole, link.refused


def test_packs_arrive_whole_and_buffers_wait_for_their_last_read() -> None:
    assert received(Arrivals) == ([True] * 4, [])


def test_freeing_a_host_slot_when_it_is_taken_shows_and_the_seal_finds_it() -> None:
    whole, refused = received(FreesWhenTaken)
    assert refused, "the slot was overwritten under its copy"
    assert all(whole), "nothing that was not whole was handed out"


# ---- two processes, and the loops


def test_slots_cross_two_processes_with_their_seals() -> None:
    work = TransportWork(tokens=2048, taps=4, hidden_size=1024, host_slots=4, packs=60, warmup=10, beside=4, products=2)
    found = bench_transport(work)
    assert found.seals_rejected == 0
    assert found.travelled > 1
    assert not any(found.growth.values())


def run_of(num_packs: int, *, replayed: bool) -> tuple[list[PackOrder], list[PlannedUse]]:
    """Packs in a ring of four slots, each used once; or, replayed, a second time two packs later."""
    order = [PackOrder(pack_id=i, rank=0, slot=i % 4) for i in range(num_packs)]
    if not replayed:
        return order, [PlannedUse(i, True) for i in range(num_packs)]
    uses: list[PlannedUse] = []
    waiting: deque[int] = deque()
    for pack_id in range(num_packs):
        uses.append(PlannedUse(pack_id, False))
        waiting.append(pack_id)
        if len(waiting) > 2:
            uses.append(PlannedUse(waiting.popleft(), True))
    return order, [*uses, *(PlannedUse(pack_id, True) for pack_id in waiting)]


def told(pack_id: int) -> float:
    """What a pack's states all are: a number that three bits of mantissa hold."""
    return 1.0 + pack_id % 15


def make_source(
    kind: str, gpu: Gpu, order: list[PackOrder], uses: list[PlannedUse], *, layout: SlotLayout = LAYOUT
) -> StagedInline | DeviceInline:
    activations = torch.empty(LAYOUT.pack_tokens, LAYOUT.num_taps, LAYOUT.hidden_size, dtype=torch.bfloat16, device="cuda")
    bad = torch.zeros(LAYOUT.pack_tokens, dtype=torch.bool, device="cuda")

    def produce(assignment: Assignment, slot: DeviceSlot) -> None:
        with torch.inference_mode():
            activations.fill_(told(assignment.pack_id))
            if slot.scale_TK is None:
                slot.hidden_TKD.copy_(activations)
            else:
                for tap in range(layout.num_taps):
                    values, scale = slot.hidden_TKD[:, tap], slot.scale_TK[:, tap]
                    quantise_rows(activations[:, tap], values_RD=values, scale_R=scale, bad_R=bad)
            activations.fill_(float("nan"))

    if kind == "device":
        return DeviceInline(
            order=order,
            uses=uses,
            produce=produce,
            berths=gpu.berths(layout, 4),
            slot_bytes=layout.nbytes,
            fingerprint="target",
            streams=gpu.streams,
            operations=gpu.operations,
        )
    return StagedInline(
        order=order,
        uses=uses,
        produce=produce,
        host=poisoned_host(gpu, 4, layout),
        slots=gpu.slots(layout, 2),
        buffers=gpu.buffers(layout, 3),
        guest=None,
        fingerprint="target",
        streams=gpu.streams,
        operations=gpu.operations,
    )


def train(pack: HiddenPack, weight: torch.Tensor, wrong: torch.Tensor) -> None:
    """Forward and backward over the slot itself, and a count of values that are not the pack's, left on the device."""
    (pack.hidden_TKD * weight).sum().backward()
    wrong.add_((pack.hidden_TKD != told(pack.pack_id)).sum())


@pytest.mark.parametrize("kind", ["device", "host"])
@pytest.mark.parametrize("replayed", [False, True])
@pytest.mark.parametrize("layout", [LAYOUT, SCALED], ids=["bfloat16", "float8"])
def test_the_loop_never_waits_for_the_device_and_allocates_nothing(kind: str, replayed: bool, layout: SlotLayout) -> None:
    """220 packs, the last 200 under "error": bytes right, no synchronising call, no allocation of device or pinned memory."""
    gpu = Gpu.open()
    order, uses = run_of(220, replayed=replayed)
    source = widened(make_source(kind, gpu, order, uses, layout=layout), layout=layout, dtype="bfloat16", device="cuda")
    weight = torch.ones(LAYOUT.hidden_size, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    weight.grad = torch.zeros_like(weight)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    before: tuple[int, ...] = ()
    try:
        for place, use in enumerate(uses):
            if place == len(uses) - 200:
                before = allocations()
                torch.cuda.set_sync_debug_mode("error")
            train(source.take(use.pack_id), weight, wrong)
            if use.is_last:
                source.release(use.pack_id)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert allocations() == before
    source.close()
    assert int(wrong) == 0
    stats = source.stats()
    assert (stats.packs_taken, stats.packs_released, stats.seals_rejected) == (len(uses), 220, 0)


def allocations() -> tuple[int, ...]:
    device, host = torch.cuda.memory_stats(), torch.cuda.host_memory_stats()
    return device["num_device_alloc"], device["num_device_free"], device["segment.all.allocated"], host["num_host_alloc"]


def test_a_damaged_host_slot_is_made_again() -> None:
    gpu = Gpu.open()
    order, uses = run_of(8, replayed=True)
    source = make_source("host", gpu, order, uses)
    assert isinstance(source, StagedInline)
    weight = torch.ones(LAYOUT.hidden_size, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    generations = []
    for place, use in enumerate(uses):
        pack = source.take(use.pack_id)
        generations.append(pack.generation)
        train(pack, weight, wrong)
        if place == 0:
            source._host.pool.hidden(0).view(torch.int16)[500, 2, 77] ^= 4
        if use.is_last:
            source.release(use.pack_id)
    source.close()
    assert int(wrong) == 0
    assert generations.count(1) == 1
    assert source.stats().seals_rejected == 1
