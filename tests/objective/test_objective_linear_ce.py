"""The fused cross-entropy against `F.cross_entropy` on all logits, and what it must not do."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from slipstream.objective import linear_ce

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-3}


def inputs(dtype: torch.dtype, rows: int = 150) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, head, labels: hidden 64, vocabulary 1000."""
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, 64, generator=generator).to(dtype).requires_grad_()
    head = (torch.randn(1000, 64, generator=generator) * 0.2).to(dtype)
    return hidden, head, torch.randint(1000, (rows,), generator=generator)


def relative(ours: torch.Tensor, wanted: torch.Tensor) -> float:
    ours, wanted = ours.detach(), wanted.detach()
    return float((ours.float() - wanted.float()).norm() / wanted.float().norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk_rows", [16, 64, 100, 150, 4096])
def test_loss_hits_and_gradient_equal_the_reference(dtype: torch.dtype, chunk_rows: int) -> None:
    hidden, head, labels = inputs(dtype)
    weight = torch.rand(150, generator=torch.Generator().manual_seed(1)) * 3
    loss, hit = linear_ce(hidden, head, labels, chunk_rows)
    (loss * weight).sum().backward()
    plain = hidden.detach().float().requires_grad_()
    logits = plain @ head.float().t()
    wanted = F.cross_entropy(logits, labels, reduction="none")
    (wanted * weight).sum().backward()
    assert loss.dtype == torch.float32
    assert hidden.grad is not None
    assert hidden.grad.dtype == dtype
    assert relative(loss, wanted.detach()) < (1e-6 if dtype == torch.float32 else 2e-3)
    assert relative(hidden.grad, plain.grad) < TOLERANCE[dtype]
    if dtype == torch.float32:
        assert torch.equal(hit, logits.argmax(dim=-1) == labels)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk_rows", [16, 64, 4096])
def test_in_the_place_of_the_rows_everything_is_the_same(dtype: torch.dtype, chunk_rows: int) -> None:
    hidden, head, labels = inputs(dtype)
    weight, found = torch.rand(150, generator=torch.Generator().manual_seed(1)), []
    for overwrite in (False, True):
        leaf = hidden.detach().clone().requires_grad_()
        rows = leaf * 1.0  # a leaf that needs a gradient cannot be written to
        loss, hit = linear_ce(rows, head, labels, chunk_rows, num_rows=140, overwrite=overwrite)
        assert torch.equal(rows[:140], leaf[:140]) is not overwrite
        (loss * weight).sum().backward()
        assert leaf.grad is not None
        found.append((loss.detach(), hit, leaf.grad[:140]))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_hits_are_the_argmax_that_decoding_takes() -> None:
    hidden, head, _ = inputs(torch.bfloat16)
    labels = (hidden @ head.t()).argmax(dim=-1)
    assert linear_ce(hidden, head, labels, 64)[1].all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_label_with_no_probability_left_keeps_its_loss(dtype: torch.dtype) -> None:
    head = torch.zeros(300, 4, dtype=dtype)
    head[1, 0], head[2, 0] = 200.0, -200.0
    hidden = torch.tensor([[1.0, 0, 0, 0]], dtype=dtype)
    loss, hit = linear_ce(hidden, head, torch.tensor([2]), 16)
    assert loss.item() == pytest.approx(400.0)
    assert not hit.item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_almost_certain_label_keeps_its_small_gradient(dtype: torch.dtype) -> None:
    head = torch.eye(8, dtype=dtype) * 8
    hidden = torch.zeros(1, 8, dtype=dtype)
    hidden[0, 3] = 1.0
    hidden.requires_grad_()
    linear_ce(hidden, head, torch.tensor([3]), 16)[0].sum().backward()
    plain = hidden.detach().float().requires_grad_()
    F.cross_entropy(plain @ head.float().t(), torch.tensor([3])).backward()
    assert relative(hidden.grad, plain.grad) < TOLERANCE[dtype]


def test_rows_of_weight_zero_may_hold_nan_and_others_show_it() -> None:
    hidden, head, labels = inputs(torch.float32, rows=40)
    with torch.no_grad():
        hidden[7] = float("nan")
    loss, hit = linear_ce(hidden, head, labels, 16)
    assert torch.isnan(loss).nonzero()[:, 0].tolist() == [7]
    assert not hit[7]
    weight = torch.ones(40)
    weight[7] = 0
    torch.where(weight == 0, torch.zeros(()), loss * weight).sum().backward()
    assert torch.isfinite(hidden.grad).all()
    assert not hidden.grad[7].any()
    assert hidden.grad[8].any()


def test_without_a_gradient_the_second_product_is_never_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, head, labels = inputs(torch.float32)
    products: list[tuple[int, ...]] = []
    multiply = torch.mm

    def counted(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        products.append(tuple(out.shape))
        return multiply(left, right, out=out)

    monkeypatch.setattr(torch, "mm", counted)
    with torch.no_grad():
        silent, _ = linear_ce(hidden, head, labels, 64)
    assert products == [(64, 1000), (64, 1000), (22, 1000)]
    products.clear()
    detached, _ = linear_ce(hidden.detach(), head, labels, 64)
    assert products == [(64, 1000), (64, 1000), (22, 1000)]
    products.clear()
    full, _ = linear_ce(hidden, head, labels, 64)
    assert products == [(64, 1000), (64, 64), (64, 1000), (64, 64), (22, 1000), (22, 64)], "never more than a chunk of logits"
    assert torch.equal(silent, full)
    assert torch.equal(detached, full)


def test_no_rows_give_no_loss_and_an_empty_gradient() -> None:
    hidden, head, labels = inputs(torch.float32, rows=0)
    loss, hit = linear_ce(hidden, head, labels, 16)
    assert loss.shape == hit.shape == (0,)
    loss.sum().backward()
    assert hidden.grad.shape == (0, 64)


def test_a_head_that_would_train_and_mixed_types_are_refused() -> None:
    hidden, head, labels = inputs(torch.float32)
    with pytest.raises(AssertionError, match="frozen"):
        linear_ce(hidden, head.clone().requires_grad_(), labels, 16)
    with pytest.raises(AssertionError, match="the head is"):
        linear_ce(hidden, head.bfloat16(), labels, 16)
