"""The types a target computes in, by their names in a recipe."""

from __future__ import annotations

import torch

DTYPES: dict[str, torch.dtype] = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float8": torch.bfloat16}
"""Type of hidden states, and of weights as they are loaded. "float8" is of large matrices alone: `float8.quantise_decoder`
rounds them afterwards, and all that lies between them is bfloat16."""
