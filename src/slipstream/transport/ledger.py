"""The ledger of packs: which may be written next, who writes it, which slots are held. Pure: no I/O, no threads, no clock.

A pack goes planned → in flight (a worker writes its slot) → ready (published, its consumer may take it) → released. A lost
worker or a rejected seal puts it back to be issued again, one generation on, in the same slot. Within a rank packs are
issued in the planned order; among ranks, whichever may go comes first by that order. It waits for free slots only: a
slow rank holds up nobody else.

Why in-order issue into planned slots cannot lock up: a pack is planned into a slot only after the last use of the pack
before it, and every pack that such a use needs was planned, hence issued, earlier.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum


@dataclass(frozen=True, slots=True)
class PackOrder:
    """One pack to be produced: for which drafter rank, into which slot of that rank's pool.

    `kept` packs (validation) stay until their consumer leaves; no later pack may use their slot.
    """

    pack_id: int
    rank: int
    slot: int
    kept: bool = False


@dataclass(frozen=True, slots=True)
class Assignment:
    """A slot to be written now. `generation` counts from 0 and rises each time the same pack is issued again."""

    pack_id: int
    rank: int
    slot: int
    generation: int


class PackState(Enum):
    """Where a pack that holds a slot stands."""

    WAITING = "waiting"
    """To be issued again."""
    IN_FLIGHT = "in_flight"
    READY = "ready"


@dataclass(frozen=True, slots=True)
class RankAccount:
    """Slots of one rank by what they hold, in bytes. free = capacity - in_flight - waiting - ready."""

    capacity_bytes: int
    in_flight_bytes: int
    waiting_bytes: int
    ready_bytes: int


@dataclass(frozen=True, slots=True)
class QueueDepth:
    """Packs of one rank between target and drafter; kept ones (validation) and their slots are left out.

    `ready` are the packs that lie in slots, published and not yet released; `issued` is how many are being written, or wait
    to be written again. slots = free + issued + len(ready).
    """

    slots: int
    issued: int
    ready: tuple[int, ...]

    @property
    def free(self) -> int:
        """Slots that hold nothing."""
        return self.slots - self.issued - len(self.ready)


@dataclass(frozen=True, slots=True)
class LedgerCounts:
    """Packs by fate: planned = unissued + waiting + in_flight + ready + released + abandoned, always.

    `reissued` counts issues beyond the first of a pack, `rejected` seals that a consumer refused.
    """

    planned: int
    unissued: int
    waiting: int
    in_flight: int
    ready: int
    released: int
    abandoned: int
    reissued: int
    rejected: int


@dataclass(slots=True)
class _Live:
    """A pack that holds its slot. `position` is its place in the order; `worker` writes it while it is in flight."""

    order: PackOrder
    position: int
    assignment: Assignment
    state: PackState
    worker: str | None


@dataclass(slots=True)
class _Rank:
    """A rank's part of the order. `cursor` is the position of its next unissued pack; `again` a heap of (position, pack)."""

    cursor: int
    unissued: int
    num_slots: int
    num_kept: int = 0
    again: list[tuple[int, int]] = field(default_factory=list)
    occupied: set[int] = field(default_factory=set)
    left: bool = False

    @property
    def num_passing_slots(self) -> int:
        """Slots that packs pass through: each kept one has a slot to itself."""
        return self.num_slots - self.num_kept


class Ledger:
    """State of every pack of `order`; each slot is `slot_bytes` long. Resume begins with the packs alive at the cursor."""

    def __init__(self, order: Sequence[PackOrder], *, slot_bytes: int) -> None:
        self._order, self._slot_bytes = order, slot_bytes
        self._ranks = _read_order(order)
        self._live: dict[int, _Live] = {}
        self._released = self._abandoned = self._reissued = self._rejected = 0

    @property
    def finished(self) -> bool:
        """Nothing will ever be issued again: every pack was released, or its consumer has left."""
        return not self._live and all(rank.unissued == 0 for rank in self._ranks.values())

    def issue(self, worker: str) -> Assignment | None:
        """Give `worker` the first pack that may be written; None while there is none (or, if `finished`, for good)."""
        heads = [(position, rank_id) for rank_id in self._ranks if (position := self._head(rank_id)) is not None]
        if not heads:
            return None
        position, rank_id = min(heads)
        rank = self._ranks[rank_id]
        if rank.again and rank.again[0][0] == position:
            live = self._live[heapq.heappop(rank.again)[1]]
            live.assignment = replace(live.assignment, generation=live.assignment.generation + 1)
            self._reissued += 1
        else:
            order = self._order[position]
            first = Assignment(pack_id=order.pack_id, rank=rank_id, slot=order.slot, generation=0)
            live = _Live(order=order, position=position, assignment=first, state=PackState.WAITING, worker=None)
            self._live[order.pack_id] = live
            rank.occupied.add(order.slot)
            rank.unissued -= 1
            rank.cursor = self._next_of(rank_id, position + 1)
        live.state, live.worker = PackState.IN_FLIGHT, worker
        return live.assignment

    def published(self, worker: str, assignment: Assignment) -> bool:
        """`worker` wrote and sealed it. False, and nothing changes, if that issue is over (late word of a lost worker)."""
        live = self._live.get(assignment.pack_id)
        if live is None or live.worker != worker or live.assignment != assignment or live.state is not PackState.IN_FLIGHT:
            return False
        live.state, live.worker = PackState.READY, None
        return True

    def rejected(self, pack_id: int, generation: int) -> bool:
        """The consumer refused the seal: issue again. False, and nothing changes, if that generation is not the ready one."""
        live = self._live.get(pack_id)
        if live is None or live.assignment.generation != generation or live.state is not PackState.READY:
            return False
        self._rejected += 1
        self._issue_again(live)
        return True

    def in_flight(self, worker: str) -> tuple[int, ...]:
        """Packs that a worker was given and has not published, in order."""
        held = sorted((live for live in self._live.values() if live.worker == worker), key=lambda live: live.position)
        return tuple(live.order.pack_id for live in held)

    def released(self, pack_id: int) -> None:
        """The consumer's last use is over: the slot is free. Kept packs are not released; they go with their consumer."""
        live = self._live[pack_id]
        assert live.state is PackState.READY, f"pack {pack_id} is released while {live.state.value}"
        assert not live.order.kept, f"pack {pack_id} is kept until its consumer leaves"
        self._ranks[live.order.rank].occupied.remove(live.order.slot)
        del self._live[pack_id]
        self._released += 1

    def worker_lost(self, worker: str) -> tuple[int, ...]:
        """The worker writes no more: what it had in flight is issued again. Returns those pack ids, in order."""
        lost = self.in_flight(worker)
        for pack_id in lost:
            self._issue_again(self._live[pack_id])
        return lost

    def rank_left(self, rank_id: int) -> None:
        """The consumer of a rank left for good. Kept packs it had count as released, all its others as abandoned."""
        rank = self._ranks.get(rank_id)
        if rank is None or rank.left:
            return
        for live in [live for live in self._live.values() if live.order.rank == rank_id]:
            done = live.order.kept and live.state is PackState.READY
            self._released, self._abandoned = self._released + done, self._abandoned + (not done)
            del self._live[live.order.pack_id]
        self._abandoned += rank.unissued
        rank.left, rank.unissued, rank.cursor = True, 0, len(self._order)
        rank.again.clear()
        rank.occupied.clear()

    def kept(self, pack_id: int) -> bool:
        """Whether a pack that holds a slot stays until its consumer leaves."""
        return self._live[pack_id].order.kept

    def counts(self) -> LedgerCounts:
        """Packs by fate, now."""
        states = [live.state for live in self._live.values()]
        return LedgerCounts(
            planned=len(self._order),
            unissued=sum(rank.unissued for rank in self._ranks.values()),
            waiting=states.count(PackState.WAITING),
            in_flight=states.count(PackState.IN_FLIGHT),
            ready=states.count(PackState.READY),
            released=self._released,
            abandoned=self._abandoned,
            reissued=self._reissued,
            rejected=self._rejected,
        )

    def accounts(self) -> dict[int, RankAccount]:
        """Bytes by rank, now."""
        held: dict[tuple[int, PackState], int] = defaultdict(int)
        for live in self._live.values():
            held[live.order.rank, live.state] += self._slot_bytes
        return {
            rank_id: RankAccount(
                capacity_bytes=rank.num_slots * self._slot_bytes,
                in_flight_bytes=held[rank_id, PackState.IN_FLIGHT],
                waiting_bytes=held[rank_id, PackState.WAITING],
                ready_bytes=held[rank_id, PackState.READY],
            )
            for rank_id, rank in self._ranks.items()
        }

    def depths(self) -> dict[int, QueueDepth]:
        """The queue of every rank that has not left, now. From any thread, though the ledger belongs to one."""
        passing: dict[int, list[_Live]] = {rank_id: [] for rank_id, rank in self._ranks.items() if not rank.left}
        for live in list(self._live.values()):
            if not live.order.kept and live.order.rank in passing:
                passing[live.order.rank].append(live)
        return {
            rank_id: QueueDepth(
                slots=self._ranks[rank_id].num_passing_slots,
                issued=sum(live.state is not PackState.READY for live in found),
                ready=tuple(live.order.pack_id for live in found if live.state is PackState.READY),
            )
            for rank_id, found in passing.items()
        }

    def _head(self, rank_id: int) -> int | None:
        """Position of the rank's next pack, if its slot may be written now."""
        rank = self._ranks[rank_id]
        if rank.again:
            return rank.again[0][0]
        if rank.unissued and self._order[rank.cursor].slot not in rank.occupied:
            return rank.cursor
        return None

    def _issue_again(self, live: _Live) -> None:
        live.state, live.worker = PackState.WAITING, None
        heapq.heappush(self._ranks[live.order.rank].again, (live.position, live.order.pack_id))

    def _next_of(self, rank_id: int, position: int) -> int:
        while position < len(self._order) and self._order[position].rank != rank_id:
            position += 1
        return position


def _read_order(order: Sequence[PackOrder]) -> dict[int, _Rank]:
    """Where each rank begins and how many slots it needs; the order's own promises are checked on the way."""
    ranks: dict[int, _Rank] = {}
    seen: set[int] = set()
    kept: set[tuple[int, int]] = set()
    for position, pack in enumerate(order):
        assert pack.pack_id not in seen, f"pack {pack.pack_id} is ordered twice"
        assert pack.slot >= 0, f"pack {pack.pack_id} is ordered into slot {pack.slot}"
        assert (pack.rank, pack.slot) not in kept, f"pack {pack.pack_id} is ordered into a slot whose pack is kept"
        seen.add(pack.pack_id)
        if pack.kept:
            kept.add((pack.rank, pack.slot))
        rank = ranks.setdefault(pack.rank, _Rank(cursor=position, unissued=0, num_slots=0))
        rank.unissued += 1
        rank.num_kept += pack.kept
        rank.num_slots = max(rank.num_slots, pack.slot + 1)
    return ranks
