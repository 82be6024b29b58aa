"""The two ends of a transport, whatever lies between them, and what they say about their own waiting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from slipstream.transport.ledger import Assignment, QueueDepth

if TYPE_CHECKING:
    import torch

    from slipstream.records import HiddenPack


class Verify(Enum):
    """When a consumer checks a seal."""

    EACH_TAKE = "each_take"
    """At every use: also finds what was damaged between two uses of the same pack."""
    FIRST_TAKE = "first_take"
    """Once per generation."""


@dataclass(frozen=True, slots=True)
class SourceStats:
    """What a consumer did since it was made. Seconds of wall clock; packs by count.

    `rejected_packs` are the newest packs whose seal was refused, newest last, one entry a refusal.
    """

    waiting_seconds: float
    verifying_seconds: float
    packs_taken: int
    packs_released: int
    seals_rejected: int
    rejected_packs: tuple[int, ...] = ()


class HiddenSink(Protocol):
    """The producer's end: take an assignment, write its slot, publish it."""

    def acquire(self) -> Assignment | None:
        """The next pack to produce; waits for a free slot. None when no more will come. TransportClosed, PeerDied."""
        ...

    def hidden(self, assignment: Assignment) -> torch.Tensor:
        """The slot to write, `[T, K, D]`."""
        ...

    def scale(self, assignment: Assignment) -> torch.Tensor | None:
        """The slot's scales to write, `[T, K]`; None where the layout has none."""
        ...

    def last_hidden(self, assignment: Assignment) -> torch.Tensor | None:
        """The slot's last hidden states to write, `[T, D]`; None where the layout has none."""
        ...

    def publish(self, assignment: Assignment) -> None:
        """Seal the slot and hand it over; it must not be written to from here on."""
        ...

    def close(self) -> None:
        """Leave; what was acquired and not published is issued again. May be called twice."""
        ...


class HiddenSource(Protocol):
    """The consumer's end: take packs in planned order, as often as planned, then release them."""

    def take(self, pack_id: int) -> HiddenPack:
        """The pack, its seal checked; waits until it is there. Again without a copy while the pack is live.

        TransportClosed, PeerDied, or SealBroken once the pack was rejected too often.
        """
        ...

    def release(self, pack_id: int) -> None:
        """The last use is over: the slot may be written again. Not for kept packs, which stay until `close`."""
        ...

    def stats(self) -> SourceStats:
        """Waiting, verifying and counts so far."""
        ...

    def depths(self) -> Mapping[int, QueueDepth]:
        """The queue between target and drafter by rank, now, from any thread; empty where only the broker knows it."""
        ...

    def close(self) -> None:
        """Leave: nothing more will be taken. May be called twice."""
        ...
