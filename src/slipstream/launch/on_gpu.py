"""The ends of a transport for a process on CUDA: which slots lie on the device, which in host memory, and in what order.

Imports torch; only processes that play a role import it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

import torch

from slipstream.config import DrafterShape, Recipe, TargetInfo
from slipstream.device.streams import CudaStreams
from slipstream.launch.planning import RunPlan
from slipstream.plan.memory_processes import DRAFTER_BUFFERS, TARGET_SLOTS, Processes, fit_on_device
from slipstream.plan.weights import count_target_weights
from slipstream.transport.arrivals import Buffer
from slipstream.transport.device_inline import Berth, DeviceInline
from slipstream.transport.host_slots import lock_slots
from slipstream.transport.layout import SlotLayout
from slipstream.transport.ledger import Assignment, PackOrder
from slipstream.transport.operations import CudaOperations, DeviceSlot, device_slots
from slipstream.transport.planned import PlannedUse
from slipstream.transport.shared import SharedSink
from slipstream.transport.slots import SlotPool
from slipstream.transport.staged import StagedSink, StagedSource
from slipstream.transport.staged_inline import StagedInline

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Gpu:
    """The device of this process, what runs beside what on it, and what is done to slots there."""

    device: torch.device
    streams: CudaStreams
    operations: CudaOperations

    @classmethod
    def open(cls) -> Gpu:
        """The current device."""
        device = torch.device("cuda", torch.cuda.current_device())
        return cls(device=device, streams=CudaStreams(device), operations=CudaOperations())

    def slots(self, layout: SlotLayout, count: int) -> list[DeviceSlot]:
        """Device slots."""
        return device_slots(layout, count, operations=self.operations, device=self.device)

    def buffers(self, layout: SlotLayout, count: int) -> list[Buffer]:
        """Device slots to copy into, with their events."""
        event = self.streams.event
        return [
            Buffer(slot=slot, found_P=self._pinned(), copied=event(), checked=event(), used=event())
            for slot in self.slots(layout, count)
        ]

    def berths(self, layout: SlotLayout, count: int) -> list[Berth]:
        """Device slots to write and to read where they are, with their events."""
        event = self.streams.event
        return [
            Berth(
                slot=slot,
                again_P=torch.zeros_like(slot.parts_P),
                sealed_P=self._pinned(),
                found_P=self._pinned(),
                packed=event(),
                checked=event(),
            )
            for slot in self.slots(layout, count)
        ]

    def _pinned(self) -> torch.Tensor:
        return torch.zeros(self.operations.num_parts, dtype=torch.int64, pin_memory=True)


def planned_uses(*, plan: RunPlan, rank: int) -> Iterator[PlannedUse]:
    """What a rank's loop takes, in its order: steps from the cursor on, and the rank's columns in each."""
    schedule = plan.schedule
    columns = plan.owned_columns(rank)
    for step in range(plan.start_step, schedule.num_steps):
        for column in columns:
            pack_id = int(schedule.pack_of_use[step, column])
            yield PlannedUse(pack_id=pack_id, is_last=int(schedule.last_step[pack_id]) == step)


def gpu_sink(*, connection: Connection, pools: Sequence[SlotPool], plan: RunPlan, fingerprint: str) -> StagedSink:
    """A target worker's end: `pools[r]` is the pool of drafter rank r, page-locked here in the order of the plan."""
    gpu = Gpu.open()
    hosts = [
        lock_slots(pool, order=_slots_in_order(plan, rank), streams=gpu.streams, operations=gpu.operations)
        for rank, pool in enumerate(pools)
    ]
    return StagedSink(
        sink=SharedSink(connection=connection, pools=(), fingerprint=fingerprint),
        hosts=hosts,
        slots=gpu.slots(pools[0].layout, TARGET_SLOTS),
        streams=gpu.streams,
        operations=gpu.operations,
    )


def gpu_source(*, connection: Connection, pool: SlotPool, plan: RunPlan, rank: int) -> StagedSource:
    """A drafter rank's end over its own pool."""
    gpu = Gpu.open()
    return StagedSource(
        connection=connection,
        host=lock_slots(pool, order=_slots_in_order(plan, rank), streams=gpu.streams, operations=gpu.operations),
        buffers=gpu.buffers(pool.layout, DRAFTER_BUFFERS),
        guest=_guest(gpu, layout=pool.layout, plan=plan, rank=rank),
        uses=planned_uses(plan=plan, rank=rank),
        streams=gpu.streams,
        operations=gpu.operations,
    )


def gpu_inline(
    *,
    recipe: Recipe,
    info: TargetInfo,
    shape: DrafterShape,
    plan: RunPlan,
    rank: int,
    layout: SlotLayout,
    produce: Callable[[Assignment, DeviceSlot], None],
    fingerprint: str,
) -> DeviceInline | StagedInline:
    """The source of a process that is target and drafter: slots on the device where all of them fit, else in host memory.

    Packs that are trained on once need two slots however many the schedule has: one in use, one being made. The memory plan
    asks the same (`Processes.has_slots_on_device`).
    """
    gpu = Gpu.open()
    order = [order for order in plan.orders() if order.rank == rank]
    on_device = two_slots(order) if recipe.plan.replays == 1 else order
    num_slots = 1 + max(pack.slot for pack in on_device)
    total = torch.cuda.get_device_properties(gpu.device).total_memory
    processes = Processes(recipe=recipe, info=info, shape=shape, weights=count_target_weights(info), device="cuda")
    room = processes.room(gpu_memory_bytes=total)
    if fit_on_device(num_slots=num_slots, slot_nbytes=layout.nbytes, room=room):
        log.info("%d slots of %.3f GiB on the device", num_slots, layout.nbytes / 2**30)
        return DeviceInline(
            order=on_device,
            uses=planned_uses(plan=plan, rank=rank),
            produce=produce,
            berths=gpu.berths(layout, num_slots),
            slot_bytes=layout.nbytes,
            fingerprint=fingerprint,
            streams=gpu.streams,
            operations=gpu.operations,
        )
    pool = SlotPool.private(layout=layout, num_slots=plan.num_slots(rank))
    log.info(
        "%d slots of %.3f GiB in host memory: %.2f GiB are left on the device",
        pool.num_slots,
        layout.nbytes / 2**30,
        room / 2**30,
    )
    return StagedInline(
        order=order,
        uses=planned_uses(plan=plan, rank=rank),
        produce=produce,
        host=lock_slots(pool, order=_slots_in_order(plan, rank), streams=gpu.streams, operations=gpu.operations),
        slots=gpu.slots(layout, TARGET_SLOTS),
        buffers=gpu.buffers(layout, DRAFTER_BUFFERS),
        guest=_guest(gpu, layout=layout, plan=plan, rank=rank),
        fingerprint=fingerprint,
        streams=gpu.streams,
        operations=gpu.operations,
    )


def two_slots(order: Sequence[PackOrder]) -> list[PackOrder]:
    """The same packs, in two slots by turns; kept ones each in a slot of its own behind them."""
    kept = [pack for pack in order if pack.kept]
    passing = [pack for pack in order if not pack.kept]
    return [replace(pack, slot=2 + index) for index, pack in enumerate(kept)] + [
        replace(pack, slot=index % 2) for index, pack in enumerate(passing)
    ]


def _slots_in_order(plan: RunPlan, rank: int) -> list[int]:
    """A rank's slots by first use."""
    return list(dict.fromkeys(order.slot for order in plan.orders() if order.rank == rank))


def _guest(gpu: Gpu, *, layout: SlotLayout, plan: RunPlan, rank: int) -> Buffer | None:
    """The buffer of kept packs, where a rank has any."""
    return gpu.buffers(layout, 1)[0] if plan.measured_by(rank) else None
