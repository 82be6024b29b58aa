"""Stage 5 of 6: hidden states and planned blocks → trained weights.

Waits for: the hidden states of the next planned use, and the other ranks' gradients. Unblocked by: the transport, and
their backward passes.
"""

from slipstream.trainer.build import MainRank, RunParts, build_trainer
from slipstream.trainer.checkpoint import (
    Checkpoint,
    CheckpointIdentity,
    complete_checkpoints,
    latest,
    read_checkpoint,
    read_cursor,
    read_drafter_state,
)
from slipstream.trainer.hooks import Hook
from slipstream.trainer.learning_rate import learning_rate
from slipstream.trainer.loop import FitResult, Trainer
from slipstream.trainer.optim import FlatAdamW
from slipstream.trainer.ranks import ColumnShare, RankGroup

__all__ = [
    "Checkpoint",
    "CheckpointIdentity",
    "ColumnShare",
    "FitResult",
    "FlatAdamW",
    "Hook",
    "MainRank",
    "RankGroup",
    "RunParts",
    "Trainer",
    "build_trainer",
    "complete_checkpoints",
    "latest",
    "learning_rate",
    "read_checkpoint",
    "read_cursor",
    "read_drafter_state",
]
