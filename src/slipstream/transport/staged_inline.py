"""The colocated transport on CUDA when slots are many: one process makes packs, keeps them in host memory, and trains on them.

Same order, same ledger, same seals as between processes. The target runs as far ahead as there are device buffers, so the
copies of one pack, out and in again, hide behind the training on another.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from slipstream.device.completer import Background, Threads
from slipstream.device.streams import Streams
from slipstream.errors import TransportClosed, TransportError
from slipstream.records import HiddenPack
from slipstream.transport.arrivals import Arrivals, Buffer
from slipstream.transport.departures import Departures
from slipstream.transport.ends import SourceStats
from slipstream.transport.host_slots import HostSlots
from slipstream.transport.ledger import Assignment, PackOrder, QueueDepth
from slipstream.transport.local_link import LocalLink
from slipstream.transport.operations import DeviceSlot, Operations
from slipstream.transport.planned import PlannedUse


class StagedInline:
    """A `HiddenSource` whose packs are made here by `produce(assignment, slot)`, on the calling thread's stream.

    `order` holds this process's packs, `uses` the order in which they are taken; the rest as in `StagedSource`. Owns `host`.
    """

    def __init__(
        self,
        *,
        order: Sequence[PackOrder],
        uses: Iterable[PlannedUse],
        produce: Callable[[Assignment, DeviceSlot], None],
        host: HostSlots,
        slots: Sequence[DeviceSlot],
        buffers: Sequence[Buffer],
        guest: Buffer | None,
        fingerprint: str,
        streams: Streams,
        operations: Operations,
        background: Background | None = None,
        max_rejections: int = 3,
    ) -> None:
        background = background or Threads(streams)
        self._produce, self._host = produce, host
        self._changed = background.condition()
        self._failure: Exception | None = None
        self._closed = False
        nbytes = host.pool.layout.nbytes
        self._link = LocalLink(order=order, slot_bytes=nbytes, fingerprint=fingerprint, max_rejections=max_rejections)
        self._out = background.completer("device-to-host", failed=self._fail)
        self._in = background.completer("host-to-device", failed=self._fail)
        (rank,) = {pack.rank for pack in order}  # a process makes its own packs only
        self._departures = Departures(
            streams=streams,
            operations=operations,
            slots=slots,
            hosts={rank: host},
            completer=self._out,
            publish=self._publish,
        )
        self._arrivals = Arrivals(
            streams=streams,
            operations=operations,
            buffers=buffers,
            guest=guest,
            host=host,
            uses=uses,
            link=self._link,
            completer=self._in,
            changed=self._changed,
        )

    def take(self, pack_id: int) -> HiddenPack:
        """The pack, made now if it was not before. Contract: `HiddenSource.take`.

        Packs of the next uses are made too, as far as there are buffers: launched before the caller's own work, they are what
        the device does while this pack's copies travel.
        """
        started = time.perf_counter()
        try:
            while True:
                with self._changed:
                    taken = self._look(pack_id)
                    assignment = self._next()
                    if assignment is None:
                        if taken is not None:
                            return taken
                        self._wait(pack_id)
                        continue
                self._make(assignment)
        finally:
            self._link.shelf.waiting_seconds += time.perf_counter() - started

    def release(self, pack_id: int) -> None:
        """The last use is over: its buffer is free. Its host slot was freed when its last copy had landed."""
        with self._changed:
            self._arrivals.finish()
            self._arrivals.pump()

    def stats(self) -> SourceStats:
        """So far; waiting is the time in which packs were launched and awaited."""
        with self._changed:
            return self._link.shelf.stats()

    def depths(self) -> dict[int, QueueDepth]:
        """The queue between target and drafter, now. From any thread."""
        with self._changed:
            return self._link.depths()

    def close(self) -> None:
        """Nothing more will be taken; ends once the copies on their way have landed. May be called twice."""
        with self._changed:
            self._closed = True
            self._arrivals.stop()
            self._changed.notify_all()
        self._out.close()
        self._in.close()
        self._departures.drain()
        self._arrivals.drain()
        self._host.close()

    def _look(self, pack_id: int) -> HiddenPack | None:
        if self._closed:
            raise TransportClosed("the transport of this process is closed")
        taken = self._arrivals.take(pack_id)
        if taken is None and self._failure is not None:
            raise self._failure
        return taken

    def _next(self) -> Assignment | None:
        """The pack to make now: while any is missing, the next of the order, if its slot is free."""
        missing = any(pack_id not in self._link.in_flight for pack_id in self._arrivals.missing())
        return self._link.issue() if missing else None

    def _make(self, assignment: Assignment) -> None:
        slot = self._departures.begin(assignment)
        try:
            self._produce(assignment, slot)
        except BaseException:
            self._departures.cancel(assignment)
            with self._changed:
                self._link.give_up(assignment)  # a caller that catches it and takes again gets the pack issued again
            raise
        self._departures.depart(assignment)

    def _wait(self, pack_id: int) -> None:
        """Sleep until something has landed. TransportError if nothing is on its way that could bring the pack."""
        if not (self._arrivals.copying or self._link.in_flight):
            raise TransportError(f"pack {pack_id} cannot come: it is not in the rest of the order, or its slot is still held")
        self._changed.wait()

    def _publish(self, assignment: Assignment, *, seal: int) -> None:
        with self._changed:
            self._link.publish(assignment, seal=seal)
            self._arrivals.pump()
            self._changed.notify_all()

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._failure = error
            self._changed.notify_all()
