"""What ends a step once all gradients are summed: one update, and the step's figures.

Waits for: the backward passes of all columns, summed over ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slipstream.records import StepResult
from slipstream.trainer.optim import FlatAdamW
from slipstream.trainer.tally import StepTally


@dataclass(frozen=True, slots=True)
class StepEnd:
    """Ends one step after another. `tally` is over the end of the optimizer's gradient buffer."""

    optimizer: FlatAdamW
    tally: StepTally

    def __call__(self, *, step: int, learning_rate: float, rehearsal: bool) -> StepResult:
        """Update, unless something is not finite or it is a rehearsal, which changes nothing."""
        finite = self.tally.finite()
        if rehearsal:
            finite = torch.zeros_like(finite)
        norm, good = self.optimizer.step(learning_rate=learning_rate, finite=finite)
        return self.tally.result(step=step, gradient_norm=norm, finite=good, learning_rate=learning_rate)
