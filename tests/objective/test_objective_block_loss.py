"""The loss of a batch against the naive reference: type x raggedness x weights, forward and backward, and its counts."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from loss_cases import LossCase, make_loss_case

from slipstream.config.recipe import ObjectiveSection
from slipstream.objective import BlockLoss, block_loss
from slipstream.objective.reference import reference_loss

RAGGED = {
    "whole": [4] * 12,
    "ragged": [4, 0, 1, 3, 2, 4, 0, 4, 1, 2, 3],
    "one": [0, 0, 1],
    "none": [0, 0, 0],
}
SCHEMES = {
    "decay": ObjectiveSection(weight="decay", decay_gamma=3.0, chunk_rows=16),
    "dpace": ObjectiveSection(weight="dpace", dpace_alpha=0.4, chunk_rows=16),
}
COUNTS = ("hits_per_slot", "supervised_per_slot", "accepted_sum", "anchors")


def both(case: LossCase, objective: ObjectiveSection) -> tuple[BlockLoss, torch.Tensor, BlockLoss, torch.Tensor]:
    """Ours and the reference's loss, each with its gradient."""
    hidden = case.hidden_NBD.clone().requires_grad_()
    ours = block_loss(hidden_NBD=hidden, head_VD=case.head_VD, batch=case.batch, objective=objective)
    ours.loss_sum.backward()
    plain = case.hidden_NBD.clone().float().requires_grad_()
    wanted = reference_loss(
        hidden_NBD=plain,
        head_VD=case.head_VD,
        labels_NB=case.batch.labels_NB,
        supervised_NB=case.batch.supervised_NB,
        anchor_valid_N=case.batch.anchor_valid_N,
        objective=objective,
    )
    wanted.loss_sum.backward()
    assert hidden.grad is not None
    assert plain.grad is not None
    return ours, hidden.grad, wanted, plain.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", RAGGED.values(), ids=RAGGED.keys())
@pytest.mark.parametrize("objective", SCHEMES.values(), ids=SCHEMES.keys())
def test_block_loss_equals_the_reference(dtype: torch.dtype, lengths: list[int], objective: ObjectiveSection) -> None:
    case = make_loss_case(lengths=lengths, dtype=dtype)
    ours, gradient, wanted, wanted_gradient = both(case, objective)
    exact = dtype == torch.float32
    torch.testing.assert_close(ours.loss_sum, wanted.loss_sum, rtol=1e-5 if exact else 2e-3, atol=1e-6)
    torch.testing.assert_close(ours.weight_sum, wanted.weight_sum, rtol=1e-5 if exact else 2e-3, atol=1e-6)
    error = float((gradient.float() - wanted_gradient).norm())
    assert error <= (1e-5 if exact else 5e-3) * float(wanted_gradient.norm())
    assert not gradient[~case.batch.supervised_NB].any()
    # bf16 logits may break near-ties otherwise than fp32 ones, so hits are compared in fp32 alone
    for name in COUNTS if exact else ("supervised_per_slot", "anchors"):
        assert torch.equal(getattr(ours, name), getattr(wanted, name)), name


def test_counts_by_hand() -> None:
    case = make_loss_case(lengths=[3, 3, 2, 0], block=4, valid=3)
    logits = case.hidden_NBD @ case.head_VD.t()
    hits = torch.tensor([[0, 1, 1, 0], [0, 0, 1, 1], [0, 1, 1, 1], [1, 1, 1, 1]], dtype=torch.bool)
    labels = torch.where(hits, logits.argmax(dim=-1), logits.argmin(dim=-1))
    batch = dataclasses.replace(case.batch, labels_NB=torch.where(case.batch.supervised_NB, labels, 0))
    loss = block_loss(hidden_NBD=case.hidden_NBD, head_VD=case.head_VD, batch=batch, objective=SCHEMES["decay"])
    assert loss.hits_per_slot.tolist() == [0, 2, 3, 1]
    assert loss.supervised_per_slot.tolist() == [0, 3, 3, 2]
    assert loss.accepted_sum.item() == 2 + 0 + 2
    assert loss.anchors.item() == 3
    assert not loss.loss_sum.requires_grad


@pytest.mark.parametrize("objective", SCHEMES.values(), ids=SCHEMES.keys())
def test_chunks_may_cut_blocks(objective: ObjectiveSection) -> None:
    case = make_loss_case(lengths=[4, 3, 4, 1] * 9)
    wanted = both(case, objective)
    cut = both(case, objective.model_copy(update={"chunk_rows": 17}))
    torch.testing.assert_close(cut[0].loss_sum, wanted[0].loss_sum, rtol=1e-6, atol=0)
    torch.testing.assert_close(cut[1], wanted[1], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("objective", SCHEMES.values(), ids=SCHEMES.keys())
def test_whole_padded_chunks_give_the_same_loss_as_the_rows_alone(objective: ObjectiveSection) -> None:
    case = make_loss_case(lengths=[2, 4, 3])
    rows = case.batch.rows_M
    assert len(rows) > case.batch.num_rows
    case.hidden_NBD[0, 0] = float("nan")  # the row that padding repeats is never supervised
    padded = dataclasses.replace(case, batch=dataclasses.replace(case.batch, num_rows=len(rows)))
    alone, whole = both_ours(case, objective), both_ours(padded, objective)
    assert torch.isfinite(alone[1]).all()
    for mine, other in zip(alone, whole, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)


def both_ours(case: LossCase, objective: ObjectiveSection) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = case.hidden_NBD.clone().requires_grad_()
    loss = block_loss(hidden_NBD=hidden, head_VD=case.head_VD, batch=case.batch, objective=objective)
    loss.loss_sum.backward()
    assert hidden.grad is not None
    return loss.loss_sum.detach(), hidden.grad


@pytest.mark.parametrize("objective", SCHEMES.values(), ids=SCHEMES.keys())
def test_a_row_that_is_not_finite_shows_if_supervised_and_only_then(objective: ObjectiveSection) -> None:
    case = make_loss_case(lengths=[4, 2, 3])
    clean, gradient = both_ours(case, objective)
    case.hidden_NBD[1, 4] = float("inf")  # slot 4 of a block that supervises two
    same, same_gradient = both_ours(case, objective)
    assert torch.equal(same, clean)
    assert torch.equal(same_gradient, gradient)
    case.hidden_NBD[1, 2] = float("nan")
    assert not torch.isfinite(both_ours(case, objective)[0])


def test_nothing_supervised_gives_zero_loss_and_zero_finite_gradients() -> None:
    case = make_loss_case(lengths=[0, 0], valid=0)
    loss, gradient = both_ours(case, SCHEMES["dpace"])
    assert loss.item() == 0.0
    assert not gradient.any()


def test_padding_rows_count_no_hits() -> None:
    case = make_loss_case(lengths=[2, 4, 3])
    rows = case.batch.rows_M
    case.hidden_NBD[0, 0] = case.head_VD[0] * 100  # its argmax is the label 0 that padding carries
    padded = dataclasses.replace(case.batch, num_rows=len(rows))
    counts = [
        block_loss(hidden_NBD=case.hidden_NBD, head_VD=case.head_VD, batch=batch, objective=SCHEMES["decay"])
        for batch in (case.batch, padded)
    ]
    assert counts[1].hits_per_slot[0] == 0
    assert torch.equal(counts[0].hits_per_slot, counts[1].hits_per_slot)
    assert torch.equal(counts[0].accepted_sum, counts[1].accepted_sum)
