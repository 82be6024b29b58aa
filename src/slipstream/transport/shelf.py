"""The packs that lie ready in a consumer's pool, and the checking of their seals: what every consumer's end shares."""

from __future__ import annotations

import time
from dataclasses import dataclass

from slipstream.errors import SealBroken
from slipstream.records import HiddenPack
from slipstream.transport.ends import SourceStats, Verify
from slipstream.transport.ledger import Assignment
from slipstream.transport.slots import SlotPool


@dataclass(slots=True)
class _Held:
    """A pack that was published: what was written where, its seal, whose work it is, and whether a take has checked it."""

    assignment: Assignment
    seal: int
    fingerprint: str
    kept: bool
    checked: bool = False


class Shelf:
    """Ready packs by id. Not thread-safe; `waiting_seconds` is added to by its owner."""

    def __init__(self, *, pool: SlotPool, verify: Verify, max_rejections: int) -> None:
        self._pool, self._verify, self._max_rejections = pool, verify, max_rejections
        self._held: dict[int, _Held] = {}
        self._rejections: dict[int, int] = {}
        self._verifying_seconds = 0.0
        self._taken = self._released = self._rejected = 0
        self.waiting_seconds = 0.0

    def __contains__(self, pack_id: int) -> bool:
        return pack_id in self._held

    def put(self, *, assignment: Assignment, seal: int, fingerprint: str, kept: bool) -> None:
        """A pack was published for this consumer."""
        self._held[assignment.pack_id] = _Held(assignment=assignment, seal=seal, fingerprint=fingerprint, kept=kept)

    def take(self, pack_id: int) -> HiddenPack | Assignment:
        """The pack if its bytes are those that were sealed, else the broken assignment, now off the shelf.

        SealBroken when this pack was rejected `max_rejections` times running.
        """
        held = self._held[pack_id]
        broken = held.assignment
        if self._is_whole(held):
            self._taken += 1
            self._rejections.pop(pack_id, None)
            return self._record(held)
        self._rejected += 1
        del self._held[pack_id]
        times = self._rejections[pack_id] = self._rejections.get(pack_id, 0) + 1
        if times >= self._max_rejections:
            raise SealBroken(
                f"pack {pack_id}, slot {broken.slot} of rank {broken.rank}, generation {broken.generation}: "
                f"the bytes are not those that were sealed, {times} times running"
            )
        return broken

    def release(self, pack_id: int) -> None:
        """Off the shelf for good; the consumer writes down that its last use is over."""
        assert pack_id in self._held, f"pack {pack_id} is released, but it is not here"
        assert not self._held[pack_id].kept, f"pack {pack_id} is kept until its consumer leaves"
        del self._held[pack_id]
        self._released += 1

    def clear(self) -> None:
        """The consumer leaves."""
        self._held.clear()

    def stats(self) -> SourceStats:
        """So far."""
        return SourceStats(
            waiting_seconds=self.waiting_seconds,
            verifying_seconds=self._verifying_seconds,
            packs_taken=self._taken,
            packs_released=self._released,
            seals_rejected=self._rejected,
        )

    def _is_whole(self, held: _Held) -> bool:
        if held.checked and self._verify is Verify.FIRST_TAKE:
            return True
        started = time.perf_counter()
        found = self._pool.seal(held.assignment.slot, held.assignment.pack_id, held.assignment.generation)
        self._verifying_seconds += time.perf_counter() - started
        held.checked = found == held.seal
        return held.checked

    def _record(self, held: _Held) -> HiddenPack:
        slot = held.assignment.slot
        return HiddenPack(
            pack_id=held.assignment.pack_id,
            slot=slot,
            generation=held.assignment.generation,
            hidden_TKD=self._pool.hidden(slot),
            last_hidden_TD=self._pool.last_hidden(slot),
            seal=held.seal,
            target_fingerprint=held.fingerprint,
        )
