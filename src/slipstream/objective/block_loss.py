"""The loss of a batch of blocks: supervised rows through the head, then weights by slot.

Shape letters: N anchors · B block size · M supervised rows · D hidden · V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from slipstream.config.recipe import ObjectiveSection
from slipstream.objective.linear_ce import fill_rows, linear_ce, row_gradient
from slipstream.objective.weights import slot_weights
from slipstream.records import BlockBatch


@dataclass(frozen=True, slots=True)
class BlockLoss:
    """Sums over one batch, on its device, nothing divided; fp32 scalars except the two fp32 `[B]` vectors.

    Only `loss_sum` carries a gradient. `hits_per_slot` counts supervised slots whose argmax is the label;
    `accepted_sum` sums, over the `anchors` valid ones, the length of the leading run of hits.
    """

    loss_sum: torch.Tensor
    weight_sum: torch.Tensor
    hits_per_slot: torch.Tensor
    supervised_per_slot: torch.Tensor
    accepted_sum: torch.Tensor
    anchors: torch.Tensor


def block_loss(*, hidden_NBD: torch.Tensor, head_VD: torch.Tensor, batch: BlockBatch, objective: ObjectiveSection) -> BlockLoss:
    """Weighted cross-entropy and its counts. The caller divides `loss_sum` by the planned denominator of the global step.

    A row that is not finite makes the loss non-finite if it is supervised, and changes nothing if it is not.
    """
    parts = BlockLossParts(objective)
    hidden_MD, labels_M = parts.gather(hidden_NBD, batch)
    return parts.sum_up(hidden_MD, labels_M, head_VD=head_VD, batch=batch)


@dataclass(frozen=True, slots=True)
class BlockLossParts:
    """`block_loss` in parts: `gather`, after which nobody needs all hidden states any more, and `sum_up`.

    Or, to be recorded, in smaller ones: `gather` and `weigh` launch the same for every batch, `fill` as many products as there
    are rows. What is differentiated by itself otherwise is put together by hand then: the gradient of `weigh` by `loss_M`,
    then `spread`, then that of `gather` by `hidden_NBD`. Each part runs the kernels of the whole.
    """

    objective: ObjectiveSection

    def gather(self, hidden_NBD: torch.Tensor, batch: BlockBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of the loss `[M, D]`, differentiable, and their labels int64 `[M]`."""
        return supervised_rows(hidden_NBD, batch)

    def sum_up(self, hidden_MD: torch.Tensor, labels_M: torch.Tensor, *, head_VD: torch.Tensor, batch: BlockBatch) -> BlockLoss:
        """Sums of a batch from the rows of `gather`, `loss_sum` differentiable in them; what they hold is lost."""
        chunk_rows, rows = self.objective.chunk_rows, batch.num_rows
        loss_M, hit_M = linear_ce(hidden_MD, head_VD, labels_M, chunk_rows, num_rows=rows, overwrite=True)
        return self.weigh(loss_M, hit_M, batch=batch)

    def fill(
        self,
        hidden_MD: torch.Tensor,
        head_VD: torch.Tensor,
        labels_M: torch.Tensor,
        *,
        num_rows: int,
        loss_M: torch.Tensor,
        hit_M: torch.Tensor,
        unit_MD: torch.Tensor,
    ) -> None:
        """Loss fp32 `[M]`, hit bool `[M]` and unit gradient `[M, D]` of the first `num_rows` rows; others stay as they are."""
        chunk_rows = self.objective.chunk_rows
        fill_rows(hidden_MD, head_VD, labels_M, chunk_rows, num_rows=num_rows, loss_M=loss_M, hit_M=hit_M, unit_MD=unit_MD)

    def weigh(self, loss_M: torch.Tensor, hit_M: torch.Tensor, *, batch: BlockBatch) -> BlockLoss:
        """Sums of a batch, `loss_sum` differentiable in `loss_M`; rows without supervision have loss 0 and no hit."""
        return weigh_rows(loss_M, hit_M, batch=batch, objective=self.objective)

    def spread(self, grad_loss_M: torch.Tensor, unit_MD: torch.Tensor) -> torch.Tensor:
        """The gradient by the rows `[M, D]`, 0 where `grad_loss_M` is 0."""
        return row_gradient(grad_loss_M, unit_MD)


def supervised_rows(hidden_NBD: torch.Tensor, batch: BlockBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states `[M, D]`, differentiable, and labels int64 `[M]` of `rows_M`; on a CPU of the real rows alone."""
    rows_M = _rows(batch)
    labels_M = batch.labels_NB.flatten().index_select(0, rows_M)
    hidden_MD: torch.Tensor = _TakeRows.apply(hidden_NBD.flatten(0, 1), rows_M)
    return hidden_MD, labels_M


def weigh_rows(loss_M: torch.Tensor, hit_M: torch.Tensor, *, batch: BlockBatch, objective: ObjectiveSection) -> BlockLoss:
    """From the rows' losses (fp32, differentiable) and hits (bool) to the sums of a batch. Padding has loss 0 and no hit."""
    rows_M = _rows(batch)
    supervised = batch.supervised_NB
    slots = supervised.numel()
    # padding of rows_M writes to slot 0 of block 0, which the masks below leave out
    loss_NB = loss_M.new_zeros(slots).index_copy(0, rows_M, loss_M).view_as(supervised)
    hit_NB = hit_M.new_zeros(slots).index_copy(0, rows_M, hit_M).view_as(supervised) & supervised
    weights_NB = slot_weights(objective=objective, loss_NB=loss_NB, supervised_NB=supervised)
    weighted = torch.where(supervised, weights_NB * loss_NB, torch.zeros((), device=loss_NB.device))
    return BlockLoss(
        loss_sum=weighted.sum(),
        weight_sum=weights_NB.sum(),
        hits_per_slot=hit_NB.sum(dim=0, dtype=torch.float32),
        supervised_per_slot=supervised.sum(dim=0, dtype=torch.float32),
        accepted_sum=hit_NB[:, 1:].to(torch.int32).cumprod(dim=1).sum(dtype=torch.float32),
        anchors=batch.anchor_valid_N.sum(dtype=torch.float32),
    )


class _TakeRows(torch.autograd.Function):
    """Rows by index; the gradient is copied back. What repeats is padding, whose gradient is 0, so nothing is to be summed."""

    @staticmethod
    def forward(ctx: Any, hidden_QD: torch.Tensor, rows_M: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows_M)
        ctx.shape = hidden_QD.shape
        return hidden_QD.index_select(0, rows_M)

    @staticmethod
    def backward(ctx: Any, gradient_MD: torch.Tensor) -> tuple[torch.Tensor, None]:
        (rows_M,) = ctx.saved_tensors
        return gradient_MD.new_zeros(ctx.shape).index_copy_(0, rows_M, gradient_MD), None


def _rows(batch: BlockBatch) -> torch.Tensor:
    """Supervised rows; padded on CUDA, where buffers come from a closed set of sizes, the real ones alone on a CPU."""
    return batch.rows_M[: batch.num_rows] if batch.rows_M.device.type == "cpu" else batch.rows_M
