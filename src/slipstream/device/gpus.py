"""What the CUDA driver says of the visible GPUs: name, memory, place on the PCI bus. No torch, and no context is made."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

_NAME_BYTES = 256
_PCI_BYTES = 32


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One visible GPU. `pci_id` is its address as sysfs writes it, "0000:3b:00.0"; None for what the driver does not say."""

    index: int
    name: str | None
    memory_bytes: int | None
    pci_id: str | None


def visible_gpus(*, driver: Any = None) -> tuple[GpuFacts, ...]:
    """The GPUs that the driver shows this process, in its order (CUDA_VISIBLE_DEVICES counts); none without a driver."""
    try:
        driver = driver or ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ()
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return ()
    return tuple(_facts(driver, index) for index in range(count.value))


def _facts(driver: Any, index: int) -> GpuFacts:
    device = ctypes.c_int(0)
    if driver.cuDeviceGet(ctypes.byref(device), index) != 0:
        return GpuFacts(index=index, name=None, memory_bytes=None, pci_id=None)
    name, pci_id = ctypes.create_string_buffer(_NAME_BYTES), ctypes.create_string_buffer(_PCI_BYTES)
    memory = ctypes.c_size_t(0)
    has_name = driver.cuDeviceGetName(name, _NAME_BYTES, device) == 0
    has_memory = driver.cuDeviceTotalMem_v2(ctypes.byref(memory), device) == 0
    has_place = driver.cuDeviceGetPCIBusId(pci_id, _PCI_BYTES, device) == 0
    return GpuFacts(
        index=index,
        name=name.value.decode() if has_name else None,
        memory_bytes=memory.value if has_memory else None,
        pci_id=pci_id.value.decode().lower() if has_place else None,
    )
