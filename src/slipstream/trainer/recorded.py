"""Columns and updates as recordings: what a step launches kernel by kernel otherwise, in a handful of launches.

A use's hidden states and arrays are copied to a place that stays, which costs the device a hundredth of the step at most,
so that one recording serves every slot and buffer. Three things stay outside: noise, whose generator is seeded anew for
each use; the products of the loss, whose number varies with the supervised rows; and the sum over ranks. The kernels are
those of `ColumnPass` and `StepEnd` on the same shapes, and so are the results, bit for bit.

T context tokens, K taps, D hidden, M rows of the loss, padded to the most there can be.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from slipstream.device.finite import not_finite
from slipstream.device.recorder import Recorder, Recording
from slipstream.records import HiddenPack, StepResult
from slipstream.trainer.column import ColumnPass
from slipstream.trainer.optim import FlatAdamW
from slipstream.trainer.prefetch import PreparedColumn
from slipstream.trainer.step_end import StepEnd
from slipstream.trainer.tally import StepTally


@dataclass(frozen=True, slots=True)
class _Pass:
    """A recorded forward pass and its backward pass; what the loss reads between them, and parameters without a gradient."""

    forward: Recording
    rows_MD: Tensor
    labels_M: Tensor
    backward: Recording
    unreached: frozenset[str]


class RecordedColumns:
    """Stands in for a `ColumnPass`. Records when it is made, in warm-up: gradient sums and tally hold rubbish afterwards.

    Where the optimizer lets a step's first gradients overwrite its sums, that pass is another one than those which add to
    them: two recordings, the second only with `several` columns a step. `hidden_TKD` is a pack like those to come.
    """

    def __init__(
        self,
        plain: ColumnPass,
        *,
        hidden_TKD: Tensor,
        optimizer: FlatAdamW,
        tally: StepTally,
        recorder: Recorder,
        several: bool,
    ) -> None:
        assert plain.placing is not None, "only staged uses can be replayed"
        assert plain.parts is not None, "an objective in one piece cannot be recorded"
        self._plain, self._placing, self._parts = plain, plain.placing, plain.parts
        self._optimizer, self._tally = optimizer, tally
        self._settled = plain.placing.settle()
        rows, head_VD, device = len(self._settled.batch.rows_M), plain.ends.head_VD, hidden_TKD.device
        self._hidden_TKD = torch.zeros_like(hidden_TKD)
        self._bad_rows = torch.zeros((), dtype=torch.int64, device=device)
        self._loss_M = torch.zeros(rows, dtype=torch.float32, device=device)
        self._hit_M = torch.zeros(rows, dtype=torch.bool, device=device)
        self._unit_MD = torch.zeros(rows, head_VD.shape[1], dtype=head_VD.dtype, device=device)
        # until a forward pass leaves its own here
        self._batch, self._rows_MD, self._labels_M = self._settled.batch, self._unit_MD, self._hit_M
        recorder.try_out(partial(self._try_out, several=several))
        optimizer.zero_grad()
        self._first = self._record(recorder) if optimizer.overwrites else None
        self._further = self._record(recorder) if several or self._first is None else None

    @property
    def unreached(self) -> frozenset[str]:
        """Parameters that no backward pass has a gradient for."""
        return frozenset() if self._first is None else self._first.unreached

    def __call__(self, hidden: HiddenPack, column: PreparedColumn, *, denominator: float, tally: StepTally) -> None:
        """As `ColumnPass.__call__`; the denominator has travelled with the column's arrays."""
        assert tally.vector.data_ptr() == self._tally.vector.data_ptr(), "the tally is not the one that was recorded"
        assert column.staged is not None, "this step was prepared without staging its arrays"
        plain, pack, step = self._plain, column.use.pack_id, column.use.step
        plain.check(hidden, column)
        with plain.account.state("forward", pack=pack, step=step):
            hidden_TKD = hidden.hidden_TKD
            assert hidden_TKD.dtype == self._hidden_TKD.dtype, f"a pack of {hidden_TKD.dtype}, not {self._hidden_TKD.dtype}"
            if plain.noise is not None:
                self._bad_rows.copy_(not_finite(hidden_TKD).sum())
                hidden_TKD = plain.noise(hidden_TKD, column.batch)
            self._hidden_TKD.copy_(hidden_TKD)
            self._placing.send_to(self._settled, column.staged)
            recorded = self._first if self._optimizer.overwrites else self._further
            assert recorded is not None, "a step has more columns than were recorded for"
            recorded.forward.replay()
            self._fill(recorded.rows_MD, recorded.labels_M, num_rows=column.batch.num_rows)
        with plain.account.state("backward", pack=pack, step=step):
            recorded.backward.replay()
            self._optimizer.stale &= recorded.unreached

    def _run_forward(self) -> None:
        placed = self._placing.placed(self._settled)
        self._batch = placed.batch
        if self._plain.noise is None:  # else they were counted before noise came to them
            self._bad_rows.copy_(not_finite(self._hidden_TKD).sum())
        hidden_NBD = self._plain.drafter(
            hidden_TKD=self._hidden_TKD, batch=placed.batch, embedding_VD=placed.embedding_VD, masks=placed.masks
        )
        self._rows_MD, self._labels_M = self._parts.gather(hidden_NBD, placed.batch)
        self._loss_M.zero_()
        self._hit_M.zero_()

    @torch.no_grad()
    def _fill(self, rows_MD: Tensor, labels_M: Tensor, *, num_rows: int) -> None:
        head_VD, to = self._plain.ends.head_VD, {"loss_M": self._loss_M, "hit_M": self._hit_M, "unit_MD": self._unit_MD}
        self._parts.fill(rows_MD, head_VD, labels_M, num_rows=num_rows, **to)

    def _run_backward(self) -> None:
        """From losses and unit gradients to gradient sums and tally."""
        loss_M, numbers = self._loss_M.detach().requires_grad_(), self._settled.numbers
        sums = self._parts.weigh(loss_M, self._hit_M, batch=self._batch)
        (grad_loss_M,) = torch.autograd.grad(sums.loss_sum, loss_M, grad_outputs=numbers[0])
        torch.autograd.backward(self._rows_MD, grad_tensors=self._parts.spread(grad_loss_M, self._unit_MD))
        self._tally.add(sums, bad_rows=self._bad_rows, context_tokens=numbers[1], unique_tokens=numbers[2])

    def _try_out(self, *, several: bool) -> None:
        self._optimizer.zero_grad()
        for _ in range(1 + several):
            self._run_forward()
            self._fill(self._rows_MD.detach(), self._labels_M, num_rows=len(self._loss_M))
            self._run_backward()

    def _record(self, recorder: Recorder) -> _Pass:
        """Both passes: autograd's graph is made in the one and used up in the other, where it lets go of what it kept."""
        forward = recorder.record(self._run_forward)
        backward = recorder.record(self._run_backward)
        rows_MD = self._rows_MD = self._rows_MD.detach()
        return _Pass(forward, rows_MD, self._labels_M, backward, unreached=self._optimizer.stale)


class RecordedEnd:
    """Stands in for a `StepEnd`. Records when it is made, after the columns, as an update that changes nothing.

    Results lie in memory that the next step overwrites.
    """

    def __init__(self, plain: StepEnd, *, recorder: Recorder, unreached: frozenset[str]) -> None:
        device = plain.optimizer.master.device
        self._plain, self._unreached = plain, unreached
        self._rate = torch.zeros((), dtype=torch.float64, device=device)
        self._allowed = torch.zeros((), dtype=torch.bool, device=device)
        self._is_allowed = False
        self._vector = torch.zeros_like(plain.tally.vector)
        self._norm = torch.zeros((), dtype=torch.float32, device=device)
        self._good = torch.zeros((), dtype=torch.bool, device=device)
        recorder.try_out(self._run)
        self._recording = recorder.record(self._run)

    def __call__(self, *, step: int, learning_rate: float, rehearsal: bool) -> StepResult:
        """As `StepEnd.__call__`."""
        self._rate.fill_(learning_rate)
        if self._is_allowed == rehearsal:
            self._is_allowed = not rehearsal
            self._allowed.fill_(self._is_allowed)
        self._recording.replay()
        return self._plain.tally.result_of(
            self._vector, step=step, gradient_norm=self._norm, finite=self._good, learning_rate=learning_rate
        )

    def _run(self) -> None:
        plain = self._plain
        plain.optimizer.stale = self._unreached  # their sums are cleared, and by each replay
        norm, good = plain.optimizer.step(learning_rate=self._rate, finite=plain.tally.finite() & self._allowed)
        self._norm.copy_(norm)
        self._good.copy_(good)
        self._vector.copy_(plain.tally.vector)
