"""cuDNN's attention is kept out of processes that use a GPU, and left alone elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from slipstream.device.sdpa import forbid_plans_by_shape


@pytest.fixture(autouse=True)
def _setting() -> Iterator[None]:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    yield
    torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.mark.parametrize(("device", "allowed"), [("cpu", True), ("cuda", False), ("cuda:1", False)])
def test_only_a_gpu_forbids_it(device: str, allowed: bool) -> None:
    forbid_plans_by_shape(device)
    assert torch.backends.cuda.cudnn_sdp_enabled() is allowed
    assert torch.backends.cuda.flash_sdp_enabled()
    assert torch.backends.cuda.mem_efficient_sdp_enabled()
    assert torch.backends.cuda.math_sdp_enabled()
