"""Which device: what was asked for, what is there, and what is missing, in words."""

from __future__ import annotations

import pytest
import torch

from slipstream.device import kind
from slipstream.device.kind import count_gpus, device_kind, missing_for_cuda, torch_cuda_version
from slipstream.errors import PreflightError


def test_it_agrees_with_torch() -> None:
    assert torch_cuda_version() == torch.version.cuda
    assert (missing_for_cuda() is None) == torch.cuda.is_available()
    assert device_kind("auto") == ("cuda" if torch.cuda.is_available() else "cpu")
    assert device_kind("cpu") == "cpu"
    if torch.version.cuda is not None:
        assert count_gpus() == torch.cuda.device_count()


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
