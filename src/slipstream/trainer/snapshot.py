"""A checkpoint's state, copied off the GPU while training goes on.

The copies run on the side stream behind the step that made the state; the next update waits for them on the GPU, and the
thread that writes waits for them on the CPU. The loop waits for neither. 12 bytes of page-locked host memory a parameter.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from slipstream.records import Cursor
from slipstream.trainer.checkpoint import Checkpoint
from slipstream.trainer.lanes import Lanes, Pair
from slipstream.trainer.late_metrics import counts_on_host
from slipstream.trainer.optim import FlatAdamW, OptimizerState

FLOAT_BYTES = 4

PIECE_FLOATS = 1 << 24
"""Floats of one copy: about a millisecond. Other copies off the GPU get their turn between two of them."""


class Snapshot:
    """Persistent host memory for the state of `optimizer` and the run's counts `totals` (fp64, on the device).

    One at a time: `take` again only when what was taken before has been written.
    """

    def __init__(self, lanes: Lanes, *, optimizer: FlatAdamW, totals: Tensor) -> None:
        self._lanes, self._side, self._optimizer, self._totals = lanes, lanes.side("snapshot"), optimizer, totals
        self._flats = (optimizer.master, optimizer.exp_avg, optimizer.exp_avg_sq)
        size = len(optimizer.master)
        self._slab = lanes.slab(FLOAT_BYTES * size * len(self._flats))
        floats = self._slab.memory.view(torch.float32)
        self._copies = tuple(floats[size * part : size * (part + 1)] for part in range(len(self._flats)))
        self._good_steps = lanes.pinned(8).view(torch.int64)
        self._counts = lanes.pinned(8 * len(totals)).view(torch.float64)
        self._reached, self._copied = lanes.event(), lanes.event()
        self._pending = False

    def take(self, *, cursor: Cursor, acceptance_length: float | None) -> Callable[[], Checkpoint]:
        """Launch the copies. What is returned sleeps until they are done and makes the checkpoint: for the writing thread."""
        self._slab.ensure()
        self._lanes.mark(self._reached)
        self._lanes.copy(self._pairs(), on=self._side, after=self._reached, then=[self._copied])
        self._pending = True

        def arrived() -> Checkpoint:
            self._lanes.adopt_thread()
            self._copied.synchronize()
            return Checkpoint(
                cursor=cursor,
                state=self._state(),
                counters=counts_on_host(self._counts),
                acceptance_length=acceptance_length,
            )

        return arrived

    def before_update(self) -> None:
        """Before weights or moments change: what is launched from here on runs behind the copies."""
        if self._pending:
            self._lanes.hold(self._copied)
            self._pending = False

    def _pairs(self) -> list[Pair]:
        """The two small copies, then those of the state, each within a span of the slab and no longer than a piece."""
        pairs: list[Pair] = [(self._good_steps, self._optimizer.good_steps.view(1)), (self._counts, self._totals)]
        size = len(self._optimizer.master)
        for part, flat in enumerate(self._flats):
            for start, stop in self._slab.spans:
                first = max(start // FLOAT_BYTES - part * size, 0)
                last = min(stop // FLOAT_BYTES - part * size, size)
                for begin in range(first, last, PIECE_FLOATS):
                    piece = slice(begin, min(begin + PIECE_FLOATS, last))
                    pairs.append((self._copies[part][piece], flat[piece]))
        return pairs

    def _state(self) -> OptimizerState:
        named = [{region.name: region.view(flat) for region in self._optimizer.regions} for flat in self._copies]
        master, exp_avg, exp_avg_sq = named
        return OptimizerState(master=master, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, good_steps=self._good_steps[0].clone())
