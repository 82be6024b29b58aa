"""Which rows of a slot are not finite, found on the device. Training skips their step, measuring takes them as 0.

Shape letters: T context tokens · K tapped layers · D hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def not_finite(hidden_TKD: Tensor) -> Tensor:
    """Tokens with a value that is not finite, bool `[T]`: one pass over a slot, since a sum keeps what is not finite."""
    sums_T = hidden_TKD.flatten(1).sum(dim=1, dtype=torch.float32)
    return ~torch.isfinite(sums_T)
