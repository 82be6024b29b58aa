"""The producer's side of a trip through host memory: device slots, taken in turn, copied out behind the target's back.

The target writes a device slot on the stream it computes on, in its own hooks; the seal is made on that stream too. A copy
stream takes slot and seal to the host slot, and a completer hands the pack over when they are there. The loop waits for
none of it: where the next pack's device slot is still on its way, the compute stream waits, not the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from slipstream.device.completer import Completer
from slipstream.device.streams import Event, Streams
from slipstream.transport.host_slots import HostSlots
from slipstream.transport.ledger import Assignment
from slipstream.transport.operations import DeviceSlot, Operations
from slipstream.transport.seals import make_seal


@dataclass(frozen=True, slots=True, eq=False)
class _Berth:
    """A device slot and its events: it was written and sealed; it was copied out."""

    slot: DeviceSlot
    packed: Event
    copied: Event


class Departures:
    """`slots` are two or more, on the device; `hosts[r]` is the pool of drafter rank r.

    `publish(assignment, seal=)` is called by the completer when the bytes are in host memory. One thread begins and departs.
    """

    def __init__(
        self,
        *,
        streams: Streams,
        operations: Operations,
        slots: Sequence[DeviceSlot],
        hosts: Mapping[int, HostSlots],
        completer: Completer,
        publish: Callable[..., None],
    ) -> None:
        assert len(slots) >= 2, "with one device slot every pack would wait for the copy of the one before it"
        self._streams, self._operations, self._hosts = streams, operations, hosts
        self._completer, self._publish = completer, publish
        self._berths = [_Berth(slot=slot, packed=streams.event(), copied=streams.event()) for slot in slots]
        self._begun = 0
        self._open: dict[Assignment, _Berth] = {}
        self._copying = streams.side("device-to-host")

    def begin(self, assignment: Assignment) -> DeviceSlot:
        """The device slot to write, on the calling thread's current stream, which waits until the slot is free."""
        assert not self._open, "a pack is written after the one before it has departed"
        berth = self._berths[self._begun % len(self._berths)]
        self._begun += 1
        self._streams.wait(berth.copied, by=self._streams.current())
        self._open[assignment] = berth
        return berth.slot

    def writing(self, assignment: Assignment) -> DeviceSlot:
        """The device slot that was begun for it."""
        return self._open[assignment].slot

    def cancel(self, assignment: Assignment) -> None:
        """It will not be written to the end: the device slot is left as it is."""
        del self._open[assignment]

    def depart(self, assignment: Assignment) -> None:
        """Seal what the current stream was given to write, and send it on its way."""
        berth = self._open.pop(assignment)
        producing = self._streams.current()  # before entering the copy stream, where it would be that one
        self._operations.add_up(berth.slot, parts_P=berth.slot.parts_P)
        self._streams.order(after=self._copying, before=producing, event=berth.packed)
        host = self._hosts[assignment.rank]
        with self._streams.within(self._copying):
            host.copy_out(assignment.slot, source=berth.slot, operations=self._operations)
        self._streams.record(berth.copied, on=self._copying)
        landed = host.landed[assignment.slot]
        self._streams.record(landed, on=self._copying)
        self._completer.submit(landed, partial(self._landed, assignment))

    def drain(self) -> None:
        """Wait until no copy is on its way. For leaving, after the completer has ended; not for a loop."""
        for berth in self._berths:
            berth.copied.synchronize()

    def _landed(self, assignment: Assignment) -> None:
        total = self._operations.read(self._hosts[assignment.rank].parts_MP[assignment.slot])
        seal = make_seal(total=total, pack_id=assignment.pack_id, slot=assignment.slot, generation=assignment.generation)
        self._publish(assignment, seal=seal)
