"""What steps are worth, for their metrics: useful work, fills, mixing; and the device memory that is held just now.

Work is added up in the thread that prepares steps, and read when a step's figures have come. Waits for nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from slipstream.config.drafter_shape import DrafterShape
from slipstream.observe.metrics import StepWorth
from slipstream.plan.flops import drafter_flops
from slipstream.records import Pack, Use

MEMORY_EVERY_SECONDS = 1.0
"""Asking torch for its counters takes a tenth of a millisecond: not at every step of a small drafter."""


@dataclass(frozen=True, slots=True)
class GpuWork:
    """What the GPU of a rank can do in a second, in FLOP, if it is known; and what the target's forward over a pack is worth,
    where this process makes its packs itself.
    """

    peak_flops: float | None
    target_flops: Callable[[Pack], float] | None


class StepWorths:
    """Worth by step. `prepared` for each of this rank's uses, when they are prepared; `of` once, when a step is read."""

    def __init__(
        self,
        *,
        shape: DrafterShape,
        token_room: int,
        anchor_room: int,
        mixing: Sequence[float] | npt.NDArray[np.float32],
        work: GpuWork | None,
    ) -> None:
        self._shape, self._token_room, self._anchor_room, self._mixing = shape, token_room, anchor_room, mixing
        self._work = work
        self._flops: dict[int, float] = {}

    def prepared(self, pack: Pack, use: Use, *, num_rows: int) -> None:
        """Add one use of `num_rows` supervised rows to its step. From the thread that prepares."""
        if self._work is None:
            return
        anchors = use.anchors[use.anchor_valid]
        starts = pack.starts[np.searchsorted(pack.starts, anchors, side="right") - 1]
        flops = drafter_flops(
            shape=self._shape,
            tokens=pack.num_tokens,
            anchors=len(anchors),
            visible_pairs=float((anchors - starts + self._shape.block_size).sum()) * self._shape.block_size,
            rows=num_rows,
        )
        if self._work.target_flops is not None and use.use_number == 0:
            flops += self._work.target_flops(pack)
        self._flops[use.step] = self._flops.get(use.step, 0.0) + flops

    def of(self, step: int) -> StepWorth:
        """A step's worth; that of steps before it is forgotten."""
        flops = self._flops.pop(step, None)
        for known in list(self._flops):
            if known < step:  # its figures were dropped
                del self._flops[known]
        return StepWorth(
            token_room=self._token_room,
            anchor_room=self._anchor_room,
            mixing=float(self._mixing[step]),
            useful_flops=flops,
            peak_flops=None if self._work is None else self._work.peak_flops,
        )


class DeviceMemory:
    """Bytes that torch's allocator has handed out and has reserved on a device, about once a second. None waits for it."""

    def __init__(self, device: torch.device, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._device, self._clock = device, clock
        self._due = clock()

    def metrics(self) -> dict[str, int]:
        """What is held now; nothing on a CPU, nor again within a second."""
        if self._device.type != "cuda" or self._clock() < self._due:
            return {}
        self._due = self._clock() + MEMORY_EVERY_SECONDS
        stats = torch.cuda.memory_stats_as_nested_dict(self._device)
        names = {"device_allocated_bytes": "allocated_bytes", "device_reserved_bytes": "reserved_bytes"}
        return {name: int(stats[theirs]["all"]["current"]) for name, theirs in names.items()}
