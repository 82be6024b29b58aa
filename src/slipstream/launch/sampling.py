"""What the supervisor samples while a run lasts, about once a second: the GPUs, and the queues between its children."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from slipstream.device.kind import gpu_uuids
from slipstream.launch.planning import RunPlan
from slipstream.launch.preflight import Preflight
from slipstream.launch.queues import QueueSampler
from slipstream.launch.runbook import RunBook
from slipstream.observe.gpus import open_gpu_sampler
from slipstream.transport.broker import Broker


def sampled_gpus(flight: Preflight) -> AbstractContextManager[object]:
    """The run's GPUs, into its folder; nothing on a CPU, nor without NVML, which is said."""
    indices = sorted({process.gpu for process in flight.placement.processes if process.gpu is not None})
    if not indices:
        return nullcontext()
    names = gpu_uuids()
    uuids = {index: names[index] for index in indices if index < len(names)}
    return open_gpu_sampler(uuids=uuids, path=flight.folder.gpus) or nullcontext()


def sampled_queues(broker: Broker | None, *, book: RunBook, plan: RunPlan, slot_bytes: int) -> AbstractContextManager[object]:
    """The queues that a broker serves, into the run's book; where there is none, the processes report their own."""
    if broker is None:
        return nullcontext()
    return QueueSampler(
        depths=broker.depths,
        trained=lambda: book.trained,
        schedule=plan.schedule,
        start_step=plan.start_step,
        slot_bytes=slot_bytes,
        put=book.queues.write,
    )
