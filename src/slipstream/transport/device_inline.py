"""The colocated transport on CUDA when all slots fit on the device: nothing is copied at all.

The target writes a slot, the drafter reads it, on one stream; so no event is needed between them. The target is launched one
pack ahead of the drafter: the seal of a pack, made behind its forward, is compared while the forward of the next one runs,
and the loop, which launches only packs that were found whole, never finds the device idle. Seals are checked before every
use, on a stream beside: a slot that changed between two uses is found, and its pack made again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial

import torch

from slipstream.device.completer import Background, Threads
from slipstream.device.streams import Event, Streams
from slipstream.records import HiddenPack
from slipstream.transport.ledger import Assignment, PackOrder
from slipstream.transport.local_link import LocalLink
from slipstream.transport.making import MakingSource
from slipstream.transport.operations import DeviceSlot, Operations
from slipstream.transport.planned import PlannedUse, without_repeats
from slipstream.transport.seals import make_seal
from slipstream.transport.shelf import hidden_pack


@dataclass(frozen=True, slots=True, eq=False)
class Berth:
    """A slot on the device, and what its seal needs: int64 `[P]` each, and events.

    `again_P` on the device takes the checksum found by a check; `sealed_P` and `found_P` are those of the slot and of the
    check in page-locked memory. The slot was written and sealed; its check has landed.
    """

    slot: DeviceSlot
    again_P: torch.Tensor
    sealed_P: torch.Tensor
    found_P: torch.Tensor
    packed: Event
    checked: Event


class _Stage(Enum):
    WANTED = "wanted"
    CHECKING = "checking"
    WHOLE = "whole"


@dataclass(slots=True, eq=False)
class _Look:
    """One use of a pack, and how far its check is."""

    use: PlannedUse
    stage: _Stage = _Stage.WANTED


class DeviceInline(MakingSource):
    """A `HiddenSource` whose packs are made here by `produce(assignment, slot)`, on the calling thread's stream.

    `order` holds this process's packs, `uses` the order in which they are taken; `berths[i]` is slot i of the order. Packs
    that are not planned (kept ones) are taken at any time. A seal refused makes its pack be produced again; after
    `max_rejections` times running, SealBroken.
    """

    def __init__(
        self,
        *,
        order: Sequence[PackOrder],
        uses: Iterable[PlannedUse],
        produce: Callable[[Assignment, DeviceSlot], None],
        berths: Sequence[Berth],
        slot_bytes: int,
        fingerprint: str,
        streams: Streams,
        operations: Operations,
        background: Background | None = None,
        max_rejections: int = 3,
        ahead: int = 1,
    ) -> None:
        background = background or Threads(streams)
        link = LocalLink(order=order, slot_bytes=slot_bytes, fingerprint=fingerprint, max_rejections=max_rejections)
        super().__init__(produce=produce, link=link, background=background)
        self._berths, self._ahead = berths, ahead
        self._streams, self._operations = streams, operations
        self._uses = without_repeats(uses)
        self._coming: deque[_Look] = deque()
        self._visit: _Look | None = None
        self._taken: _Look | None = None
        self._fresh: set[int] = set()
        self._checking = streams.side("seal-check")
        self._completer = background.completer("seal-check", failed=self._fail)

    def release(self, pack_id: int) -> None:
        """The last use was given to the device: what is written into the slot next comes after it on the same stream."""
        with self._changed:
            self._taken = None
            self._link.release(pack_id)

    def close(self) -> None:
        """Nothing more will be taken. May be called twice."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._completer.close()

    def _found(self, pack_id: int) -> HiddenPack | None:
        """Make the pack the one that is taken, if it is whole; start what checks can be started on the way."""
        if self._taken is not None and self._taken.use.pack_id == pack_id:
            return self._record(pack_id)
        self._taken = None
        self._pump()
        look = self._look_for(pack_id)
        if look.stage is not _Stage.WHOLE:
            return None
        self._taken = look
        if look is self._visit:
            self._visit = None
        else:
            self._coming.popleft()
            self._pump()
        return self._record(pack_id)

    def _look_for(self, pack_id: int) -> _Look:
        if self._coming and self._coming[0].use.pack_id == pack_id:
            return self._coming[0]
        if self._visit is None:
            self._visit = _Look(PlannedUse(pack_id=pack_id, is_last=False))
            self._pump()
        assert self._visit.use.pack_id == pack_id, f"pack {pack_id} is taken while {self._visit.use.pack_id} is awaited"
        return self._visit

    def _pump(self) -> None:
        """Look as far ahead as it goes, and check what lies there and was not checked since it was made."""
        if self._closed:
            return
        depth = self._ahead + (self._taken is None)
        while len(self._coming) < depth and (use := next(self._uses, None)) is not None:
            self._coming.append(_Look(use))
        for look in self._live():
            pack_id = look.use.pack_id
            ready = self._link.ready(pack_id)
            if look.stage is not _Stage.WANTED or ready is None:
                continue
            if pack_id in self._fresh:
                self._fresh.remove(pack_id)
                self._settle(look, whole=True)
            else:
                look.stage = _Stage.CHECKING
                berth = self._berths[ready.assignment.slot]
                with self._streams.within(self._checking):
                    self._check(berth)
                self._submit(berth, partial(self._checked, look))

    def _missing(self) -> Iterable[int]:
        return [look.use.pack_id for look in self._live() if self._link.ready(look.use.pack_id) is None]

    @property
    def _is_checking(self) -> bool:
        return any(look.stage is _Stage.CHECKING for look in self._live())

    def _begin(self, assignment: Assignment) -> DeviceSlot:
        return self._berths[assignment.slot].slot

    def _cancel(self, assignment: Assignment) -> None:
        """Its slot is written again when it is issued again."""

    def _seal(self, assignment: Assignment) -> None:
        berth, producing = self._berths[assignment.slot], self._streams.current()
        self._operations.add_up(berth.slot, parts_P=berth.slot.parts_P)
        self._streams.order(after=self._checking, before=producing, event=berth.packed)
        with self._streams.within(self._checking):
            self._operations.copy(target=berth.sealed_P, source=berth.slot.parts_P)
            self._check(berth)
        self._submit(berth, partial(self._made, assignment))

    def _check(self, berth: Berth) -> None:
        self._operations.add_up(berth.slot, parts_P=berth.again_P)
        self._operations.copy(target=berth.found_P, source=berth.again_P)

    def _submit(self, berth: Berth, done: Callable[[], None]) -> None:
        self._streams.record(berth.checked, on=self._checking)
        self._completer.submit(berth.checked, done)

    def _made(self, assignment: Assignment) -> None:
        with self._changed:
            berth = self._berths[assignment.slot]
            seal = self._read(berth.sealed_P, assignment)
            self._link.publish(assignment, seal=seal)
            if self._read(berth.found_P, assignment) == seal:
                self._fresh.add(assignment.pack_id)
            else:
                self._link.refuse(assignment.pack_id)
            self._pump()
            self._changed.notify_all()

    def _checked(self, look: _Look) -> None:
        with self._changed:
            ready = self._link.ready(look.use.pack_id)
            assert ready is not None
            whose = ready.assignment
            self._settle(look, whole=self._read(self._berths[whose.slot].found_P, whose) == ready.seal)
            self._changed.notify_all()

    def _settle(self, look: _Look, *, whole: bool) -> None:
        if whole:
            look.stage = _Stage.WHOLE
            self._link.accept(look.use.pack_id)
        else:
            look.stage = _Stage.WANTED
            self._link.refuse(look.use.pack_id)

    def _read(self, parts_P: torch.Tensor, whose: Assignment) -> int:
        total = self._operations.read(parts_P)
        return make_seal(total=total, pack_id=whose.pack_id, slot=whose.slot, generation=whose.generation)

    def _live(self) -> list[_Look]:
        return [*self._coming, *([self._visit] if self._visit is not None else [])]

    def _record(self, pack_id: int) -> HiddenPack:
        ready = self._link.ready(pack_id)
        assert ready is not None
        slot = self._berths[ready.assignment.slot].slot
        return hidden_pack(ready, hidden_TKD=slot.hidden_TKD, scale_TK=slot.scale_TK, last_hidden_TD=slot.last_hidden_TD)
