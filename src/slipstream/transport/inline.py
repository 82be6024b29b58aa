"""The transport of the colocated placement: the process that trains on a pack produces it, when it is asked for.

Same contract as between processes, same ledger, same seals; the look-ahead is 0 and nothing crosses a process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from slipstream.errors import TransportClosed, TransportError
from slipstream.records import HiddenPack
from slipstream.transport.ends import SourceStats, Verify
from slipstream.transport.ledger import Assignment, Ledger, PackOrder, QueueDepth
from slipstream.transport.messages import Ready
from slipstream.transport.shelf import CheckedShelf
from slipstream.transport.slots import SlotPool

_SELF = "inline"  # the one worker of this ledger
_CLOSED = "the transport of this process is closed"


class InlineTransport:
    """A `HiddenSource` that calls `produce(assignment)`, which fills that slot of `pool`, in the planned order.

    `order` holds this process's packs only; `fingerprint` is the target's. A pack whose seal is refused is produced
    again; after `max_rejections` times running, SealBroken.
    """

    def __init__(
        self,
        order: Sequence[PackOrder],
        pool: SlotPool,
        produce: Callable[[Assignment], None],
        *,
        fingerprint: str,
        verify: Verify = Verify.EACH_TAKE,
        max_rejections: int = 3,
    ) -> None:
        self._ledger = Ledger(order, slot_bytes=pool.layout.nbytes)
        self._shelf = CheckedShelf(pool=pool, verify=verify, max_rejections=max_rejections)
        self._pool, self._produce, self._fingerprint = pool, produce, fingerprint
        self._closed = False

    def take(self, pack_id: int) -> HiddenPack:
        """The pack, produced now if it is not there yet, its seal checked. Contract: `HiddenSource.take`."""
        while True:
            if self._closed:
                raise TransportClosed(_CLOSED)
            started = time.perf_counter()
            while pack_id not in self._shelf:
                self._produce_next(pack_id)
            self._shelf.waiting_seconds += time.perf_counter() - started
            taken = self._shelf.take(pack_id)
            if isinstance(taken, HiddenPack):
                return taken
            accepted = self._ledger.rejected(taken.pack_id, taken.generation)
            assert accepted, f"the ledger does not know {taken} as ready"

    def release(self, pack_id: int) -> None:
        """The last use is over: the slot may be written again."""
        self._shelf.release(pack_id)
        self._ledger.released(pack_id)

    def stats(self) -> SourceStats:
        """So far; waiting is the time in which packs were produced."""
        return self._shelf.stats()

    def depths(self) -> dict[int, QueueDepth]:
        """The queue between target and drafter, now. From any thread."""
        return self._ledger.depths()

    def close(self) -> None:
        """Nothing more will be taken; lets go of the pool."""
        self._closed = True
        self._shelf.clear()
        self._pool.close()

    def _produce_next(self, wanted: int) -> None:
        assignment = self._ledger.issue(_SELF)
        if assignment is None:
            raise TransportError(f"pack {wanted} cannot come: it is not in the rest of the order, or its slot is still held")
        try:
            self._produce(assignment)
        except BaseException:
            self._ledger.worker_lost(_SELF)  # a caller that catches it and takes again gets the pack issued again
            raise
        if self._closed:
            raise TransportClosed(_CLOSED)
        seal = self._pool.seal(assignment.slot, assignment.pack_id, assignment.generation)
        accepted = self._ledger.published(_SELF, assignment)
        assert accepted, f"the ledger does not know {assignment} as in flight"
        kept = self._ledger.kept(assignment.pack_id)
        self._shelf.put(Ready(assignment=assignment, seal=seal, fingerprint=self._fingerprint, kept=kept))
