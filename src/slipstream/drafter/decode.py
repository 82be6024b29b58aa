"""The drafter as a server runs it: a cache of the context's keys and values, and one block at a time.

Nothing of a block is ever stored: once tokens are accepted, the target's hidden states of them extend the context.

Shape letters: S context tokens · G key-value heads · C head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True)
class DraftContext:
    """One sequence's context: for each layer, keys and values `[G, capacity, C]`, filled for positions 0 to `length - 1`."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    length: int = 0

    def write(self, *, layer: int, start: int, key_GSC: torch.Tensor, value_GSC: torch.Tensor) -> None:
        """Store one layer's rows from `start` on. Moving `length` once all layers are written is the caller's."""
        stop = start + key_GSC.shape[1]
        for store, rows in ((self.keys, key_GSC), (self.values, value_GSC)):
            store[layer] = _grown(store[layer], tokens=stop, kept=start)
            store[layer][:, start:stop] = rows


def _grown(rows_GSC: torch.Tensor, *, tokens: int, kept: int) -> torch.Tensor:
    """The same storage if it holds `tokens`, else one at least twice as large with the first `kept` rows copied."""
    heads, capacity, width = rows_GSC.shape
    if tokens <= capacity:
        return rows_GSC
    larger = rows_GSC.new_empty(heads, max(tokens, 2 * capacity, 128), width)
    larger[:, :kept] = rows_GSC[:, :kept]
    return larger
