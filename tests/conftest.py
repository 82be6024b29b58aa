"""GPU tests in one run: what its processes share, which files begin first, and that one failed test does not fail the next."""

from __future__ import annotations

import os
import sys

import pytest

from slipstream.launch.kernel_cache import cache_settings

LONGEST_FIRST = (
    "test_target_engine_gpu.py",
    "test_trainer_gpu.py",
    "test_trainer_recorded_gpu.py",
    "test_launch_gpu.py",
    "test_transport_gpu.py",
    "test_target_float8_gpu.py",  # behind the other targets, whose tuned kernels it finds in the cache
    "test_target_recorded_gpu.py",
    "test_trainer_sight.py",
    "test_drafter_gpu.py",
)
"""Files of GPU tests by what they take, from two minutes to half a one; all others are short."""


def pytest_configure(config: pytest.Config) -> None:
    """Before torch is there: compiled kernels in one place for all processes and their children, cores shared out.

    Several processes, since most of the time goes into compiling, on the CPU; they inherit what is set by the first.
    """
    if config.getoption("markexpr") != "gpu":
        return
    cores = str(max(1, len(os.sched_getaffinity(0)) // (config.getoption("numprocesses", None) or 1)))
    for name in ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):
        os.environ.setdefault(name, cores)
    # the GPU's name would have to be asked of the driver, which must not be there before torch: traces then end in a fault
    os.environ.update(cache_settings(environ=os.environ, gpu_name=None))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A file of GPU tests is the work of one process; the longest begin first."""
    rank = {name: place for place, name in enumerate(LONGEST_FIRST)}

    def place(item: pytest.Item) -> int:
        return rank.get(item.path.name, len(rank)) if item.get_closest_marker("gpu") else len(rank)

    items.sort(key=place)


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """A test that fails where synchronising is forbidden leaves it forbidden, for the whole process."""
    torch = sys.modules.get("torch")
    if item.get_closest_marker("gpu") and torch is not None and torch.cuda.is_initialized():
        torch.cuda.set_sync_debug_mode("default")
