"""The row kernel against plain torch: on CUDA, or on a CPU in Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import os

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("triton", reason="only CUDA builds of torch bring Triton")
from slipstream.objective.row_kernel import row_pass

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [pytest.mark.gpu] if not INTERPRETED else []
DEVICE = "cpu" if INTERPRETED else "cuda"
SHAPES = [(5, 97), (9, 1000), (3, 20000)] if INTERPRETED else [(5, 97), (700, 1000), (264, 49152), (9, 151936), (3328, 248320)]


def rows(count: int, vocabulary: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and labels: the first row's label is its argmax, the last one's ties with a later one."""
    generator = torch.Generator(device=DEVICE).manual_seed(count)
    logits = (torch.randn(count, vocabulary, generator=generator, device=DEVICE) * 3).to(dtype)
    labels = torch.randint(1, vocabulary - 9, (count,), generator=generator, device=DEVICE)
    labels[0] = logits[0].argmax()
    logits[-1, labels[-1]] = logits[-1, labels[-1] + 7] = 60.0
    return logits, labels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("count", "vocabulary"), SHAPES)
def test_equals_softmax_and_cross_entropy(count: int, vocabulary: int, dtype: torch.dtype) -> None:
    logits, labels = rows(count, vocabulary, dtype)
    loss, hit = torch.full((count,), 7.0, device=DEVICE), torch.zeros(count, dtype=torch.bool, device=DEVICE)
    given = logits.clone()
    row_pass(logits, labels, loss_R=loss, hit_R=hit, gradient=False)
    assert torch.equal(logits, given), "without a gradient logits stay"
    silent = loss.clone()
    row_pass(logits, labels, loss_R=loss, hit_R=hit, gradient=True)
    assert torch.equal(loss, silent)
    for part in torch.arange(count, device=DEVICE).split(256):
        plain = given[part].float()
        wanted = F.cross_entropy(plain, labels[part], reduction="none")
        unit = plain.softmax(-1)
        unit[torch.arange(len(part)), labels[part]] -= 1.0
        torch.testing.assert_close(loss[part], wanted, rtol=1e-5, atol=1e-5)
        error = (logits[part].float() - unit).norm(dim=1) / unit.norm(dim=1)
        assert float(error.max()) < (1e-5 if dtype == torch.float32 else 8e-3)
        best = plain.amax(dim=1, keepdim=True)
        first = torch.where(plain == best, torch.arange(vocabulary, device=DEVICE), vocabulary).amin(dim=1)
        assert torch.equal(hit[part], first == labels[part])
    assert bool(hit[0])
    assert bool(hit[-1])


def test_the_later_of_two_largest_is_no_hit_and_nan_stays_in_its_row() -> None:
    logits, labels = rows(6, 1000, torch.bfloat16)
    logits[-1, labels[-1] - 1] = 60.0
    logits[2, 5] = float("nan")
    loss, hit = torch.zeros(6, device=DEVICE), torch.ones(6, dtype=torch.bool, device=DEVICE)
    row_pass(logits, labels, loss_R=loss, hit_R=hit, gradient=True)
    assert not bool(hit[-1])
    assert torch.isnan(loss).tolist() == [row == 2 for row in range(6)]
    assert not bool(hit[2])
    assert torch.isfinite(logits[[0, 1, 3, 4, 5]]).all()
