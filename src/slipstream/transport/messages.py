"""What crosses a connection between the broker and its peers: some integers, never hidden states."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.errors import PeerDied, TransportClosed, TransportError
from slipstream.transport.ledger import Assignment


@dataclass(frozen=True, slots=True)
class Acquire:
    """Producer → broker: ready for the next pack. Answered by an `Assignment`, `NoMore` or `Closed`."""


@dataclass(frozen=True, slots=True)
class NoMore:
    """Broker → producer: nothing will be issued any more."""


@dataclass(frozen=True, slots=True)
class Published:
    """Producer → broker: the slot is written and sealed."""

    assignment: Assignment
    seal: int
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Ready:
    """Broker → consumer: the pack may be taken."""

    assignment: Assignment
    seal: int
    fingerprint: str
    kept: bool


@dataclass(frozen=True, slots=True)
class Rejected:
    """Consumer → broker: the bytes are not those that were sealed; issue the pack again."""

    pack_id: int
    generation: int


@dataclass(frozen=True, slots=True)
class Released:
    """Consumer → broker: the slot is free. Carries the seconds the consumer has waited for input so far."""

    pack_id: int
    waiting_seconds: float


@dataclass(frozen=True, slots=True)
class Leaving:
    """Producer or consumer → broker: going in order, not by death."""


@dataclass(frozen=True, slots=True)
class Closed:
    """Broker → all: nothing more will come. `lost` names the peer whose death is the reason, if that is it."""

    reason: str
    lost: str | None = None

    def error(self) -> TransportError:
        """The exception a waiting caller gets."""
        return TransportClosed(self.reason) if self.lost is None else PeerDied(self.reason)


SUPERVISOR_GONE = Closed(reason="the supervisor is gone: its connection ended without a word", lost="supervisor")

ToBroker = Acquire | Published | Rejected | Released | Leaving
ToProducer = Assignment | NoMore | Closed
ToConsumer = Ready | Closed
