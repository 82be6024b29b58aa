"""The packs that lie ready in a consumer's pool, and the checking of their seals: what every consumer's end shares."""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass

import torch

from slipstream.errors import SealBroken
from slipstream.records import HiddenPack
from slipstream.transport.ends import SourceStats, Verify
from slipstream.transport.ledger import Assignment
from slipstream.transport.messages import Ready
from slipstream.transport.slots import SlotPool

_LOG = logging.getLogger(__name__)

NEWEST = 64
"""Refused packs that are remembered by name."""


@dataclass(slots=True)
class _Held:
    """A pack that was published, and whether a take has checked it."""

    ready: Ready
    checked: bool = False


class Shelf:
    """Ready packs by id, whoever checks their seals. Not thread-safe; `waiting_seconds` is added to by its owner."""

    def __init__(self, *, max_rejections: int) -> None:
        self._max_rejections = max_rejections
        self._held: dict[int, _Held] = {}
        self._rejections: dict[int, int] = {}
        self._verifying_seconds = 0.0
        self._taken = self._released = self._rejected = 0
        self._newest_rejected: deque[int] = deque(maxlen=NEWEST)
        self.waiting_seconds = 0.0

    def __contains__(self, pack_id: int) -> bool:
        return pack_id in self._held

    def put(self, ready: Ready) -> None:
        """A pack was published for this consumer."""
        self._held[ready.assignment.pack_id] = _Held(ready)

    def ready(self, pack_id: int) -> Ready | None:
        """What was published of a pack, if it is here."""
        held = self._held.get(pack_id)
        return None if held is None else held.ready

    def accept(self, pack_id: int) -> None:
        """Its bytes are those that were sealed, and it is taken."""
        self._taken += 1
        self._rejections.pop(pack_id, None)

    def refuse(self, pack_id: int) -> Assignment:
        """Its bytes are not: off the shelf. SealBroken when this pack was refused `max_rejections` times running."""
        broken = self._held.pop(pack_id).ready.assignment
        self._rejected += 1
        self._newest_rejected.append(pack_id)
        times = self._rejections[pack_id] = self._rejections.get(pack_id, 0) + 1
        if times >= self._max_rejections:
            raise SealBroken(
                f"pack {pack_id}, slot {broken.slot} of rank {broken.rank}, generation {broken.generation}: "
                f"the bytes are not those that were sealed, {times} times running"
            )
        _LOG.warning(
            "pack %d, slot %d of rank %d, generation %d: the bytes are not those that were sealed; it is made again",
            pack_id, broken.slot, broken.rank, broken.generation,
        )  # fmt: skip
        return broken

    def release(self, pack_id: int) -> None:
        """Off the shelf for good; the consumer writes down that its last use is over."""
        assert pack_id in self._held, f"pack {pack_id} is released, but it is not here"
        assert not self._held[pack_id].ready.kept, f"pack {pack_id} is kept until its consumer leaves"
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
            rejected_packs=tuple(self._newest_rejected),
        )


class CheckedShelf(Shelf):
    """A shelf that checks seals itself, on the CPU, over the slots of `pool`."""

    def __init__(self, *, pool: SlotPool, verify: Verify, max_rejections: int) -> None:
        super().__init__(max_rejections=max_rejections)
        self._pool, self._verify = pool, verify

    def take(self, pack_id: int) -> HiddenPack | Assignment:
        """The pack if its bytes are those that were sealed, else the broken assignment, now off the shelf.

        SealBroken when this pack was rejected `max_rejections` times running.
        """
        held = self._held[pack_id]
        if not self._is_whole(held):
            return self.refuse(pack_id)
        self.accept(pack_id)
        slot = held.ready.assignment.slot
        return hidden_pack(
            held.ready,
            hidden_TKD=self._pool.hidden(slot),
            scale_TK=self._pool.scale(slot),
            last_hidden_TD=self._pool.last_hidden(slot),
        )

    def _is_whole(self, held: _Held) -> bool:
        if held.checked and self._verify is Verify.FIRST_TAKE:
            return True
        started = time.perf_counter()
        assignment = held.ready.assignment
        found = self._pool.seal(assignment.slot, assignment.pack_id, assignment.generation)
        self._verifying_seconds += time.perf_counter() - started
        held.checked = found == held.ready.seal
        return held.checked


def hidden_pack(
    ready: Ready, *, hidden_TKD: torch.Tensor, scale_TK: torch.Tensor | None, last_hidden_TD: torch.Tensor | None
) -> HiddenPack:
    """The record of a pack that was checked, over the tensors that hold it."""
    return HiddenPack(
        pack_id=ready.assignment.pack_id,
        slot=ready.assignment.slot,
        generation=ready.assignment.generation,
        hidden_TKD=hidden_TKD,
        last_hidden_TD=last_hidden_TD,
        seal=ready.seal,
        target_fingerprint=ready.fingerprint,
        scale_TK=scale_TK,
    )
