"""What the CPU knows of a use (tokens, positions, masks) on its way to the GPU: one persistent slot and one copy for each.

Waits for: a slot whose last copy is done, in the thread that prepares steps. Unblocked by: the side stream. The loop itself
only launches copies; they run ahead of the computation by as many uses as there are device buffers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slipstream.trainer.lanes import Lanes

ALIGNMENT_BYTES = 128
"""Where arrays start in a slot: kernels are compiled anew for pointers that are less aligned."""

DEVICE_BUFFERS = 3
"""Uses whose arrays are on the device at once: one computes, one is there, one arrives."""

Arrays = Mapping[str, Tensor]
"""On the device."""

HostArrays = Mapping[str, Tensor | npt.NDArray[Any]]
"""On the CPU."""


@dataclass(frozen=True, slots=True)
class _Field:
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape) * self.dtype.itemsize

    def view(self, memory: Tensor) -> Tensor:
        """All rows of the array."""
        return memory[self.start : self.stop].view(self.dtype).view(self.shape)


@dataclass(frozen=True, slots=True)
class ArrayLayout:
    """Where named arrays lie in a piece of memory. Later ones have the same types and shapes; the first axis may be shorter."""

    fields: Mapping[str, _Field]
    nbytes: int

    @classmethod
    def of(cls, arrays: HostArrays) -> ArrayLayout:
        """A layout with room for these, the largest that there will be."""
        fields, start = {}, 0
        for name, array in ((name, torch.as_tensor(array)) for name, array in arrays.items()):
            field = _Field(start=start, dtype=array.dtype, shape=tuple(array.shape))
            assert field.shape, f"{name} is a scalar: a number that the CPU knows travels as an argument"
            fields[name] = field
            start = -(-field.stop // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return cls(fields=fields, nbytes=start)

    def whole(self, memory: Tensor) -> dict[str, Tensor]:
        """All arrays in a piece of memory, as long as there is room for."""
        return {name: field.view(memory) for name, field in self.fields.items()}


class _HostSlot:
    """Page-locked memory for one use. `sent` is recorded behind its copy; `waiting` while it is filled and not yet sent."""

    def __init__(self, lanes: Lanes, layout: ArrayLayout) -> None:
        self.memory, self.sent, self.waiting = lanes.pinned(layout.nbytes), lanes.event(), False
        self._views = {name: _array(view) for name, view in layout.whole(self.memory).items()}

    def fill(self, arrays: HostArrays) -> dict[str, int]:
        """Put arrays in, zeros behind those that are short; returns their lengths. Asserts that they fit."""
        assert arrays.keys() == self._views.keys(), f"arrays {sorted(arrays.keys() ^ self._views.keys())} come or went"
        lengths = {}
        for name, view in self._views.items():
            array = _array(arrays[name])
            fits = array.dtype == view.dtype and array.shape[1:] == view.shape[1:] and len(array) <= len(view)
            assert fits, f"{name} is {array.dtype} {array.shape}, its slot {view.dtype} {view.shape}"
            length = lengths[name] = len(array)
            view[:length] = array
            if length < len(view):
                view[length:] = 0
        return lengths


class _DeviceBuffer:
    """Device memory for one use: `ready` is recorded behind the copy, `used` behind the last kernel that reads it."""

    def __init__(self, lanes: Lanes, layout: ArrayLayout) -> None:
        self.memory, self.ready, self.used = lanes.buffer(layout.nbytes), lanes.event(), lanes.event()
        self._views = layout.whole(self.memory)

    def views(self, lengths: Mapping[str, int]) -> dict[str, Tensor]:
        """All arrays, each cut to its length."""
        return {name: view if lengths[name] == len(view) else view[: lengths[name]] for name, view in self._views.items()}


def _array(array: Tensor | npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A tensor's memory for NumPy, which copies small arrays at half of torch's price; the bits of types that NumPy lacks."""
    if isinstance(array, np.ndarray):
        return array
    return (array.view(torch.int16) if array.dtype == torch.bfloat16 else array).numpy()


@dataclass(frozen=True, slots=True)
class StagedArrays:
    """Arrays of one use in a host slot."""

    slot: _HostSlot
    lengths: Mapping[str, int]


class MetadataRing:
    """Slots for the arrays of uses: `num_slots` on the host, `DEVICE_BUFFERS` on the device, taken in turn.

    `stage` is called by the thread that prepares, `send` and `used` by the loop, in the same order of uses. There are more
    slots than uses that are staged and not sent, so that only a copy still running can make `stage` wait.
    """

    def __init__(self, lanes: Lanes, *, layout: ArrayLayout, num_slots: int) -> None:
        self._lanes, self._layout, self._side = lanes, layout, lanes.side("metadata")
        self._slots = [_HostSlot(lanes, layout) for _ in range(num_slots)]
        self._buffers = [_DeviceBuffer(lanes, layout) for _ in range(DEVICE_BUFFERS)]
        self._staged = self._sent = 0
        self._current: _DeviceBuffer | None = None

    def wait_for_room(self, count: int) -> None:
        """Sleep until the next `count` slots are free to be filled. In the thread that stages."""
        self._lanes.adopt_thread()
        for ahead in range(min(count, len(self._slots))):
            self._slots[(self._staged + ahead) % len(self._slots)].sent.synchronize()

    def stage(self, arrays: HostArrays) -> StagedArrays:
        """Put arrays in the next slot, zeros behind those that are short. Sleeps while the slot's last copy is under way."""
        slot = self._slots[self._staged % len(self._slots)]
        self._staged += 1
        assert not slot.waiting, f"more than {len(self._slots)} uses are staged"
        self._lanes.adopt_thread()
        slot.sent.synchronize()
        lengths = slot.fill(arrays)
        slot.waiting = True
        return StagedArrays(slot=slot, lengths=lengths)

    def send(self, staged: StagedArrays) -> dict[str, Tensor]:
        """The arrays on the device, valid for what is launched from here to `used`. Waits for nothing."""
        assert self._current is None, "the use before this one is still being launched"
        slot, buffer = staged.slot, self._buffers[self._sent % DEVICE_BUFFERS]
        self._sent += 1
        self._lanes.copy([(buffer.memory, slot.memory)], on=self._side, after=buffer.used, then=[buffer.ready, slot.sent])
        slot.waiting = False
        self._lanes.hold(buffer.ready)
        self._current = buffer
        return buffer.views(staged.lengths)

    def send_to(self, memory: Tensor, staged: StagedArrays) -> None:
        """The arrays, whole, to memory of the layout's size that the compute stream alone uses; nothing is to be marked."""
        self.send(staged)
        assert self._current is not None
        memory.copy_(self._current.memory)
        self.used()

    def used(self) -> None:
        """The backward pass of the use that was sent last has been launched: its buffer may be overwritten behind it."""
        assert self._current is not None, "nothing was sent"
        self._lanes.mark(self._current.used)
        self._current = None
