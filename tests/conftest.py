"""Tests by several processes: threads of each, what they share, which files begin first.

On a GPU also: that one failed test does not fail the next.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator

import pytest

from slipstream.launch.kernel_cache import cache_settings

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
BEGIN = (
    "test_launch_verdict.py",  # times sleeping processes, beside the next, which is one process
    "test_decode.py",
    "test_launch_laws.py",
    "test_demo_run.py",
    "test_acceptance.py",
    "test_trainer_recorded.py",
    "test_launch_random_target.py",
    "test_event_order.py",
    "test_launch_served_answers.py",
    "test_launch_float8.py",
    "test_launch_sight.py",
)
"""Files of CPU tests that begin first, or the end would be one process alone with a long one."""
BEGIN_ON_GPU = (
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
    """Before torch is there: how many threads it takes; processes of pytest-xdist and their children inherit it.

    Without a GPU one thread, as matrices are tiny: a second one doubles the CPU time and wins nothing. On a GPU several
    processes share the cores out, since most of the time goes into compiling, and keep compiled kernels in one place.
    """
    if config.getoption("markexpr") != "gpu":
        for name in THREADS:
            os.environ.setdefault(name, "1")
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # for children with more: on busy cores, spinning takes seconds
        if "torch" in sys.modules:  # a conftest.py below the path that pytest was given has imported it
            sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        return
    cores = str(max(1, len(os.sched_getaffinity(0)) // (config.getoption("numprocesses", None) or 1)))
    for name in ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):
        os.environ.setdefault(name, cores)
    # the GPU's name would have to be asked of the driver, which must not be there before torch: traces then end in a fault
    os.environ.update(cache_settings(environ=os.environ, gpu_name=None))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What tests import never becomes garbage; to look through it again and again takes a fifth of their time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A file is the work of one process; the longest begin first."""
    ranks = [{name: place for place, name in enumerate(names)} for names in (BEGIN, BEGIN_ON_GPU)]

    def place(item: pytest.Item) -> int:
        rank = ranks[item.get_closest_marker("gpu") is not None]
        return rank.get(item.path.name, len(rank))

    items.sort(key=place)


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """A test that fails where synchronising is forbidden leaves it forbidden, for the whole process."""
    torch = sys.modules.get("torch")
    if item.get_closest_marker("gpu") and torch is not None and torch.cuda.is_initialized():
        torch.cuda.set_sync_debug_mode("default")
