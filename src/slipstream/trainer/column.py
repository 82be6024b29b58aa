"""Forward and backward of one use: hidden states in, gradients in the optimizer's sum, figures in the tally.

T context tokens, K taps, D hidden, N anchors, B block size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from slipstream.device.finite import not_finite
from slipstream.drafter import place_batch
from slipstream.errors import TargetError
from slipstream.observe import Account
from slipstream.records import BlockBatch, HiddenPack
from slipstream.trainer.placing import Placed, StagedPlacing
from slipstream.trainer.prefetch import PreparedColumn
from slipstream.trainer.tally import ColumnSums, StepTally


class Drafter(Protocol):
    """What the trainer asks of a drafter family."""

    def make_masks(self, batch: BlockBatch) -> Mapping[str, Any]:
        """The family's masks of a batch on the CPU, on the drafter's device; waits for nothing."""
        ...

    def __call__(self, *, hidden_TKD: Tensor, batch: BlockBatch, embedding_VD: Tensor, masks: Mapping[str, Any]) -> Tensor:
        """Hidden states `[N, B, D]` of the block slots, after the final norm."""
        ...


class FrozenEnds(Protocol):
    """The target's own embedding and head, frozen, in the drafter's type; the embedding may stay in host memory."""

    @property
    def embedding_VD(self) -> Tensor: ...
    @property
    def head_VD(self) -> Tensor: ...


class LossParts(Protocol):
    """An objective in parts, launched in this order: `gather`, `sum_up`. See `objective.BlockLossParts`.

    Recordings take `gather`, `fill`, `weigh`, `spread`.
    """

    def gather(self, hidden_NBD: Tensor, batch: BlockBatch) -> tuple[Tensor, Tensor]:
        """Rows of the loss `[M, D]`, differentiable, and their labels `[M]`."""
        ...

    def sum_up(self, hidden_MD: Tensor, labels_M: Tensor, *, head_VD: Tensor, batch: BlockBatch) -> ColumnSums:
        """Sums of a batch, `loss_sum` differentiable in its rows, which are written over."""
        ...

    def fill(
        self,
        hidden_MD: Tensor,
        head_VD: Tensor,
        labels_M: Tensor,
        *,
        num_rows: int,
        loss_M: Tensor,
        hit_M: Tensor,
        unit_MD: Tensor,
    ) -> None:
        """Loss, hit and unit gradient of the first `num_rows` rows: the only part whose launches depend on the use."""
        ...

    def weigh(self, loss_M: Tensor, hit_M: Tensor, *, batch: BlockBatch) -> ColumnSums:
        """Sums of a batch, `loss_sum` differentiable in `loss_M`."""
        ...

    def spread(self, grad_loss_M: Tensor, unit_MD: Tensor) -> Tensor:
        """The gradient by the rows `[M, D]`."""
        ...


@dataclass(frozen=True, slots=True)
class ColumnPass:
    """Computes one use after another. `parts` are the objective, or `loss(hidden_NBD=, head_VD=, batch=)` is one in one piece.

    `noise` changes hidden states. `placing` brings staged uses to a GPU; without it a use is copied to `device` when its turn
    comes. Without `placing`, or with an objective in one piece, a pass cannot be recorded (`recorded.py`).

    Raises `TargetError` when hidden states come from another target than the run's.
    """

    drafter: Drafter
    ends: FrozenEnds
    loss: Callable[..., ColumnSums] | None
    noise: Callable[[Tensor, BlockBatch], Tensor] | None
    target_fingerprint: str
    device: torch.device
    account: Account
    placing: StagedPlacing | None = None
    parts: LossParts | None = None

    def __call__(self, hidden: HiddenPack, column: PreparedColumn, *, denominator: float, tally: StepTally) -> None:
        """Forward, loss over the global step's denominator, backward. The slot may be released afterwards."""
        self.check(hidden, column)
        pack, step = column.use.pack_id, column.use.step
        with self.account.state("forward", pack=pack, step=step):
            bad_rows = not_finite(hidden.hidden_TKD).sum()
            placed = self._place(column)
            batch = placed.batch
            hidden_TKD = hidden.hidden_TKD if self.noise is None else self.noise(hidden.hidden_TKD, batch)
            sums = self._sums(hidden_TKD, placed)
        with self.account.state("backward", pack=pack, step=step):
            if placed.seed is None:
                torch.autograd.backward(sums.loss_sum / denominator)
            else:
                torch.autograd.backward(sums.loss_sum, grad_tensors=placed.seed)
        if self.placing is not None:
            self.placing.used()
        tally.add(sums, bad_rows=bad_rows, context_tokens=column.context_tokens, unique_tokens=column.unique_tokens)

    def _sums(self, hidden_TKD: Tensor, placed: Placed) -> ColumnSums:
        """Of one use. Once the rows are gathered nobody holds all hidden states, in the moment when most is held."""
        batch, head_VD = placed.batch, self.ends.head_VD
        if self.parts is None:
            assert self.loss is not None, "a pass without an objective"
            return self.loss(hidden_NBD=self._hidden(hidden_TKD, placed), head_VD=head_VD, batch=batch)
        rows_MD, labels_M = self.parts.gather(self._hidden(hidden_TKD, placed), batch)
        return self.parts.sum_up(rows_MD, labels_M, head_VD=head_VD, batch=batch)

    def _hidden(self, hidden_TKD: Tensor, placed: Placed) -> Tensor:
        batch, embedding_VD, masks = placed.batch, placed.embedding_VD, placed.masks
        return self.drafter(hidden_TKD=hidden_TKD, batch=batch, embedding_VD=embedding_VD, masks=masks)

    def check(self, hidden: HiddenPack, column: PreparedColumn) -> None:
        """Whether these hidden states are the column's, and of the run's target."""
        assert hidden.pack_id == column.use.pack_id, f"pack {hidden.pack_id} came for {column.use.pack_id}"
        if hidden.target_fingerprint != self.target_fingerprint:
            raise TargetError(
                key="target.model",
                value=hidden.target_fingerprint,
                rule=f"is not the run's target, {self.target_fingerprint}, yet pack {hidden.pack_id} came from it",
            )

    def _place(self, column: PreparedColumn) -> Placed:
        """A use on the device; of an embedding kept in host memory, only the rows that its batch reads."""
        if self.placing is not None:
            assert column.staged is not None, "this step was prepared without staging its arrays"
            return self.placing.send(column.batch, column.staged)
        masks = self.drafter.make_masks(column.batch)  # from the CPU batch: reading anchors back would wait for the GPU
        batch, embedding_VD = place_batch(column.batch, self.ends.embedding_VD, device=self.device)
        return Placed(batch=batch, embedding_VD=embedding_VD, masks=masks)
