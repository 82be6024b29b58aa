"""On CUDA: what a bench fails on is seen when it happens, and nothing of the bench's own is taken for it."""

from __future__ import annotations

import pytest
import torch

from slipstream.launch.bench.counters import MEASURED, Growth, profile_kernels

pytestmark = pytest.mark.gpu


def test_a_bench_hears_what_is_compiled_and_allocated_late() -> None:
    work = torch.compile(lambda values: values.cos() * 3 + values.sin())
    ready = torch.ones(4096, device="cuda")
    work(ready)
    torch.cuda.empty_cache()
    with Growth() as grown:
        work(ready)
        assert not any(grown.so_far().values()), grown.so_far()
        torch.compile(lambda values: values.exp() * 5 - values.tanh())(ready)
        kept = (
            torch.empty(256 << 20, dtype=torch.uint8, device="cuda"),
            torch.empty(80 << 20, dtype=torch.uint8, pin_memory=True),
        )
        names = {name for name, count in grown.so_far().items() if count}
    assert {"recompiles", "device segments", "device allocations", "pinned allocations"} <= names, names
    del kept


def test_a_bench_hears_triton() -> None:
    """The optimizer's kernel at sizes of a block that nothing else uses."""
    from slipstream.trainer.optim_kernel import _accumulate

    total, gradient = torch.zeros(256, device="cuda"), torch.ones(256, device="cuda")

    def add(block: int) -> None:
        _accumulate[(256 // block,)](total, gradient, 256, overwrite=False, block=block, num_warps=8)

    add(64)
    with Growth() as grown:
        add(64)
        assert grown.so_far()["triton compiles"] == 0
        add(128)
        assert grown.so_far()["triton compiles"] > 0
    assert total.tolist() == [3.0] * 256


def test_waits_of_the_measured_work_are_counted_and_the_traces_own_are_not() -> None:
    values, taken = torch.ones(1 << 20, device="cuda"), torch.ones(1 << 20)
    event = torch.cuda.Event()

    def launch() -> None:
        (values * 2).sum()

    profile_kernels(launch)  # what the profiler and the allocator do once
    kernels, calls = profile_kernels(launch)
    assert calls == {}
    assert kernels["torch elementwise"] > 0
    assert not any(MEASURED in name for name in kernels), kernels

    def work() -> None:
        torch.cuda.synchronize()
        values.sum().item()
        event.record()
        event.synchronize()
        values.copy_(taken)

    _, calls = profile_kernels(work)
    names = {name.split("_")[0] for name in calls}
    assert {"cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize"} <= names, calls
    assert any("Pageable" in name for name in calls), calls
