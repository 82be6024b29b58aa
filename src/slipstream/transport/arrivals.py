"""The consumer's side of a trip through host memory: packs copied into a few device buffers before they are asked for.

In the planned order of uses, as far ahead as there are buffers, across the ends of optimizer steps. A copy waits, on the
device, for the last use of what its buffer held. Its seal is taken anew when it lands, on a stream beside the copy stream, so
that no copy queues behind a kernel; a completer compares it. Only packs that were found whole are handed out, and they need
no further wait: the CPU knew of it before it launched anything on them. A pack's host slot is given back when its last copy
has landed whole, not when it is taken.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Protocol

import torch

from slipstream.device.completer import Completer
from slipstream.device.streams import Event, Streams
from slipstream.records import HiddenPack
from slipstream.transport.host_slots import HostSlots
from slipstream.transport.messages import Ready
from slipstream.transport.operations import DeviceSlot, Operations
from slipstream.transport.planned import PlannedUse, without_repeats
from slipstream.transport.seals import make_seal
from slipstream.transport.shelf import hidden_pack


class Link(Protocol):
    """What tells which packs lie in host slots, and hears what became of them."""

    def ready(self, pack_id: int) -> Ready | None:
        """The pack as it was published; None while it is not."""
        ...

    def accept(self, pack_id: int) -> None:
        """A copy of it was found whole."""
        ...

    def refuse(self, pack_id: int) -> None:
        """It was not: the pack is to be made again. SealBroken once that happened too often."""
        ...

    def release(self, pack_id: int) -> None:
        """Its last copy has landed: its host slot may be written again."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """A device slot, a place in page-locked memory for its checksum, int64 `[P]`, and its events.

    What was copied into it; its checksum was taken and has landed; the work that reads it was given to the device.
    """

    slot: DeviceSlot
    found_P: torch.Tensor
    copied: Event
    checked: Event
    used: Event


class _Stage(Enum):
    WANTED = "wanted"
    COPYING = "copying"
    WHOLE = "whole"


@dataclass(slots=True, eq=False)
class _Trip:
    """One use of a pack, and the buffer that it is copied into. `ready` is what is being copied."""

    use: PlannedUse
    buffer: Buffer
    stage: _Stage = _Stage.WANTED
    ready: Ready | None = None


class Arrivals:
    """`buffers` are two or more; `guest` is one more for packs taken outside the planned order, none where there are none.

    `changed` is held by whoever calls, and notified when a pack has landed. Made on the stream that made the buffers; takes
    come from one thread.
    """

    def __init__(
        self,
        *,
        streams: Streams,
        operations: Operations,
        buffers: Sequence[Buffer],
        guest: Buffer | None,
        host: HostSlots,
        uses: Iterable[PlannedUse],
        link: Link,
        completer: Completer,
        changed: threading.Condition,
    ) -> None:
        assert len(buffers) >= 2, "with one buffer nothing is copied ahead"
        self._streams, self._operations, self._host, self._link = streams, operations, host, link
        self._completer, self._changed = completer, changed
        self._free, self._guest = deque(buffers), guest
        self._uses = without_repeats(uses)
        self._trips: deque[_Trip] = deque()
        self._stopped = False
        self._visit: _Trip | None = None
        self._taken: _Trip | None = None
        self._visited: _Trip | None = None
        self._copying, self._checking = streams.side("host-to-device"), streams.side("seal-check")
        for buffer in (*buffers, *([guest] if guest is not None else [])):
            streams.record(buffer.used, on=streams.current())  # they were cleared there, which may still be going on

    def pump(self) -> None:
        """Start every copy that can be: buffers in planned order, as packs are ready."""
        if self._stopped:
            return
        while self._free and (use := next(self._uses, None)) is not None:
            self._trips.append(_Trip(use=use, buffer=self._free.popleft()))
        for trip in self._live():
            if trip.stage is _Stage.WANTED and not self._is_copied_already(trip):
                self._start(trip)

    def take(self, pack_id: int) -> HiddenPack | None:
        """The pack in its buffer, found whole; None while that is not so.

        `pack_id` is that of the next planned use, which ends the one before; of the one before again; or of a pack that is
        not planned, which ends the use of the last such pack.
        """
        for taken in (self._taken, self._visited):
            if taken is not None and taken.use.pack_id == pack_id:
                return _record(taken)
        self.pump()
        if self._trips and self._trips[0].use.pack_id == pack_id:
            self.finish()
            self.pump()
            trip = self._trips[0]
            if trip.stage is _Stage.WHOLE:
                self._taken = self._trips.popleft()
        else:
            trip = self._visit_of(pack_id)
            if trip.stage is _Stage.WHOLE:
                self._visited, self._visit = trip, None
        return _record(trip) if trip.stage is _Stage.WHOLE else None

    def finish(self) -> None:
        """Nothing more will be given to the device that reads the planned pack taken last: its buffer is next in turn."""
        trip, self._taken = self._taken, None
        if trip is not None:
            self._streams.record(trip.buffer.used, on=self._streams.current())
            self._free.append(trip.buffer)

    def stop(self) -> None:
        """Start no copy any more."""
        self._stopped = True

    def drain(self) -> None:
        """Wait until no copy is on its way. For leaving, after the completer has ended; not for a loop."""
        for trip in self._live():
            trip.buffer.checked.synchronize()

    def missing(self) -> list[int]:
        """Packs that have a buffer and are not ready, in planned order."""
        wanted = (trip.use.pack_id for trip in self._live() if trip.stage is _Stage.WANTED)
        return [pack_id for pack_id in wanted if self._link.ready(pack_id) is None]

    @property
    def copying(self) -> bool:
        """Whether some copy is on its way."""
        return any(trip.stage is _Stage.COPYING for trip in self._live())

    def _live(self) -> list[_Trip]:
        return [*self._trips, *([self._visit] if self._visit is not None else [])]

    def _visit_of(self, pack_id: int) -> _Trip:
        """The trip of a pack that is not planned, into the guest's buffer."""
        if self._visit is None:
            planned = self._trips[0].use.pack_id if self._trips else None
            assert self._guest is not None, f"pack {pack_id} is taken, {planned} is planned"
            if self._visited is not None:
                self._streams.record(self._guest.used, on=self._streams.current())
                self._visited = None
            self._visit = _Trip(use=PlannedUse(pack_id=pack_id, is_last=False), buffer=self._guest)
            self.pump()
        assert self._visit.use.pack_id == pack_id, f"pack {pack_id} is taken while {self._visit.use.pack_id} is awaited"
        return self._visit

    def _is_copied_already(self, trip: _Trip) -> bool:
        """Whether another copy of the pack is on its way: were that refused, the slot would be written under this one."""
        return any(
            other.stage is _Stage.COPYING and other.use.pack_id == trip.use.pack_id
            for other in self._live()
            if other is not trip
        )

    def _start(self, trip: _Trip) -> None:
        ready = self._link.ready(trip.use.pack_id)
        if ready is None:
            return
        trip.ready, trip.stage = ready, _Stage.COPYING
        streams, buffer = self._streams, trip.buffer
        streams.wait(buffer.used, by=self._copying)
        with streams.within(self._copying):
            self._host.copy_in(ready.assignment.slot, target=buffer.slot, operations=self._operations)
        streams.order(after=self._checking, before=self._copying, event=buffer.copied)
        with streams.within(self._checking):
            self._operations.add_up(buffer.slot, parts_P=buffer.slot.parts_P)
            self._operations.copy(target=buffer.found_P, source=buffer.slot.parts_P)
        streams.record(buffer.checked, on=self._checking)
        self._completer.submit(buffer.checked, partial(self._landed, trip))

    def _landed(self, trip: _Trip) -> None:
        with self._changed:
            assert trip.ready is not None
            whose, pack_id = trip.ready.assignment, trip.use.pack_id
            total = self._operations.read(trip.buffer.found_P)
            found = make_seal(total=total, pack_id=pack_id, slot=whose.slot, generation=whose.generation)
            if found == trip.ready.seal:
                trip.stage = _Stage.WHOLE
                self._link.accept(pack_id)
                if trip.use.is_last:
                    self._link.release(pack_id)
            else:
                trip.stage = _Stage.WANTED
                self._link.refuse(pack_id)
            self.pump()
            self._changed.notify_all()


def _record(trip: _Trip) -> HiddenPack:
    assert trip.ready is not None
    slot = trip.buffer.slot
    return hidden_pack(trip.ready, hidden_TKD=slot.hidden_TKD, scale_TK=slot.scale_TK, last_hidden_TD=slot.last_hidden_TD)
