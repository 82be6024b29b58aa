"""The split transport on CUDA: the ends of `shared`, with copies between host slots and the device behind the loops' backs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from multiprocessing.connection import Connection

import torch

from slipstream.device.completer import CompleterThread
from slipstream.device.streams import Streams
from slipstream.errors import TransportError
from slipstream.records import HiddenPack
from slipstream.transport.arrivals import Arrivals, Buffer
from slipstream.transport.consumer_end import LEFT_HERE, ConsumerEnd, OneTarget
from slipstream.transport.departures import Departures
from slipstream.transport.ends import SourceStats
from slipstream.transport.host_slots import HostSlots
from slipstream.transport.ledger import Assignment, QueueDepth
from slipstream.transport.messages import Ready, Rejected, Released
from slipstream.transport.operations import DeviceSlot, Operations
from slipstream.transport.planned import PlannedUse
from slipstream.transport.shared import SharedSink
from slipstream.transport.shelf import Shelf


class StagedSink:
    """The `HiddenSink` of a target worker on CUDA: what is written is a device slot, on the calling thread's stream.

    `sink` is its connection to the broker, owned from here on; `hosts[r]` the pool of drafter rank r, likewise; `slots` two
    or more on the device. `publish` returns at once: the pack is handed over when its bytes are in host memory. At most one
    pack more than there are `slots` is under way: more keep no device busier, and would be kept from other workers.
    """

    def __init__(
        self,
        *,
        sink: SharedSink,
        hosts: Sequence[HostSlots],
        slots: Sequence[DeviceSlot],
        streams: Streams,
        operations: Operations,
    ) -> None:
        self._sink, self._hosts = sink, hosts
        self._changed = threading.Condition()  # over the two below
        self._failure: Exception | None = None
        self._under_way, self._most_under_way = 0, len(slots) + 1
        self._completer = CompleterThread(streams=streams, name="device-to-host", failed=self._fail)
        self._departures = Departures(
            streams=streams,
            operations=operations,
            slots=slots,
            hosts=dict(enumerate(hosts)),
            completer=self._completer,
            publish=self._landed,
        )

    def acquire(self) -> Assignment | None:
        """The next pack to produce. Contract: `HiddenSink.acquire`. Raises what went wrong with packs that had departed."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or self._under_way < self._most_under_way)
            self._check()
        try:
            assignment = self._sink.acquire()
        except TransportError:
            self._check()
            raise
        self._check()
        if assignment is not None:
            self._departures.begin(assignment)
        return assignment

    def hidden(self, assignment: Assignment) -> torch.Tensor:
        """The device slot to write, `[T, K, D]`."""
        return self._departures.writing(assignment).hidden_TKD

    def scale(self, assignment: Assignment) -> torch.Tensor | None:
        """The device slot's scales to write, `[T, K]`; None where the layout has none."""
        return self._departures.writing(assignment).scale_TK

    def last_hidden(self, assignment: Assignment) -> torch.Tensor | None:
        """The device slot's last hidden states to write, `[T, D]`; None where the layout has none."""
        return self._departures.writing(assignment).last_hidden_TD

    def publish(self, assignment: Assignment) -> None:
        """Seal the slot and send it on its way; it must not be written to from here on."""
        with self._changed:
            self._under_way += 1
        self._departures.depart(assignment)

    def close(self) -> None:
        """Leave, once what departed has arrived. Contract: `HiddenSink.close`."""
        self._completer.close()
        self._departures.drain()
        self._sink.close()
        for host in self._hosts:
            host.close()

    def _landed(self, assignment: Assignment, *, seal: int) -> None:
        self._sink.announce(assignment, seal=seal)
        with self._changed:
            self._under_way -= 1
            self._changed.notify_all()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._failure = error
            self._changed.notify_all()
        self._sink.interrupt()  # without it the worker would wait for a slot that packs hold which never land


class StagedSource:
    """The `HiddenSource` of a drafter rank on CUDA: packs come in device buffers, copied ahead in the order of `uses`.

    Packs are taken in that order, those that are not planned (kept ones) at any time into `guest`. A take waits for data
    only: for a pack to be published, copied and found whole; the compute stream runs on meanwhile. Owns `connection` and
    `host`. A seal refused is asked for again, one generation on; after `max_rejections` times running, SealBroken.
    """

    def __init__(
        self,
        *,
        connection: Connection,
        host: HostSlots,
        buffers: Sequence[Buffer],
        guest: Buffer | None,
        uses: Iterable[PlannedUse],
        streams: Streams,
        operations: Operations,
        max_rejections: int = 3,
    ) -> None:
        self._host, self._streams = host, streams
        self._changed = threading.Condition()
        self._failure: Exception | None = None
        self._closed = False
        self._shelf = Shelf(max_rejections=max_rejections)
        self._target = OneTarget()
        self._completer = CompleterThread(streams=streams, name="host-to-device", failed=self._fail)
        with self._changed:  # what is heard first waits until all of this is there
            self._end = ConsumerEnd(connection, changed=self._changed, hear=self._hear)
            self._arrivals = Arrivals(
                streams=streams,
                operations=operations,
                buffers=buffers,
                guest=guest,
                host=host,
                uses=uses,
                link=_BrokerLink(shelf=self._shelf, end=self._end),
                completer=self._completer,
                changed=self._changed,
            )

    def take(self, pack_id: int) -> HiddenPack:
        """The pack in a device buffer, its seal checked. Good until the next take of another pack.

        Contract: `HiddenSource.take`. TransportError if packs come from two different targets.
        """
        started = time.perf_counter()
        with self._changed:
            try:
                taken = self._wait_for(pack_id)
            finally:
                self._shelf.waiting_seconds += time.perf_counter() - started
        self._target.check(taken)
        return taken

    def release(self, pack_id: int) -> None:
        """The last use is over: its buffer is free. Its host slot went back already, when its last copy had landed."""
        with self._changed:
            self._arrivals.finish()
            self._arrivals.pump()

    def stats(self) -> SourceStats:
        """So far. Seals are verified behind the loop's back: verifying takes none of its time."""
        with self._changed:
            return self._shelf.stats()

    def depths(self) -> dict[int, QueueDepth]:
        """The broker knows."""
        return {}

    def close(self) -> None:
        """Leave in order, once the copies on their way have landed. May be called twice."""
        with self._changed:
            self._closed = True
            self._arrivals.stop()
        self._end.close()
        self._completer.close()
        self._arrivals.drain()
        self._host.close()

    def _wait_for(self, pack_id: int) -> HiddenPack:
        while True:
            if self._closed:
                raise LEFT_HERE.error()
            taken = self._arrivals.take(pack_id)
            if taken is not None:
                return taken
            if self._failure is not None:
                raise self._failure
            if not self._arrivals.copying:  # what is on its way can still be taken after the other side closed
                self._end.check()
            self._changed.wait()

    def _hear(self, ready: Ready) -> None:
        self._streams.adopt_thread()
        self._shelf.put(ready)
        self._arrivals.pump()

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._failure = error
            self._changed.notify_all()


class _BrokerLink:
    """The `Link` of arrivals to a broker; `changed` is held by its callers."""

    def __init__(self, *, shelf: Shelf, end: ConsumerEnd) -> None:
        self._shelf, self._end = shelf, end

    def ready(self, pack_id: int) -> Ready | None:
        """Contract: `Link.ready`."""
        return self._shelf.ready(pack_id)

    def accept(self, pack_id: int) -> None:
        """Contract: `Link.accept`."""
        self._shelf.accept(pack_id)

    def refuse(self, pack_id: int) -> None:
        """Contract: `Link.refuse`."""
        broken = self._shelf.refuse(pack_id)
        self._end.send(Rejected(pack_id=pack_id, generation=broken.generation))

    def release(self, pack_id: int) -> None:
        """Contract: `Link.release`."""
        self._shelf.release(pack_id)
        self._end.send(Released(pack_id=pack_id, waiting_seconds=self._shelf.waiting_seconds))
