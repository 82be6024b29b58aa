"""GPU samples against a driver that is made up: units, counters where there are any, faults that are said once."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from slipstream.observe.gpus import GpuSampler, open_gpu_sampler

UUIDS = {0: "GPU-a", 3: "GPU-b"}


class Driver:
    """Two GPUs as `pynvml` shows them: "GPU-a" has GPM counters. Structures and constants are the module's own."""

    NVMLError = pynvml.NVMLError

    def __init__(self) -> None:
        self.samples: list[int] = []
        self.asked: list[tuple[int, ...]] = []
        self.freed = self.shut_down = self.initialised = 0
        self.broken: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(pynvml, name)

    def nvmlInit(self) -> None:
        self._check("init")
        self.initialised += 1

    def nvmlShutdown(self) -> None:
        self.shut_down += 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self._check("handle")
        return uuid

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:
        return SimpleNamespace(used=30 << 30, total=141 << 30)

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> SimpleNamespace:
        return SimpleNamespace(gpu=97)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        self._check("power")
        return 612_500

    def nvmlDeviceGetPcieThroughput(self, handle: str, counter: int) -> int:
        return {pynvml.NVML_PCIE_UTIL_TX_BYTES: 2_000, pynvml.NVML_PCIE_UTIL_RX_BYTES: 5_000}[counter]

    def nvmlGpmQueryDeviceSupport(self, handle: str) -> SimpleNamespace:
        return SimpleNamespace(isSupportedDevice=handle == "GPU-a")

    def nvmlGpmSampleAlloc(self) -> Any:
        self.samples.append(len(self.samples))
        return pynvml.c_nvmlGpmSample_t()

    def nvmlGpmSampleFree(self, sample: Any) -> None:
        self.freed += 1

    def nvmlGpmSampleGet(self, handle: str, sample: Any) -> None:
        self._check("gpm")

    def nvmlGpmMetricsGet(self, query: Any) -> None:
        assert query.version == pynvml.NVML_GPM_METRICS_GET_VERSION
        values = {2: 88.5, 5: 61.0, 20: 3.0, 21: 7.5}
        self.asked.append(tuple(query.metrics[place].metricId for place in range(query.numMetrics)))
        for place in range(query.numMetrics):
            query.metrics[place].value = values[query.metrics[place].metricId]
            query.metrics[place].nvmlReturn = 0

    def _check(self, what: str) -> None:
        if what in self.broken:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


def sampled(driver: Driver, path: Path, *, count: int = 3) -> list[dict[str, Any]]:
    """Lines of at least `count` rounds."""
    with GpuSampler(uuids=UUIDS, path=path, nvml=driver, every_seconds=0.01):
        deadline = time.monotonic() + 30
        while path.read_text().count("\n") < 2 * count and time.monotonic() < deadline:
            time.sleep(0.01)
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_of_a_gpu_with_counters_and_of_one_without(tmp_path: Path) -> None:
    driver = Driver()
    lines = sampled(driver, tmp_path / "gpus.jsonl")
    with_counters, without = lines[0], lines[1]
    assert abs(with_counters.pop("time") - time.time()) < 60
    assert with_counters == {
        "gpu": 0,
        "utilisation": 0.97,
        "sm_active": 0.885,
        "tensor_active": 0.61,
        "memory_bytes": 30 << 30,
        "memory_total_bytes": 141 << 30,
        "power_watts": 612.5,
        "pcie_tx_bytes_per_second": 3 << 20,
        "pcie_rx_bytes_per_second": 7.5 * 2**20,
    }
    assert without["gpu"] == 3
    assert (without["sm_active"], without["tensor_active"]) == (None, None)
    assert (without["pcie_tx_bytes_per_second"], without["pcie_rx_bytes_per_second"]) == (2_000_000, 5_000_000)
    assert set(driver.asked) == {(2, 5, 20, 21)}
    assert (len(driver.samples), driver.freed, driver.shut_down) == (2, 2, 1)


def test_what_a_gpu_refuses_is_null_and_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    driver = Driver()
    driver.broken = {"power", "gpm"}
    with caplog.at_level(logging.INFO, logger="slipstream"):
        lines = sampled(driver, tmp_path / "gpus.jsonl")
    assert {line["power_watts"] for line in lines} == {None}
    assert {line["sm_active"] for line in lines} == {None}
    assert {line["utilisation"] for line in lines} == {0.97}
    assert sum("GPU 0 gives no power" in record.getMessage() for record in caplog.records) == 1
    assert sum("GPU 0 gives no gpm" in record.getMessage() for record in caplog.records) == 1


def test_counters_that_fail_later_come_back(tmp_path: Path) -> None:
    driver, path = Driver(), tmp_path / "gpus.jsonl"
    with GpuSampler(uuids=UUIDS, path=path, nvml=driver, every_seconds=0.01):
        for broken in (set(), {"gpm"}, set()):
            driver.broken = broken
            before = path.read_text().count("\n")
            deadline = time.monotonic() + 30
            while path.read_text().count("\n") < before + 4 and time.monotonic() < deadline:
                time.sleep(0.01)
    active = [line["sm_active"] for line in map(json.loads, path.read_text().splitlines()) if line["gpu"] == 0]
    assert active[0] == active[-1] == 0.885
    assert None in active


@pytest.mark.parametrize("broken", ["init", "handle"])
def test_without_nvml_nothing_is_written_and_it_is_said(broken: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    driver = Driver()
    driver.broken = {broken}
    with caplog.at_level(logging.INFO, logger="slipstream"):
        assert open_gpu_sampler(uuids=UUIDS, path=tmp_path / "gpus.jsonl", nvml=driver) is None
    assert [record.getMessage() for record in caplog.records] == ["GPUs are not sampled: Not Supported"]
    assert driver.initialised == driver.shut_down
    assert not (tmp_path / "gpus.jsonl").exists()


def test_a_disk_that_fails_ends_sampling_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("needs /dev/full")
    sampler = GpuSampler(uuids=UUIDS, path=full, nvml=Driver(), every_seconds=0.005)
    time.sleep(0.1)
    sampler.close()
    assert sum("sampled no more" in record.getMessage() for record in caplog.records) == 1
