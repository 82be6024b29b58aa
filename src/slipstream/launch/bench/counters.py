"""Counters that must not grow after warm-up, and the trace of one step: where device time goes, what makes the CPU wait."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import torch
from torch._C._autograd import DeviceType
from torch._dynamo.utils import counters as dynamo_counters
from torch.profiler import ProfilerActivity, profile

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

WAITS = re.compile(r"cuda(StreamSynchronize|EventSynchronize|Memcpy|Malloc|Free|HostAlloc|MallocHost|HostRegister)$|Pageable")


def counters() -> dict[str, int]:
    """Device segments and allocations asked of the driver, retries, pinned allocations, and compiled graphs, so far."""
    device, host = torch.cuda.memory_stats(), torch.cuda.host_memory_stats()
    return {
        "device segments": int(device["segment.all.allocated"]),
        "device allocations": int(device["num_device_alloc"]),
        "retries": int(device["num_alloc_retries"]),
        "pinned allocations": int(host["num_host_alloc"]),
        "compiled graphs": int(dynamo_counters["stats"]["unique_graphs"]),
    }


def profile_kernels(work: Callable[[], object]) -> tuple[dict[str, float], dict[str, int]]:
    """Milliseconds by kind of kernel, then by the ten longest kernels; and the calls and copies that wait, counted."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        work()
        torch.cuda.synchronize()
    groups: dict[str, float] = dict.fromkeys((*GROUPS, "other"), 0.0)
    kernels: list[tuple[float, str]] = []
    calls: dict[str, int] = {}
    for event in trace.key_averages():
        if WAITS.search(event.key):
            calls[event.key] = event.count
        is_kernel = event.device_type == DeviceType.CUDA and not event.key.startswith(("##", "Torch-Compiled"))
        if is_kernel and event.self_device_time_total > 0:
            spent = event.self_device_time_total / 1e3
            group = next((name for name, pattern in GROUPS.items() if re.search(pattern, event.key)), "other")
            groups[group] += spent
            kernels.append((spent, f"{event.count} x {event.key[:70]}"))
    return groups | {name: spent for spent, name in sorted(kernels, reverse=True)[:14]}, calls
