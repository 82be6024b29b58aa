"""Tensors of the CPU on their way to a GPU, for work that waits for the GPU now and then: no allocation after the first round.

torch's own page-locked blocks come back once their copies are done, so that how many are needed depends on how busy the GPU
is. Here one piece of memory holds what is sent between two waits, as large as the largest such batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

ALIGNMENT_BYTES = 128
LEAST_BYTES = 1 << 20
"""Of a piece that is added where the memory turns out too small."""


class BatchSender:
    """Calls copy a tensor to the device and return it there; `arrived` ends a batch of them. On a CPU tensors stay as they are.

    `allocate(nbytes)` makes page-locked memory.
    """

    def __init__(self, device: torch.device, *, allocate: Callable[[int], Tensor] | None = None) -> None:
        self._device = device
        self._allocate = allocate or _page_locked
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._piece, self._used, self._batch = self._memory, 0, 0

    def __call__(self, tensor: Tensor) -> Tensor:
        """The tensor on the device, copied on the current stream. Waits for nothing."""
        if self._device.type == "cpu":
            return tensor
        nbytes = -(-tensor.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if self._used + nbytes > len(self._piece):
            # what the full piece sent may be under way: torch gives its memory back once it has arrived
            self._piece, self._used = self._allocate(max(nbytes, LEAST_BYTES)), 0
        room = self._piece[self._used : self._used + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        self._used += nbytes
        self._batch += nbytes
        room.copy_(tensor)
        return room.to(self._device, non_blocking=True)

    def arrived(self) -> None:
        """The caller has waited for the device: all that was sent is there, and the memory is free for the next batch."""
        if self._batch > len(self._memory):
            self._memory = self._allocate(self._batch)
        self._piece, self._used, self._batch = self._memory, 0, 0


def _page_locked(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
