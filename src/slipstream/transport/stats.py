"""What a broker knows about its transport at one moment."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.transport.ledger import LedgerCounts, RankAccount


@dataclass(frozen=True, slots=True)
class Silence:
    """A producer that has packs in hand: which, and for how many seconds neither it nor the broker has said anything."""

    seconds: float
    packs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TransportStats:
    """Packs by fate, bytes by rank, and seconds of waiting since the broker was made, by the name of who waited.

    `producer_waiting_seconds`: for a free slot, waits that still last included. `consumer_waiting_seconds`: for input, as
    each consumer last said. Both keep peers that are gone. `lost`: peers that ended without leaving in order, oldest first.
    """

    packs: LedgerCounts
    ranks: dict[int, RankAccount]
    producer_waiting_seconds: dict[str, float]
    consumer_waiting_seconds: dict[str, float]
    lost: tuple[str, ...]
