"""The fused training pass against the modules, forward and backward, on a CPU, where both run on the same kernels."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from block_cases import Case, make_case, make_embedding, make_shape

from slipstream.config.recipe import LayerType
from slipstream.drafter import DFlashDrafter, build_drafter, elementwise
from slipstream.drafter.dflash import PASSES

LAYERS: list[tuple[Sequence[LayerType], int | None]] = [(("full",), None), (("sliding", "full", "full"), 9)]


def gradients(name: str, case: Case, layers: Sequence[LayerType], window: int | None) -> tuple[DFlashDrafter, torch.Tensor]:
    """A drafter with gradients of a loss that reads slots 1 to B - 1 only, and its output there."""
    drafter = build_drafter(
        shape=make_shape(layer_types=layers, window=window), dtype="float32", device="cpu", seed=3, attention="sdpa"
    )
    with torch.no_grad():
        for weight in drafter.parameters():
            weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(weight.numel())) * 0.1)
    masks = drafter.make_masks(case.batch)
    hidden = PASSES[name](drafter, case.hidden_TKD, case.batch, make_embedding(), masks)
    target = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(11))
    (hidden * target)[:, 1:].sum().backward()
    return drafter, hidden.detach()[:, 1:]


@pytest.mark.parametrize(("layers", "window"), LAYERS)
def test_fused_pass_equals_the_modules(layers: Sequence[LayerType], window: int | None) -> None:
    case = make_case()
    (plain, wanted), (fused, ours) = (gradients(name, case, layers, window) for name in ("cpu", "cuda"))
    assert close(ours, wanted)
    for (name, weight), other in zip(plain.named_parameters(), fused.parameters(), strict=True):
        assert weight.grad is not None
        assert other.grad is not None
        assert weight.grad.any(), name
        assert close(other.grad, weight.grad), name


def test_slot_zero_is_left_out_and_no_gradient_is_kept_in_validation() -> None:
    case = make_case()
    drafter = build_drafter(shape=make_shape(), dtype="float32", device="cpu", seed=3, attention="sdpa")
    with torch.no_grad():
        hidden = drafter.fused_pass(case.hidden_TKD, case.batch, make_embedding(), drafter.make_masks(case.batch))
    assert not hidden[:, 0].any()
    assert hidden[:, 1:].any()
    assert not hidden.requires_grad


def test_elementwise_gradients_are_autograds() -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32, requires_grad=True)

    x, weight, grad = draw(6, 8), draw(8), draw(6, 8).detach()
    wanted = torch.autograd.grad(elementwise.norm(x, weight, 1e-6), (x, weight), grad)
    assert_close(elementwise.norm_backward(grad, x, weight, 1e-6), wanted)
    joined = elementwise.norm_backward_joined(grad, grad * 2, x, weight, 1e-6)
    assert_close(joined, (wanted[0] + 2 * grad, wanted[1]))
    heads, scale, cos, sin, back = draw(6, 2, 8), draw(8), draw(6, 8).detach(), draw(6, 8).detach(), draw(6, 2, 8).detach()
    wanted = torch.autograd.grad(elementwise.head_rope(heads, scale, cos, sin, 1e-6), (heads, scale), back)
    assert_close(elementwise.head_rope_backward(back, heads, scale, cos, sin, 1e-6), wanted)
    gate, up = draw(6, 8), draw(6, 8)
    product = elementwise.gated(gate, up)
    wanted = (*torch.autograd.grad(product, (gate, up), grad), product.detach())
    by_gate, by_up, again = gate.detach().clone(), up.detach().clone(), grad.clone()
    elementwise.gated_backward(again, by_gate, by_up)
    assert_close((by_gate, by_up, again), wanted)
    rows, slots = draw(4, 8), draw(15, 8).detach()
    spread = elementwise.spread(rows, 5)
    assert torch.equal(spread.view(3, 5, 8)[:, 0], rows[:3])
    assert torch.equal(spread.view(3, 5, 8)[:, 1:], rows[3].expand(3, 4, 8))
    assert_close((elementwise.fold(slots, 5),), torch.autograd.grad(spread, rows, slots))


def assert_close(ours: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> None:
    assert len(ours) == len(wanted)
    assert all(close(one, other) for one, other in zip(ours, wanted, strict=True))


def close(ours: torch.Tensor, wanted: torch.Tensor) -> bool:
    return float((ours - wanted).detach().norm() / wanted.detach().norm()) < 1e-5
