"""The target's process of `bench transport`: sends packs at full speed, then beside its own matrix products.

Told by one argument, JSON: `work`, and the descriptors of `connection` and `memory`. Says "ready", waits for a line, and says
in the end, as JSON, the milliseconds of its products `alone` and `beside` the transport, seals included.
"""

from __future__ import annotations

import json
import sys

import torch

from slipstream.device.shared import SharedMemory
from slipstream.launch.bench.transport import TransportWork
from slipstream.launch.on_gpu import Gpu
from slipstream.plan.memory_processes import TARGET_SLOTS
from slipstream.transport.connections import connection_from_fd
from slipstream.transport.host_slots import lock_slots
from slipstream.transport.shared import SharedSink
from slipstream.transport.slots import SlotPool
from slipstream.transport.staged import StagedSink

SIDE = 8192


class Products:
    """A busy target: bf16 matrix products on the current stream."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._left, self._right = (torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        self._product = torch.empty_like(self._left)

    def launch(self) -> None:
        """The forward of one pack."""
        for _ in range(self._count):
            torch.mm(self._left, self._right, out=self._product)

    def alone(self, packs: int) -> float:
        """Milliseconds of that many, nothing leaving."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(packs):
            self.launch()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))


def say(text: str) -> None:
    """One line for the other process."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> None:
    """Play the target."""
    told = json.loads(sys.argv[1])
    work = TransportWork(**told["work"])
    gpu, layout = Gpu.open(), work.layout
    pool = SlotPool.shared(layout, work.host_slots, SharedMemory.attach(told["memory"], layout.nbytes * work.host_slots))
    host = lock_slots(pool, order=range(work.host_slots), streams=gpu.streams, operations=gpu.operations)
    for slot in range(work.host_slots):
        host.locked.ensure(slot)
    slots = gpu.slots(layout, TARGET_SLOTS)
    for device_slot in slots:
        device_slot.hidden_TKD.normal_()
    connection = connection_from_fd(told["connection"])
    sink = StagedSink(
        sink=SharedSink(connection=connection, pools=(), fingerprint="bench"),
        hosts=[host],
        slots=slots,
        streams=gpu.streams,
        operations=gpu.operations,
    )
    products = Products(work.products)
    products.launch()
    torch.cuda.synchronize()
    say("ready")
    sys.stdin.readline()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before = 0.0
    while (assignment := sink.acquire()) is not None:
        if assignment.pack_id == work.packs:  # what was sent at full speed has left the loop, not yet the device
            torch.cuda.synchronize()
            before = products.alone(work.beside)
            begin.record()
        if assignment.pack_id >= work.packs:
            products.launch()
        sink.hidden(assignment)[0].fill_(assignment.pack_id)
        sink.publish(assignment)
        if assignment.pack_id == work.packs + work.beside - 1:
            end.record()
    torch.cuda.synchronize()
    beside = begin.elapsed_time(end)
    after = products.alone(work.beside)
    sink.close()
    say(json.dumps({"alone_ms": (before + after) / 2, "beside_ms": beside}))


if __name__ == "__main__":
    main()
