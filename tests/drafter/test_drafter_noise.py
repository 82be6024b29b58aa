"""Noise on hidden states: keyed, relative, scheduled."""

from __future__ import annotations

import pytest
import torch

from slipstream.config.recipe import ObjectiveSection
from slipstream.drafter import add_noise, noise_std


def noisy(hidden: torch.Tensor, *, std: float = 0.1, seed: int = 1, pack: int = 2, use: int = 3) -> torch.Tensor:
    return add_noise(hidden, std=std, seed=seed, pack_id=pack, use_number=use)


def test_noise_is_keyed_by_seed_pack_and_use() -> None:
    hidden = torch.randn(64, 3, 32)
    torch.manual_seed(0)
    first = noisy(hidden)
    torch.manual_seed(1)
    assert torch.equal(noisy(hidden), first)
    for other in (noisy(hidden, seed=4), noisy(hidden, pack=4), noisy(hidden, use=4)):
        assert not torch.equal(other, first)


def test_noise_is_relative_to_each_tokens_tap() -> None:
    scale = torch.tensor([0.01, 1.0, 1000.0])[None, :, None]
    hidden = torch.randn(256, 3, 64) * scale
    hidden[0] *= 10_000
    relative = (noisy(hidden, std=0.2) - hidden).square().mean(dim=-1).sqrt() / hidden.square().mean(dim=-1).sqrt()
    assert torch.allclose(relative.mean(dim=0), torch.full((3,), 0.2), rtol=0.05)
    assert torch.allclose(relative[0], torch.full((3,), 0.2), rtol=0.5)


def test_zero_noise_and_zero_rows_change_nothing() -> None:
    hidden = torch.randn(8, 2, 16).bfloat16()
    assert noisy(hidden, std=0.0) is hidden
    hidden[3] = 0
    result = noisy(hidden)
    assert not result[3].any()
    assert result.dtype == torch.bfloat16


@pytest.mark.parametrize(("step", "expected"), [(0, 0.4), (25, 0.3), (50, 0.2), (99, 0.2)])
def test_the_schedule_is_linear_then_flat(step: int, expected: float) -> None:
    objective = ObjectiveSection(noise_std=0.4, noise_end_std=0.2, noise_ratio=0.5)
    assert noise_std(objective=objective, step=step, num_steps=100) == pytest.approx(expected)
