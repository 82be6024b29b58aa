"""Cross-entropy through a frozen head, without ever holding rows times vocabulary.

The operation knows no weights: it returns the loss of every row and keeps each row's gradient, u = (softmax - onehot) W,
formed while the chunk's logits are there. Weights that depend on the loss act afterwards (09-traps 8): the gradient of
sum w * ce is w * u, exactly, however chunks cut blocks.

Shape letters: M rows · R rows of a chunk · D hidden · V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

CPU_SCRATCH_ROWS = 64
"""Rows of a chunk that the softmax works on at once on a CPU: in fp32 they must stay near the cores' caches."""


class RowPass(Protocol):
    """What happens to a chunk of logits between the two matrix products."""

    def __call__(
        self, logits_RV: torch.Tensor, labels_R: torch.Tensor, *, loss_R: torch.Tensor, hit_R: torch.Tensor, gradient: bool
    ) -> None:
        """Fill `loss_R` (fp32) and `hit_R` (bool); with `gradient`, logits become softmax - onehot, subtracted in fp32."""


def linear_ce(
    hidden_MD: torch.Tensor,
    head_VD: torch.Tensor,
    labels_M: torch.Tensor,
    chunk_rows: int,
    *,
    num_rows: int | None = None,
    overwrite: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss fp32 `[M]`, differentiable in `hidden_MD`, and whether the label is the argmax, bool `[M]`.

    `hidden_MD` and `head_VD` share a float type, in which the matrix products run; logits and softmax are fp32. The head
    must not require a gradient. Without a gradient to form, only the forward product is paid. Rows from `num_rows` on are
    padding: loss 0, no hit, nothing computed; their weight must be 0. With `overwrite` u takes the place of `hidden_MD`, chunk
    by chunk, for rows that are nobody else's.
    """
    assert not head_VD.requires_grad, "the head is the target's and frozen"
    assert hidden_MD.dtype == head_VD.dtype, f"hidden states are {hidden_MD.dtype}, the head is {head_VD.dtype}"
    keep = torch.is_grad_enabled() and hidden_MD.requires_grad
    rows = len(hidden_MD) if num_rows is None else num_rows
    loss, hit = _LinearCrossEntropy.apply(hidden_MD, head_VD, labels_M, chunk_rows, rows, keep, overwrite)
    return loss, hit


def fill_rows(
    hidden_MD: torch.Tensor,
    head_VD: torch.Tensor,
    labels_M: torch.Tensor,
    chunk_rows: int,
    *,
    num_rows: int,
    loss_M: torch.Tensor,
    hit_M: torch.Tensor,
    unit_MD: torch.Tensor | None,
) -> None:
    """Write loss, hit and, if there is a place for it, u of the first `num_rows` rows; what follows them stays as it is.

    `unit_MD` may be `hidden_MD` itself.
    """
    # the same size for every batch, so that the allocator hands out the same block
    logits = hidden_MD.new_empty(min(chunk_rows, len(hidden_MD)), len(head_VD))
    row_pass = ROW_PASSES[hidden_MD.device.type]()
    for first in range(0, num_rows, chunk_rows):
        chunk = slice(first, min(first + chunk_rows, num_rows))
        logits_RV = logits[: chunk.stop - first]
        torch.mm(hidden_MD[chunk], head_VD.t(), out=logits_RV)
        row_pass(logits_RV, labels_M[chunk], loss_R=loss_M[chunk], hit_R=hit_M[chunk], gradient=unit_MD is not None)
        if unit_MD is not None:
            torch.mm(logits_RV, head_VD, out=unit_MD[chunk])


def row_gradient(grad_loss_M: torch.Tensor, unit_MD: torch.Tensor) -> torch.Tensor:
    """The gradient by the rows' hidden states `[M, D]`, from that by their losses."""
    weight = grad_loss_M[:, None]
    # by where, not by product alone: a row of weight 0 may hold NaN
    return torch.where(weight == 0, torch.zeros((), device=weight.device), weight * unit_MD).to(unit_MD.dtype)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_MD: torch.Tensor,
        head_VD: torch.Tensor,
        labels_M: torch.Tensor,
        chunk_rows: int,
        rows: int,
        keep: bool,
        overwrite: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        loss_M = torch.zeros(len(hidden_MD), dtype=torch.float32, device=hidden_MD.device)
        hit_M = torch.zeros(len(hidden_MD), dtype=torch.bool, device=hidden_MD.device)
        place_MD = hidden_MD.detach() if overwrite else torch.empty_like(hidden_MD)
        unit_MD = place_MD if keep else None
        fill_rows(hidden_MD, head_VD, labels_M, chunk_rows, num_rows=rows, loss_M=loss_M, hit_M=hit_M, unit_MD=unit_MD)
        ctx.mark_non_differentiable(hit_M)
        if unit_MD is not None:
            ctx.save_for_backward(unit_MD)
        return loss_M, hit_M

    @staticmethod
    def backward(ctx: Any, grad_loss_M: torch.Tensor, _grad_hit: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (unit_MD,) = ctx.saved_tensors
        gradient = row_gradient(grad_loss_M, unit_MD)
        return gradient, None, None, None, None, None, None


def _torch_rows() -> RowPass:
    return _row_pass


def _triton_rows() -> RowPass:
    from slipstream.objective.row_kernel import row_pass  # here, since only CUDA builds of torch bring Triton

    return row_pass


ROW_PASSES: Mapping[str, Callable[[], RowPass]] = {"cpu": _torch_rows, "cuda": _triton_rows}
"""Every implementation, by the kind of device that it is for."""


def _row_pass(
    logits_RV: torch.Tensor, labels_R: torch.Tensor, *, loss_R: torch.Tensor, hit_R: torch.Tensor, gradient: bool
) -> None:
    rows = min(CPU_SCRATCH_ROWS, len(logits_RV))
    fp32 = logits_RV.dtype == torch.float32
    scratch = None if fp32 else logits_RV.new_empty(rows, logits_RV.shape[1], dtype=torch.float32)
    for first in range(0, len(logits_RV), rows):
        part = slice(first, first + rows)
        loss_R[part], hit_R[part] = _softmax_rows(logits_RV[part], labels_R[part], scratch=scratch, gradient=gradient)


def _softmax_rows(
    logits_RV: torch.Tensor, labels_R: torch.Tensor, *, scratch: torch.Tensor | None, gradient: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and hit of rows; with `gradient`, `logits_RV` becomes softmax - onehot, subtracted in fp32 before rounding."""
    scores = logits_RV if scratch is None else scratch[: len(logits_RV)].copy_(logits_RV)
    label = labels_R[:, None]
    best = scores.argmax(dim=-1, keepdim=True)
    top, own = scores.gather(-1, best), scores.gather(-1, label)
    torch.softmax(scores, dim=-1, out=scores)
    # log-sum-exp from the largest probability, which is at least 1 / V: no second pass over the row
    loss = top - scores.gather(-1, best).log() - own
    if gradient:
        scores.scatter_add_(-1, label, torch.full_like(own, -1.0))
        if scratch is not None:
            logits_RV.copy_(scores)
    return loss[:, 0], (best == label)[:, 0]
