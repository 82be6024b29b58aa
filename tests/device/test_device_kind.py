"""Which device: what was asked for, what is there, and what is missing, in words."""

from __future__ import annotations

import pytest
import torch

from slipstream.device import kind
from slipstream.device.kind import compute_capability, count_gpus, device_kind, missing_for_cuda, torch_cuda_version
from slipstream.errors import PreflightError


def test_it_agrees_with_torch() -> None:
    assert torch_cuda_version() == torch.version.cuda
    assert (missing_for_cuda() is None) == torch.cuda.is_available()
    assert device_kind("auto") == ("cuda" if torch.cuda.is_available() else "cpu")
    assert device_kind("cpu") == "cpu"
    if torch.version.cuda is not None:
        assert count_gpus() == torch.cuda.device_count()
    capability = torch.cuda.get_device_capability(0) if torch.cuda.is_available() else None
    assert compute_capability(0) == capability
    assert compute_capability(10_000) is None


@pytest.mark.parametrize(
    ("version", "gpus", "missing"),
    [(None, 4, "built without CUDA"), ("13.0", 0, "no GPU is visible"), ("13.0", 2, None)],
)
def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, version: str | None, gpus: int, missing: str | None) -> None:
    monkeypatch.setattr(kind, "torch_cuda_version", lambda: version)
    monkeypatch.setattr(kind, "count_gpus", lambda: gpus)
    if missing is None:
        assert device_kind("auto") == device_kind("cuda") == "cuda"
        return
    assert device_kind("auto") == "cpu"
    with pytest.raises(PreflightError, match=f"placement.device = 'cuda': .*{missing}"):
        device_kind("cuda")


class Driver:
    """A CUDA driver that tells one GPU's compute capability."""

    def cuInit(self, flags: int) -> int:
        return 0

    def cuDeviceGet(self, device: object, index: int) -> int:
        return 0 if index == 0 else 101

    def cuDeviceGetAttribute(self, number: object, attribute: int, device: object) -> int:
        number._obj.value = {75: 8, 76: 9}[attribute]  # type: ignore[attr-defined]
        return 0


def test_compute_capability_is_what_the_driver_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kind.ctypes, "CDLL", lambda name: Driver())
    assert compute_capability(0) == (8, 9)
    assert compute_capability(1) is None
