"""What a bench fails on: compilations and allocations after warm-up, and calls of the measured work that wait."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, SimpleNamespace

import pytest
import torch
from torch._C._autograd import DeviceType
from torch.profiler import record_function

from slipstream.launch.bench.counters import MEASURED, WAITING_CALLS, Growth, profile_kernels, waiting_calls


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """What a driver was asked for so far."""
    counts = {"num_device_alloc": 5, "num_alloc_retries": 1, "num_host_alloc": 3, "segment.all.allocated": 7}
    for name in ("memory_stats", "memory_stats_as_nested_dict"):
        monkeypatch.setattr(torch.cuda, name, lambda _device=None: counts)
    monkeypatch.setattr(torch.cuda, "host_memory_stats", lambda: counts)
    return counts


def silent_knobs() -> SimpleNamespace:
    return SimpleNamespace(compilation=SimpleNamespace(listener=None), autotuning=SimpleNamespace(listener=None))


COUNTS = (
    "device segments",
    "recompiles",
    "triton compiles",
    "autotunes",
    "device allocations",
    "allocation retries",
    "pinned allocations",
)


def compile_kernel(knobs: SimpleNamespace, device: dict[str, int]) -> None:
    knobs.compilation.listener(src=SimpleNamespace(name="_row_pass"), cache_hit=False)


def load_kernel(knobs: SimpleNamespace, device: dict[str, int]) -> None:
    knobs.compilation.listener(src=SimpleNamespace(name="_row_pass"), cache_hit=True)


def tune_kernel(knobs: SimpleNamespace, device: dict[str, int]) -> None:
    knobs.autotuning.listener(fn=SimpleNamespace(__name__="chunk_fwd_kernel_o"))


def compile_graph(knobs: SimpleNamespace, device: dict[str, int]) -> None:
    def add(values: torch.Tensor) -> torch.Tensor:
        return values + 1

    fresh = FunctionType(add.__code__.replace(), globals())  # what is compiled belongs to the code, which is one otherwise
    torch.compile(fresh, backend="eager")(torch.zeros(3))


def ask_for(what: str) -> Callable[[SimpleNamespace, dict[str, int]], None]:
    def ask(knobs: SimpleNamespace, device: dict[str, int]) -> None:
        device[what] += 1

    return ask


LATE = {
    "triton compiles": compile_kernel,
    "triton compiles, from a cache": load_kernel,
    "autotunes": tune_kernel,
    "recompiles": compile_graph,
    "device segments": ask_for("segment.all.allocated"),
    "device allocations": ask_for("num_device_alloc"),
    "allocation retries": ask_for("num_alloc_retries"),
    "pinned allocations": ask_for("num_host_alloc"),
}


@pytest.mark.parametrize("name", LATE)
def test_what_comes_after_warm_up_is_counted_and_what_came_in_it_is_not(device: dict[str, int], name: str) -> None:
    knobs = silent_knobs()
    with Growth(knobs=knobs) as grown:
        LATE[name](knobs, device)
        assert sum(grown.so_far().values()) == 1
        grown.begin()
        assert grown.so_far() == dict.fromkeys(COUNTS, 0)
        LATE[name](knobs, device)
        assert grown.so_far() == dict.fromkeys(COUNTS, 0) | {name.split(",")[0]: 1}
    assert knobs.compilation.listener is knobs.autotuning.listener is None


def test_who_listened_before_still_hears_and_is_there_again(device: dict[str, int]) -> None:
    """Benches count beside the engine, which counts for itself."""
    knobs, heard = silent_knobs(), []
    before = knobs.compilation.listener = lambda **arguments: heard.append(arguments["src"].name)
    with Growth(knobs=knobs) as grown:
        compile_kernel(knobs, device)
        assert grown.so_far()["triton compiles"] == 1
    assert heard == ["_row_pass"]
    assert knobs.compilation.listener is before


@pytest.mark.parametrize(
    "name",
    [
        "cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaStreamSynchronize_ptsz",
        "cuCtxSynchronize", "cuStreamSynchronize", "cuEventSynchronize", "cuCtxSynchronize_v2",
        "cudaMalloc", "cudaFree", "cudaHostAlloc", "cudaMallocHost", "cudaFreeHost", "cudaHostRegister", "cudaHostUnregister",
        "cudaMemcpy", "cudaMemcpy2D", "cudaMemcpyToSymbol", "cudaMemset", "cuMemcpyDtoH_v2", "cuMemcpy",
        "cuMemAlloc_v2", "cuMemFree_v2", "cuMemCreate", "cuMemMap", "cuMemUnmap", "cuMemRelease", "cuMemHostAlloc",
    ],
)  # fmt: skip
def test_calls_that_wait(name: str) -> None:
    assert WAITING_CALLS.search(name)


@pytest.mark.parametrize(
    "name",
    [
        "cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch",
        "cudaMemcpyAsync", "cudaMemcpy2DAsync", "cudaMemcpyPeerAsync", "cudaMemsetAsync", "cuMemcpyHtoDAsync_v2",
        "cudaEventRecord", "cudaEventQuery", "cudaStreamWaitEvent", "cudaStreamIsCapturing", "cudaStreamGetCaptureInfo_v2",
        "cuMemGetInfo_v2", "cudaMemGetInfo", "cudaOccupancyMaxActiveBlocksPerMultiprocessor", "Memcpy HtoD (Pinned -> Device)",
        "aten::copy_", "cudaFuncGetAttributes",
    ],
)  # fmt: skip
def test_calls_that_do_not(name: str) -> None:
    assert not WAITING_CALLS.search(name)


@pytest.mark.filterwarnings("ignore:.*CUDA is not available")
def test_waits_of_the_measured_work_are_counted_and_the_traces_own_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the profiler itself; regions stand for the calls of a driver that is not here."""

    def call(name: str) -> None:
        with record_function(name):
            torch.ones(3)

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: call("cudaDeviceSynchronize"))
    _, calls = profile_kernels(lambda: call("cudaLaunchKernel"))
    assert calls == {}

    def work() -> None:
        for name in ("cudaStreamSynchronize", "cuEventSynchronize", "cudaStreamSynchronize", "cudaMemcpyAsync"):
            call(name)
        torch.cuda.synchronize()

    _, calls = profile_kernels(work)
    assert calls == {"cudaStreamSynchronize": 2, "cuEventSynchronize": 1, "cudaDeviceSynchronize": 1}


def test_a_pageable_copy_counts_whenever_the_device_makes_it() -> None:
    def event(name: str, start: float, end: float, device: DeviceType = DeviceType.CPU) -> SimpleNamespace:
        return SimpleNamespace(name=name, device_type=device, time_range=SimpleNamespace(start=start, end=end))

    events = [
        event("cudaDeviceSynchronize", 0, 5),  # before the work
        event(MEASURED, 10, 20),
        event(MEASURED, 15, 90, DeviceType.CUDA),  # the same span on the device, which runs behind
        event("cuCtxSynchronize", 19, 30),
        event("cudaStreamSynchronize", 21, 60),
        event("Memcpy HtoD (Pageable -> Device)", 70, 80, DeviceType.CUDA),
        event("Memcpy HtoD (Pinned -> Device)", 80, 85, DeviceType.CUDA),
    ]
    assert waiting_calls(events) == {"cuCtxSynchronize": 1, "Memcpy HtoD (Pageable -> Device)": 1}
