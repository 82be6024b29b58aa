"""A pool of host slots as a device sees it: which of them it can copy from and to, and where their checksums land."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from slipstream.device.pinned import PinnedSlots
from slipstream.device.streams import Event, Streams
from slipstream.transport.operations import DeviceSlot, Operations, tensors_of
from slipstream.transport.slots import SlotPool


class Locked(Protocol):
    """Page-locked memory, slot by slot."""

    def ensure(self, slot: int) -> None:
        """Return once that slot can be copied asynchronously."""
        ...

    def close(self) -> None:
        """Nothing is copied any more."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class HostSlots:
    """The slots of `pool`; for each, the parts of its checksum in page-locked memory `[M, P]` and an event of this process.

    `landed[i]` is recorded behind a copy into slot i. It and `parts_MP[i]` go with the host slot, not with the device slot
    that the copy came from: that one may be on its way again before anybody has read them.
    """

    pool: SlotPool
    locked: Locked
    parts_MP: torch.Tensor
    landed: Sequence[Event]

    def copy_out(self, slot: int, *, source: DeviceSlot, operations: Operations) -> None:
        """Enqueue the copy of a device slot and of its checksum into host slot `slot`."""
        self.locked.ensure(slot)
        for ours, theirs in zip(self._tensors(slot), tensors_of(source), strict=True):
            operations.copy(target=ours, source=theirs)
        operations.copy(target=self.parts_MP[slot], source=source.parts_P)

    def copy_in(self, slot: int, *, target: DeviceSlot, operations: Operations) -> None:
        """Enqueue the copy of host slot `slot` into a device slot; its checksum is left to be taken anew."""
        self.locked.ensure(slot)
        for ours, theirs in zip(self._tensors(slot), tensors_of(target), strict=True):
            operations.copy(target=theirs, source=ours)

    def _tensors(self, slot: int) -> list[torch.Tensor]:
        parts = (self.pool.hidden(slot), self.pool.scale(slot), self.pool.last_hidden(slot))
        return [part for part in parts if part is not None]

    def close(self) -> None:
        """Unlock the memory and let go of the pool. Nothing may be on its way any more."""
        self.locked.close()
        self.pool.close()


def lock_slots(pool: SlotPool, *, order: Sequence[int], streams: Streams, operations: Operations) -> HostSlots:
    """The slots of a pool, page-locked one by one in the background, those of `order` first to last.

    `PreflightError` when they are not whole pages.
    """
    nbytes = pool.layout.nbytes
    spans = [(pool.hidden(slot).data_ptr(), nbytes) for slot in range(pool.num_slots)]
    return HostSlots(
        pool=pool,
        locked=PinnedSlots(spans, order=order),
        parts_MP=torch.zeros(pool.num_slots, operations.num_parts, dtype=torch.int64, pin_memory=True),
        landed=[streams.event() for _ in range(pool.num_slots)],
    )
