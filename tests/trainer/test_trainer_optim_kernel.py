"""AdamW's kernel against the plain update: on CUDA, or on a CPU in Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import os

import pytest
import torch

from slipstream.trainer.optim import torch_accumulate, torch_update

pytest.importorskip("triton", reason="only CUDA builds of torch bring Triton")
from slipstream.trainer.optim_kernel import BLOCK, accumulate, update

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [pytest.mark.gpu] if not INTERPRETED else []
DEVICE = "cpu" if INTERPRETED else "cuda"


def buffers(size: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator(device=DEVICE).manual_seed(size)
    draw = [torch.randn(size, generator=generator, device=DEVICE) for _ in range(4)]
    master = draw[0]
    return {
        "master": master,
        "exp_avg": draw[1] * 1e-2,
        "exp_avg_sq": draw[2].square() * 1e-4,
        "gradient": draw[3],
        "compute": master if dtype == torch.float32 else master.to(dtype),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("good", [True, False])
@pytest.mark.parametrize(("size", "num_decayed"), [(64, 0), (BLOCK + 192, BLOCK + 64), (3 * BLOCK, BLOCK // 2)])
def test_equals_the_plain_update(size: int, num_decayed: int, good: bool, dtype: torch.dtype) -> None:
    results, scalars = [], torch.tensor([0.3, 1e-2, 0.2, float(good), 0.9], device=DEVICE)
    before = buffers(size, dtype)
    for function in (torch_update, update):
        given = buffers(size, dtype)
        if not good:
            given["gradient"][3] = float("nan")
        function(**given, scalars=scalars, num_decayed=num_decayed, betas=(0.9, 0.95), eps=1e-8)
        results.append(given)
    for name in ("master", "exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(results[1][name], results[0][name], rtol=2e-6, atol=1e-7)
        assert torch.equal(results[1][name], before[name]) != good
    # the interpreter cuts to bf16 where the device rounds
    tolerance = {"rtol": 8e-3 if INTERPRETED else 0, "atol": 0.0}
    torch.testing.assert_close(results[1]["compute"], results[1]["master"].to(dtype), **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize("shape", [(64,), (3, BLOCK + 7), (128, 96)])
def test_sums_have_the_bits_of_torchs(shape: tuple[int, ...], overwrite: bool, dtype: torch.dtype) -> None:
    """What is not finite among them: a step that is skipped was summed up too. Rows of another order are no other gradient."""
    generator = torch.Generator(device=DEVICE).manual_seed(1)
    gradient = torch.randn(shape, generator=generator, device=DEVICE).to(dtype)
    gradient.view(-1)[3], gradient.view(-1)[5] = float("nan"), float("inf")
    if len(shape) > 1:
        gradient = gradient.t().contiguous().t()
        assert not gradient.is_contiguous()
    sums = [torch.randn(shape, generator=generator.manual_seed(2), device=DEVICE) for _ in range(2)]
    sums[1].view(-1)[4] = sums[0].view(-1)[4] = float("nan")
    torch_accumulate(sums[0], gradient, overwrite=overwrite)
    accumulate(sums[1], gradient, overwrite=overwrite)
    torch.testing.assert_close(sums[1], sums[0], rtol=0, atol=0, equal_nan=True)
    assert torch.isfinite(sums[1].view(-1)[4]) == overwrite
