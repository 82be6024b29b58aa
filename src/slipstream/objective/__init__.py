"""Stage 5 of 6, second half: predictions -> loss.

Waits for: the drafter's hidden states of a batch. Unblocked by: the drafter.
"""

from slipstream.objective.block_loss import BlockLoss, block_loss, supervised_rows, weigh_rows
from slipstream.objective.linear_ce import fill_rows, linear_ce, row_gradient
from slipstream.objective.weights import WEIGHTS, planned_denominator, slot_weights

__all__ = [
    "WEIGHTS",
    "BlockLoss",
    "block_loss",
    "fill_rows",
    "linear_ce",
    "planned_denominator",
    "row_gradient",
    "slot_weights",
    "supervised_rows",
    "weigh_rows",
]
