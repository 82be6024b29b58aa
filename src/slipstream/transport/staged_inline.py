"""The colocated transport on CUDA when slots are many: one process makes packs, keeps them in host memory, and trains on them.

Same order, same ledger, same seals as between processes. The target runs as far ahead as there are device buffers, so the
copies of one pack, out and in again, hide behind the training on another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from slipstream.device.completer import Background, Threads
from slipstream.device.streams import Streams
from slipstream.records import HiddenPack
from slipstream.transport.arrivals import Arrivals, Buffer
from slipstream.transport.departures import Departures
from slipstream.transport.host_slots import HostSlots
from slipstream.transport.ledger import Assignment, PackOrder
from slipstream.transport.local_link import LocalLink
from slipstream.transport.making import MakingSource
from slipstream.transport.operations import DeviceSlot, Operations
from slipstream.transport.planned import PlannedUse


class StagedInline(MakingSource):
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
        background, nbytes = background or Threads(streams), host.pool.layout.nbytes
        link = LocalLink(order=order, slot_bytes=nbytes, fingerprint=fingerprint, max_rejections=max_rejections)
        super().__init__(produce=produce, link=link, background=background)
        self._host = host
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
            link=link,
            completer=self._in,
            changed=self._changed,
        )

    def release(self, pack_id: int) -> None:
        """The last use is over: its buffer is free. Its host slot was freed when its last copy had landed."""
        with self._changed:
            self._arrivals.finish()
            self._arrivals.pump()

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

    def _found(self, pack_id: int) -> HiddenPack | None:
        return self._arrivals.take(pack_id)

    def _missing(self) -> Iterable[int]:
        return self._arrivals.missing()

    @property
    def _is_checking(self) -> bool:
        return self._arrivals.copying

    def _begin(self, assignment: Assignment) -> DeviceSlot:
        return self._departures.begin(assignment)

    def _cancel(self, assignment: Assignment) -> None:
        self._departures.cancel(assignment)

    def _seal(self, assignment: Assignment) -> None:
        self._departures.depart(assignment)

    def _publish(self, assignment: Assignment, *, seal: int) -> None:
        with self._changed:
            self._link.publish(assignment, seal=seal)
            self._arrivals.pump()
            self._changed.notify_all()
