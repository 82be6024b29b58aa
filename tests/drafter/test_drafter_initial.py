"""A new drafter's weights: whatever they are drawn in, the values are those of one draw a matrix."""

from __future__ import annotations

import pytest
import torch

from slipstream.drafter import initial
from slipstream.drafter.initial import BLOCK, draw_weights

PIECE = 64
SIZES = [1, 3, 15, 16, 17, 63, 64, 65, 79, 80, 81, 128, 143, 144, 145, 1000]
FIRST = [-0.01640268974006176, 0.007912622764706612, 0.01797816902399063]
"""Three weights of seed 7 and deviation 0.02 as they always were: what runs begin with must not change unseen."""


def at_once(weights: list[torch.Tensor], *, seed: int, std: float) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.ones_like(weight) if weight.dim() == 1 else (torch.randn(weight.shape, generator=generator) * std).to(weight)
        for weight in weights
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pieces_are_drawn_as_the_whole(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(initial, "PIECE", PIECE)
    weights = [torch.empty(size, 1, dtype=dtype) for size in SIZES]
    weights[3:3] = [torch.empty(5, dtype=dtype), torch.empty(70, 3, dtype=dtype)]
    parts = len(list(draw_weights(weights, seed=3, std=0.02)))
    assert parts > len(weights) + 10
    for weight, wanted in zip(weights, at_once(weights, seed=3, std=0.02), strict=True):
        assert torch.equal(weight, wanted), tuple(weight.shape)


def test_pieces_hold_whole_blocks() -> None:
    assert initial.PIECE % BLOCK == PIECE % BLOCK == 0


def test_the_first_weights_are_fixed() -> None:
    weight = torch.empty(8, 16)
    list(draw_weights([weight], seed=7, std=0.02))
    assert weight.flatten()[:3].tolist() == pytest.approx(FIRST, rel=1e-6)


def test_torch_defaults_of_the_moment_change_nothing() -> None:
    """A model that loads in another thread sets them for the whole process."""
    plain, other = (torch.empty(20, 20, dtype=torch.float32, device="cpu") for _ in range(2))
    list(draw_weights([plain], seed=1, std=1.0))
    torch.set_default_dtype(torch.bfloat16)
    try:
        list(draw_weights([other], seed=1, std=1.0))
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(plain, other)


def test_gradients_are_asked_for_outside_alone() -> None:
    weight = torch.nn.Parameter(torch.empty(4, 4))
    for _ in draw_weights([weight], seed=1, std=1.0):
        assert torch.is_grad_enabled()
    assert weight.requires_grad
    assert weight.grad_fn is None
