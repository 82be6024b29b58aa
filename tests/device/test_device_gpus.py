"""What the driver says of GPUs, through a stand-in with its calls; and what a process took of one, where there is none."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from slipstream.device.allocated import allocated_memory, off_by
from slipstream.device.gpus import GpuFacts, visible_gpus

GPUS = (("NVIDIA H200", 150_000_000_000, "0000:3B:00.0"), ("NVIDIA L4", 24_000_000_000, "0000:AF:00.0"))


class Driver:
    """The calls of libcuda that are used, over `GPUS`; those named in `silent` fail."""

    def __init__(self, *silent: str) -> None:
        self.silent = silent

    def _code(self, name: str) -> int:
        return 100 if name in self.silent else 0

    def cuInit(self, _flags: int) -> int:
        return self._code("cuInit")

    def cuDeviceGetCount(self, count: Any) -> int:
        ctypes.cast(count, ctypes.POINTER(ctypes.c_int))[0] = len(GPUS)
        return 0

    def cuDeviceGet(self, device: Any, index: int) -> int:
        ctypes.cast(device, ctypes.POINTER(ctypes.c_int))[0] = index
        return self._code("cuDeviceGet")

    def cuDeviceGetName(self, name: Any, _size: int, device: Any) -> int:
        name.value = GPUS[device.value][0].encode()
        return self._code("cuDeviceGetName")

    def cuDeviceTotalMem_v2(self, memory: Any, device: Any) -> int:
        ctypes.cast(memory, ctypes.POINTER(ctypes.c_size_t))[0] = GPUS[device.value][1]
        return self._code("cuDeviceTotalMem_v2")

    def cuDeviceGetPCIBusId(self, pci_id: Any, _size: int, device: Any) -> int:
        pci_id.value = GPUS[device.value][2].encode()
        return self._code("cuDeviceGetPCIBusId")


def test_gpus_are_those_of_the_driver() -> None:
    assert visible_gpus(driver=Driver()) == (
        GpuFacts(index=0, name="NVIDIA H200", memory_bytes=150_000_000_000, pci_id="0000:3b:00.0"),
        GpuFacts(index=1, name="NVIDIA L4", memory_bytes=24_000_000_000, pci_id="0000:af:00.0"),
    )


@pytest.mark.parametrize(
    ("silent", "field"),
    [("cuDeviceGetName", "name"), ("cuDeviceTotalMem_v2", "memory_bytes"), ("cuDeviceGetPCIBusId", "pci_id")],
)
def test_what_the_driver_does_not_say_is_none(silent: str, field: str) -> None:
    missing = [
        name for name in ("name", "memory_bytes", "pci_id") if getattr(visible_gpus(driver=Driver(silent))[0], name) is None
    ]
    assert missing == [field]


def test_without_a_working_driver_there_are_none() -> None:
    assert visible_gpus(driver=Driver("cuInit")) == ()
    assert visible_gpus(driver=Driver("cuDeviceGet"))[1] == GpuFacts(index=1, name=None, memory_bytes=None, pci_id=None)


def test_a_process_without_a_gpu_took_nothing() -> None:
    import torch

    if not torch.cuda.is_available():
        assert allocated_memory() is None
    assert off_by(predicted=105, measured=100) == pytest.approx(0.05)
