"""What must not happen after warm-up, counted; and the trace of one step: where device time goes, what makes the CPU wait."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from slipstream.trainer.late_work import CudaWork

GROUPS: Mapping[str, str] = {
    "attention": r"flex_attention|triton_tem|flash|fmha",
    "delta rule": r"chunk_(?!cat)|recompute_w_u|l2norm",
    "convolution": r"conv1d",
    "row kernel": r"_row_pass",
    "adamw": r"_adamw",
    "matrix products": r"gemm|nvjet|cutlass|xmma|cublas|splitK",
    "compiled elementwise": r"^triton_|^_swiglu|^_gated_norm",
    "copies": r"^Memcpy|^Memset|copy",
    "torch elementwise": r"elementwise|reduce|index|cat|fill",
}
"""Kinds of kernel by a pattern of their names; the first that fits counts."""

WAITING_CALLS = re.compile(
    r"^cu(da)?(Stream|Device|Event|Ctx)Synchronize"
    r"|^cuda(Malloc|Free|HostAlloc|HostRegister|HostUnregister|MallocHost|FreeHost|MallocManaged)(_|$)"
    r"|^(cudaMemcpy|cudaMemset|cuMemcpy)(?!\w*Async)"
    r"|^cuMem(Alloc|Free|Create|Map|Unmap|Release|HostAlloc|HostRegister)"
)
"""Calls of the CUDA runtime and driver that wait for the device, or that ask for memory, which waits too."""

PAGEABLE = "Pageable"
"""In the name of a copy on the device from or to memory that is not page-locked: the call that made it waited."""

MEASURED = "slipstream: measured work"


class Span(Protocol):
    """When a traced event began and ended, in microseconds."""

    start: float
    end: float


class TracedEvent(Protocol):
    """What is read of an event of torch's profiler."""

    name: str
    device_type: DeviceType
    time_range: Span


class Growth:
    """How far counts grow that must not after warm-up. Listens, and counts, from when it is entered until it is left.

    Device segments, and all that `trainer.late_work.CudaWork` counts: graphs that Dynamo compiles, kernels that Triton
    compiles, loads or tunes, allocations asked of the driver. `knobs` as there.
    """

    def __init__(self, *, knobs: Any = None) -> None:
        self._knobs = knobs

    def __enter__(self) -> Growth:
        self._work = CudaWork(torch.device("cuda"), knobs=self._knobs)
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self._work.close()

    def begin(self) -> None:
        """Warm-up ends here, not where it was entered."""
        self._before = self._counts()

    def so_far(self) -> dict[str, int]:
        """By how much each count grew."""
        return {name: count - self._before[name] for name, count in self._counts().items()}

    def _counts(self) -> dict[str, int]:
        segments = int(torch.cuda.memory_stats()["segment.all.allocated"])
        late = {name.replace("_", " "): count for name, count in self._work.counts().items()}
        return {"device segments": segments, **late}


def profile_kernels(work: Callable[[], object]) -> tuple[dict[str, float], dict[str, int]]:
    """Milliseconds by kind of kernel, then by the longest kernels; and the work's calls and copies that wait, counted."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        with record_function(MEASURED):
            work()
        torch.cuda.synchronize()
    groups: dict[str, float] = dict.fromkeys((*GROUPS, "other"), 0.0)
    kernels: list[tuple[float, str]] = []
    for event in trace.key_averages():
        is_kernel = event.device_type == DeviceType.CUDA and not event.key.startswith(("##", "Torch-Compiled", MEASURED))
        if is_kernel and event.self_device_time_total > 0:
            spent = event.self_device_time_total / 1e3
            group = next((name for name, pattern in GROUPS.items() if re.search(pattern, event.key)), "other")
            groups[group] += spent
            kernels.append((spent, f"{event.count} x {event.key[:70]}"))
    named = groups | {name: spent for spent, name in sorted(kernels, reverse=True)[:14]}
    return named, waiting_calls(trace.events() or ())


def waiting_calls(events: Iterable[TracedEvent]) -> dict[str, int]:
    """Calls that wait, by any thread, while the measured work ran; and pageable copies, which the device makes later.

    What the profiler and its caller wait for when it is over lies behind the work's span.
    """
    events = list(events)
    (work,) = (event for event in events if event.name == MEASURED and event.device_type == DeviceType.CPU)
    first, last = work.time_range.start, work.time_range.end
    calls: dict[str, int] = {}
    for event in events:
        is_call = bool(WAITING_CALLS.search(event.name)) and first <= event.time_range.start <= last
        if is_call or PAGEABLE in event.name:
            calls[event.name] = calls.get(event.name, 0) + 1
    return calls
