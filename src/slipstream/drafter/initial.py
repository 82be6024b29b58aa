"""A new drafter's weights: drawn on the CPU, whatever device they are for, from one generator in the order of parameters.

Nothing can be drawn out of turn, so one thread draws them all: about four nanoseconds a weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

PIECE = 1 << 22
"""Weights drawn at a time, through a buffer of 16 MiB. A multiple of `BLOCK`."""

BLOCK = 16
"""Torch fills a tensor of normal values in blocks of so many, and draws anew for the last ones where they fill no block."""


@torch.no_grad()
def draw_weights(weights: Iterable[Tensor], *, seed: int, std: float) -> Iterator[None]:
    """Fill matrices with normal(0, `std`), rounded to their type, and vectors with ones; stops for a moment after each piece.

    The values are those of one `torch.randn` in fp32 a matrix, times `std`.
    """
    generator = torch.Generator().manual_seed(seed)
    # types and devices are said everywhere: what loads a model in another thread changes torch's defaults meanwhile
    buffer = torch.empty(PIECE + BLOCK, dtype=torch.float32, device="cpu")
    for weight in weights:
        if weight.dim() == 1:
            weight.fill_(1.0)
            continue
        for part in _pieces(weight.view(-1)):
            part.copy_(buffer[: len(part)].normal_(generator=generator).mul_(std))
            yield


def _pieces(flat: Tensor) -> list[Tensor]:
    """Parts that are drawn one by one as they would be at once: whole blocks, and what is left over with the last of them."""
    starts = range(0, max(1, len(flat) - BLOCK + 1), PIECE)
    return [flat[start : len(flat) if start == starts[-1] else start + PIECE] for start in starts]
