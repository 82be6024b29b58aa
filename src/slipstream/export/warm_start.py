"""Weights of an exported drafter as the start of another run: only where both are the same network for the same target."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from slipstream.config import DrafterShape
from slipstream.errors import ExportError
from slipstream.export.dflash_format import read_dflash

SAME: Mapping[str, str] = {
    "tap_layers": "the fusion layer's columns belong to those layers",
    "block_size": "slots of another block were trained at other distances",
    "mask_token_id": "the weights know undecided slots by that token's embedding",
    "layer_types": "each layer's mask is part of what it learnt",
    "sliding_window": "each layer's mask is part of what it learnt",
    "num_layers": "tensors would be missing or left over",
    "hidden_size": "the tensors have other shapes",
    "intermediate_size": "the tensors have other shapes",
    "num_attention_heads": "the tensors have other shapes",
    "num_key_value_heads": "the tensors have other shapes",
    "head_dim": "the tensors have other shapes",
    "vocab_size": "the embedding it was trained with was another",
    "num_target_layers": "the taps were of another target",
    "rope_theta": "the weights were trained at another rotation",
    "rms_norm_eps": "the norms would divide by something else",
}
"""Fields that must agree, and why. `initializer_range` and `max_position_embeddings` fix neither tensors nor masks."""


def read_warm_start(folder: Path, *, shape: DrafterShape) -> dict[str, Tensor]:
    """Tensors (CPU, as stored) of an export that is to start a drafter of `shape`.

    Raises `ExportError` naming the first field in which the two differ, with both values.
    """
    found, state = read_dflash(folder)
    for field, reason in SAME.items():
        theirs, ours = getattr(found, field), getattr(shape, field)
        if theirs != ours:
            raise ExportError(key=f"{folder.name}: {field}", value=theirs, rule=f"this run has {ours}: {reason}")
    return state
