"""What the driver says of each GPU of a run, about once a second, from the supervisor's process: no worker is asked.

`utilisation` only tells that some kernel ran in the window. `sm_active` and `tensor_active`, shares of multiprocessors and of
tensor cores at work, need GPM counters (Hopper and later). Units and meanings: NVML's reference, "GPM Functions".
"""

from __future__ import annotations

import importlib
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

MEBIBYTE = 2**20
PCIE_UNIT_BYTES = 1000
"""`nvmlDeviceGetPcieThroughput` counts in KB/s."""

Line = dict[str, float | int | None]


@dataclass(slots=True)
class _Gpu:
    """A GPU by its index among those of the run; two GPM samples where it has the counters."""

    index: int
    handle: Any
    samples: tuple[Any, Any] | None
    refused: set[str] = field(default_factory=set)


class GpuSampler:
    """Appends a line a GPU about once a second to a file of JSON lines, from a thread of its own.

    `uuids` are the run's GPUs by index, `nvml` is the module `pynvml`, initialised. What a GPU or a driver does not offer is
    null, and said once. A disk that fails is reported once. Raises `OSError` when the file cannot be opened.
    """

    def __init__(self, *, uuids: Mapping[int, str], path: Path, nvml: Any, every_seconds: float = 1.0) -> None:
        self._nvml, self._every_seconds = nvml, every_seconds
        self._gpus = [self._open(index, uuid) for index, uuid in sorted(uuids.items())]
        self._file = path.open("a", encoding="utf-8")
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu-samples", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Sample no more and let go of the driver. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._thread.join()
        for gpu in self._gpus:
            for sample in gpu.samples or ():
                self._ask(gpu, "gpm", partial(self._nvml.nvmlGpmSampleFree, sample))
        self._nvml.nvmlShutdown()
        with suppress(OSError):  # said when it was written to
            self._file.close()

    def __enter__(self) -> GpuSampler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, index: int, uuid: str) -> _Gpu:
        gpu = _Gpu(index=index, handle=self._nvml.nvmlDeviceGetHandleByUUID(uuid), samples=None)
        gpu.samples = self._ask(gpu, "gpm", lambda: self._open_counters(gpu))
        return gpu

    def _open_counters(self, gpu: _Gpu) -> tuple[Any, Any] | None:
        nvml = self._nvml
        if not nvml.nvmlGpmQueryDeviceSupport(gpu.handle).isSupportedDevice:
            return None
        first = nvml.nvmlGpmSampleAlloc()
        nvml.nvmlGpmSampleGet(gpu.handle, first)
        return first, nvml.nvmlGpmSampleAlloc()

    def _run(self) -> None:
        try:
            while not self._closing.wait(self._every_seconds):
                lines = [json.dumps(self._sample(gpu)) + "\n" for gpu in self._gpus]
                self._file.write("".join(lines))
                self._file.flush()
        except Exception:  # a thread's border: whatever a driver or a disk does, training goes on
            logger.warning("GPUs are sampled no more; training goes on", exc_info=True)

    def _sample(self, gpu: _Gpu) -> Line:
        nvml, handle = self._nvml, gpu.handle
        memory = self._ask(gpu, "memory", lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        busy = self._ask(gpu, "utilisation", lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        milliwatts = self._ask(gpu, "power", lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        return {
            "time": time.time(),
            "gpu": gpu.index,
            "utilisation": None if busy is None else busy / 100,
            "memory_bytes": None if memory is None else memory.used,
            "memory_total_bytes": None if memory is None else memory.total,
            "power_watts": None if milliwatts is None else milliwatts / 1000,
            **self._counters(gpu),
        }

    def _counters(self, gpu: _Gpu) -> Line:
        """By GPM's counters since the sample before; of a GPU without them only PCIe, over the last 20 ms."""
        found: Line | None = self._ask(gpu, "gpm", lambda: self._read_counters(gpu)) if gpu.samples is not None else None
        if found is not None:
            return found
        nvml = self._nvml
        sent, received = (
            self._ask(gpu, "pcie", partial(nvml.nvmlDeviceGetPcieThroughput, gpu.handle, unit))
            for unit in (nvml.NVML_PCIE_UTIL_TX_BYTES, nvml.NVML_PCIE_UTIL_RX_BYTES)
        )
        return {
            "sm_active": None,
            "tensor_active": None,
            "pcie_tx_bytes_per_second": None if sent is None else sent * PCIE_UNIT_BYTES,
            "pcie_rx_bytes_per_second": None if received is None else received * PCIE_UNIT_BYTES,
        }

    def _read_counters(self, gpu: _Gpu) -> Line:
        nvml = self._nvml
        assert gpu.samples is not None
        before, now = gpu.samples
        nvml.nvmlGpmSampleGet(gpu.handle, now)
        asked = {
            "sm_active": (nvml.NVML_GPM_METRIC_SM_UTIL, 1 / 100),
            "tensor_active": (nvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL, 1 / 100),
            "pcie_tx_bytes_per_second": (nvml.NVML_GPM_METRIC_PCIE_TX_PER_SEC, MEBIBYTE),
            "pcie_rx_bytes_per_second": (nvml.NVML_GPM_METRIC_PCIE_RX_PER_SEC, MEBIBYTE),
        }
        query = nvml.c_nvmlGpmMetricsGet_t()
        query.version, query.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, len(asked)
        query.sample1, query.sample2 = before, now
        for place, (metric, _) in enumerate(asked.values()):
            query.metrics[place].metricId = metric
        nvml.nvmlGpmMetricsGet(query)
        gpu.samples = (now, before)
        return {
            name: query.metrics[place].value * unit if query.metrics[place].nvmlReturn == nvml.NVML_SUCCESS else None
            for place, (name, (_, unit)) in enumerate(asked.items())
        }

    def _ask(self, gpu: _Gpu, what: str, question: Callable[[], Any]) -> Any:
        """The driver's answer; None, and said once, where it has none."""
        try:
            return question()
        except self._nvml.NVMLError as error:
            if what not in gpu.refused:
                gpu.refused.add(what)
                logger.info("GPU %d gives no %s: %s", gpu.index, what, error)
            return None


def open_gpu_sampler(*, uuids: Mapping[int, str], path: Path, nvml: Any = None) -> GpuSampler | None:
    """Sample the GPUs of a run, by index, from here on; None, and said once, where NVML is not there."""
    try:
        nvml = nvml or importlib.import_module("pynvml")  # here, not above: only a run on GPUs has a use for it
    except ImportError as error:
        logger.info("GPUs are not sampled: %s", error)
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        logger.info("GPUs are not sampled: %s", error)
        return None
    try:
        return GpuSampler(uuids=uuids, path=path, nvml=nvml)
    except nvml.NVMLError as error:
        logger.info("GPUs are not sampled: %s", error)
        nvml.nvmlShutdown()
        return None
