"""Which kind of device is there, asked of the driver itself: importing torch alone would take longer than preflight may."""

from __future__ import annotations

import ctypes
import importlib.util
import re
import uuid
from pathlib import Path
from typing import Literal

from slipstream.errors import PreflightError

DeviceKind = Literal["cpu", "cuda"]

_CAPABILITY_ATTRIBUTES = (75, 76)
"""Of the driver's device attributes: major and minor compute capability."""


def device_kind(requested: Literal["auto", "cpu", "cuda"]) -> DeviceKind:
    """The kind to run on. "auto" takes CUDA where a driver, a visible GPU and a torch built for CUDA are all there.

    PreflightError if "cuda" was asked for and something of it is missing; the message says what.
    """
    if requested == "cpu":
        return "cpu"
    missing = missing_for_cuda()
    if missing is None:
        return "cuda"
    if requested == "cuda":
        raise PreflightError(key="placement.device", value="cuda", rule=missing, hint='"cpu" or "auto" run here')
    return "cpu"


def missing_for_cuda() -> str | None:
    """What keeps CUDA from being used here, in words; None when nothing does."""
    if torch_cuda_version() is None:
        return "the installed torch is built without CUDA"
    if count_gpus() == 0:
        return "no GPU is visible to the CUDA driver"
    return None


def count_gpus() -> int:
    """GPUs that the CUDA driver shows this process (CUDA_VISIBLE_DEVICES counts); 0 without a driver. Makes no context."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def gpu_uuids() -> list[str]:
    """Names of the visible GPUs in the CUDA driver's order, "GPU-…", as NVML knows them; none without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    uuids = []
    for index in range(count_gpus()):
        device, raw = ctypes.c_int(0), (ctypes.c_ubyte * 16)()
        driver.cuDeviceGet(ctypes.byref(device), ctypes.c_int(index))
        if driver.cuDeviceGetUuid_v2(ctypes.byref(raw), device) != 0:
            return []
        uuids.append(f"GPU-{uuid.UUID(bytes=bytes(raw))}")
    return uuids


def compute_capability(gpu: int) -> tuple[int, int] | None:
    """Major and minor compute capability of a visible GPU, as the CUDA driver tells it; None where it does not."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, found = ctypes.c_int(0), (ctypes.c_int(0), ctypes.c_int(0))
    if driver.cuInit(0) != 0 or driver.cuDeviceGet(ctypes.byref(device), gpu) != 0:
        return None
    for number, attribute in zip(found, _CAPABILITY_ATTRIBUTES, strict=True):
        if driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, device) != 0:
            return None
    return found[0].value, found[1].value


def torch_cuda_version() -> str | None:
    """CUDA version the installed torch is built for, read from its version file without importing it; None for a CPU build."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = (Path(spec.origin).parent / "version.py").read_text()
    found = re.search(r"^cuda\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", text, flags=re.MULTILINE)
    return found.group(1) if found else None
