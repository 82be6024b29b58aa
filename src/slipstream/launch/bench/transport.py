"""How fast slots travel: a target process's device → page-locked memory → a drafter process's device, seals on.

First the ceiling, in the same run: copies both ways at once, in one process, over the same slots. Then the real ends and the
real broker between two processes, which share one GPU here. Last, the same beside a busy target: matrix products on the
stream that the target computes on, timed with and without packs leaving.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from slipstream.device.shared import SharedMemory
from slipstream.device.threads import thread_environment
from slipstream.errors import TransportError
from slipstream.launch.bench.counters import Growth
from slipstream.launch.on_gpu import Gpu
from slipstream.plan.memory_processes import DRAFTER_BUFFERS
from slipstream.transport.broker import Broker
from slipstream.transport.connections import connection_pair
from slipstream.transport.host_slots import HostSlots, lock_slots
from slipstream.transport.layout import SlotLayout
from slipstream.transport.ledger import PackOrder
from slipstream.transport.operations import DeviceSlot
from slipstream.transport.planned import PlannedUse
from slipstream.transport.slots import SlotPool
from slipstream.transport.staged import StagedSource

CHILD_SECONDS = 120
CEILING_COPIES = 24
"""Copies of a slot in one measurement of the ceilings: launching the first and ending the last is then a hundredth of it."""


@dataclass(frozen=True, slots=True)
class TransportWork:
    """What is sent: `packs` at full speed, of which the first `warmup` are not timed, then `beside` packs of a busy target.

    A slot is `[tokens, taps, hidden_size]` in bf16. `products` of side 8192 stand for the forward of one pack.
    """

    tokens: int = 16384
    taps: int = 5
    hidden_size: int = 5120
    host_slots: int = 6
    packs: int = 60
    warmup: int = 12
    beside: int = 8
    products: int = 200

    @property
    def layout(self) -> SlotLayout:
        """One slot."""
        return SlotLayout(self.tokens, self.taps, self.hidden_size, "bfloat16")


@dataclass(frozen=True, slots=True)
class TransportBench:
    """Speeds in GB/s (10⁹ bytes). `both` is the ceiling: out and in at once. `travelled` counts each byte out and in.

    `ratio` = travelled / both. `slowdown` is by how much of itself a target's time grew beside the transport. `growth`:
    allocations of the drafter's process after the warm-up; `lock_seconds`: page-locking all slots, in each process.
    """

    slot_bytes: int
    out: float
    into: float
    both: float
    travelled: float
    ratio: float
    slowdown: float
    seals_rejected: int
    lock_seconds: float
    growth: dict[str, int]


def bench_transport(work: TransportWork, *, report: Callable[[str], None] = lambda text: None) -> TransportBench:
    """Run all three; about half a minute. Raises `TransportError` when the other process fails."""
    gpu, layout = Gpu.open(), work.layout
    memory = SharedMemory.create(layout.nbytes * work.host_slots)
    order = [PackOrder(pack_id=i, rank=0, slot=i % work.host_slots) for i in range(work.packs + work.beside)]
    broker = Broker(order=order, slot_bytes=layout.nbytes)
    broker.start()
    child = _start_child(work, broker=broker, memory=memory)
    try:
        began = time.perf_counter()
        pool = SlotPool.shared(layout, work.host_slots, memory)
        host = lock_slots(pool, order=range(work.host_slots), streams=gpu.streams, operations=gpu.operations)
        for slot in range(work.host_slots):
            host.locked.ensure(slot)
        lock_seconds = time.perf_counter() - began
        report(f"{work.host_slots} slots of {layout.nbytes / 1e6:.0f} MB page-locked in {lock_seconds:.1f} s")
        out, into, both = _ceilings(gpu, host=host, device_slots=gpu.slots(layout, 2))
        report(f"ceilings: out {out:.1f}, in {into:.1f}, both at once {both:.1f} GB/s")
        seconds, source, growth = _receive(gpu, work=work, broker=broker, host=host, child=child)
        travelled = 2 * (work.packs - work.warmup) * layout.nbytes / seconds / 1e9
        report(f"travelled at {travelled:.1f} GB/s")
        said = _said(child)
        rejected = source.stats().seals_rejected
        source.close()
    finally:
        broker.close()
        child.kill()
        child.wait()
        memory.close()
    return TransportBench(
        slot_bytes=layout.nbytes,
        out=out,
        into=into,
        both=both,
        travelled=travelled,
        ratio=travelled / both,
        slowdown=said["beside_ms"] / said["alone_ms"] - 1,
        seals_rejected=rejected,
        lock_seconds=lock_seconds,
        growth=growth,
    )


def _start_child(work: TransportWork, *, broker: Broker, memory: SharedMemory) -> subprocess.Popen[str]:
    ours, theirs = connection_pair()
    told = {"work": asdict(work), "connection": theirs.fileno(), "memory": memory.fd}
    child = subprocess.Popen(
        [sys.executable, "-m", "slipstream.launch.bench.transport_child", json.dumps(told)],
        pass_fds=[theirs.fileno(), memory.fd],
        env=thread_environment(2, base=os.environ),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    theirs.close()
    broker.attach_producer("target", ours)
    return child


def _ceilings(gpu: Gpu, *, host: HostSlots, device_slots: list[DeviceSlot]) -> tuple[float, float, float]:
    """GB/s out alone, in alone, and both at once: each the fastest of five times `CEILING_COPIES` slots."""
    out, into = gpu.streams.side("ceiling out"), gpu.streams.side("ceiling in")
    source, target = (slot.hidden_TKD for slot in device_slots)
    assert host.pool.num_slots >= 4, "two slots each way, so that none is written while it is read"

    def seconds(*, outwards: bool, inwards: bool) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for turn in range(CEILING_COPIES):
            if outwards:
                with gpu.streams.within(out):
                    host.pool.hidden(turn % 2).copy_(source, non_blocking=True)
            if inwards:
                with gpu.streams.within(into):
                    target.copy_(host.pool.hidden(2 + turn % 2), non_blocking=True)
        torch.cuda.synchronize()
        return time.perf_counter() - began

    def speed(directions: int, *, outwards: bool, inwards: bool) -> float:
        found = [seconds(outwards=outwards, inwards=inwards) for _ in range(6)][1:]
        return directions * CEILING_COPIES * source.nbytes / min(found) / 1e9

    return (
        speed(1, outwards=True, inwards=False),
        speed(1, outwards=False, inwards=True),
        speed(2, outwards=True, inwards=True),
    )


def _receive(
    gpu: Gpu, *, work: TransportWork, broker: Broker, host: HostSlots, child: subprocess.Popen[str]
) -> tuple[float, StagedSource, dict[str, int]]:
    """Take all packs; the seconds between the last of the warm-up and the last at full speed, and what was allocated then."""
    ours, theirs = connection_pair()
    source = StagedSource(
        connection=theirs,
        host=host,
        buffers=gpu.buffers(work.layout, DRAFTER_BUFFERS),
        guest=None,
        uses=[PlannedUse(pack_id=i, is_last=True) for i in range(work.packs + work.beside)],
        streams=gpu.streams,
        operations=gpu.operations,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    if child.stdout.readline().strip() != "ready":
        raise TransportError(f"the target's process ended with {child.wait()} before it was ready")
    broker.attach_consumer("drafter", 0, ours)
    with Growth() as grown:
        child.stdin.write("go\n")
        child.stdin.flush()
        for pack_id in range(work.packs + work.beside):
            source.take(pack_id)
            if pack_id == work.warmup - 1:
                began = time.perf_counter()
                grown.begin()
            if pack_id == work.packs - 1:
                seconds, growth = time.perf_counter() - began, grown.so_far()
            source.release(pack_id)
    return seconds, source, growth


def _said(child: subprocess.Popen[str]) -> dict[str, float]:
    """What the other process measured."""
    said, _ = child.communicate(timeout=CHILD_SECONDS)
    if child.returncode != 0:
        raise TransportError(f"the target's process ended with {child.returncode}")
    found: dict[str, float] = json.loads(said.splitlines()[-1])
    return found
