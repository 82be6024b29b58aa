"""Stage 5 of 6, second half: predictions -> loss.

Waits for: the drafter's hidden states of a batch. Unblocked by: the drafter.
"""

from slipstream.objective.block_loss import BlockLoss, BlockLossParts, block_loss
from slipstream.objective.linear_ce import linear_ce
from slipstream.objective.weights import WEIGHTS, planned_denominator, slot_weights

__all__ = [
    "WEIGHTS",
    "BlockLoss",
    "BlockLossParts",
    "block_loss",
    "linear_ce",
    "planned_denominator",
    "slot_weights",
]
