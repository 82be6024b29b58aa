"""A pool of host slots as a device sees it: which of them it can copy from and to, and where their checksums land."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from slipstream.device.pinned import PinnedSlots
from slipstream.device.streams import Event, Streams
from slipstream.transport.operations import DeviceSlot, Operations
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
        operations.copy(target=self.pool.hidden(slot), source=source.hidden_TKD)
        last_hidden = self.pool.last_hidden(slot)
        if last_hidden is not None and source.last_hidden_TD is not None:
            operations.copy(target=last_hidden, source=source.last_hidden_TD)
        operations.copy(target=self.parts_MP[slot], source=source.parts_P)

    def copy_in(self, slot: int, *, target: DeviceSlot, operations: Operations) -> None:
        """Enqueue the copy of host slot `slot` into a device slot; its checksum is left to be taken anew."""
        self.locked.ensure(slot)
        operations.copy(target=target.hidden_TKD, source=self.pool.hidden(slot))
        last_hidden = self.pool.last_hidden(slot)
        if last_hidden is not None and target.last_hidden_TD is not None:
            operations.copy(target=target.last_hidden_TD, source=last_hidden)

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
