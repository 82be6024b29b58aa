"""What lies between the two ends of a transport when one process is both: a ledger and a shelf, no connection."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.transport.ledger import Assignment, Ledger, PackOrder, QueueDepth
from slipstream.transport.messages import Ready
from slipstream.transport.shelf import Shelf


class LocalLink:
    """The `Link` of arrivals to departures of the same process, over a ledger; `changed` is held by its callers."""

    def __init__(self, *, order: Sequence[PackOrder], slot_bytes: int, fingerprint: str, max_rejections: int) -> None:
        self._ledger = Ledger(order, slot_bytes=slot_bytes)
        self._fingerprint, self._issued = fingerprint, 0
        self.in_flight: dict[int, str] = {}
        """Packs that are being made, or are on their way to their slots, and the name that each was issued to."""
        self.shelf = Shelf(max_rejections=max_rejections)

    def issue(self) -> Assignment | None:
        """The next pack to make; None while its slot is held, or when all have been."""
        worker = f"inline-{self._issued}"
        assignment = self._ledger.issue(worker)
        if assignment is not None:
            self.in_flight[assignment.pack_id] = worker
            self._issued += 1
        return assignment

    def publish(self, assignment: Assignment, *, seal: int) -> None:
        """It lies in its slot."""
        accepted = self._ledger.published(self.in_flight.pop(assignment.pack_id), assignment)
        assert accepted, f"the ledger does not know {assignment} as in flight"
        kept = self._ledger.kept(assignment.pack_id)
        self.shelf.put(Ready(assignment=assignment, seal=seal, fingerprint=self._fingerprint, kept=kept))

    def give_up(self, assignment: Assignment) -> None:
        """It will not be finished: it is issued again."""
        self._ledger.worker_lost(self.in_flight.pop(assignment.pack_id))

    def depths(self) -> dict[int, QueueDepth]:
        """The queue of this process's own rank, now."""
        return self._ledger.depths()

    def ready(self, pack_id: int) -> Ready | None:
        """Contract: `Link.ready`."""
        return self.shelf.ready(pack_id)

    def accept(self, pack_id: int) -> None:
        """Contract: `Link.accept`."""
        self.shelf.accept(pack_id)

    def refuse(self, pack_id: int) -> None:
        """Contract: `Link.refuse`."""
        broken = self.shelf.refuse(pack_id)
        accepted = self._ledger.rejected(pack_id, broken.generation)
        assert accepted, f"the ledger does not know {broken} as ready"

    def release(self, pack_id: int) -> None:
        """Contract: `Link.release`."""
        self.shelf.release(pack_id)
        self._ledger.released(pack_id)
