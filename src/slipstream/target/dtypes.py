"""The types a target computes in, by their names in a recipe."""

from __future__ import annotations

import torch

DTYPES: dict[str, torch.dtype] = {"bfloat16": torch.bfloat16, "float32": torch.float32}
