"""The transport between processes of one host: shared slots, a broker in the supervisor, an end in each worker.

Hidden states never move: the producer writes the slot that the consumer reads. What crosses the connections is which
slot, whose pack, which generation, and the seal.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

import torch

from slipstream.records import HiddenPack
from slipstream.transport.broker import Broker
from slipstream.transport.connections import stop_reading
from slipstream.transport.consumer_end import LEFT_HERE, ConsumerEnd, OneTarget
from slipstream.transport.ends import SourceStats, Verify
from slipstream.transport.ledger import Assignment, QueueDepth
from slipstream.transport.messages import (
    SUPERVISOR_GONE,
    Acquire,
    Closed,
    Leaving,
    NoMore,
    Published,
    Rejected,
    Released,
    ToBroker,
    ToProducer,
)
from slipstream.transport.shelf import CheckedShelf
from slipstream.transport.slots import SlotPool

__all__ = ["Broker", "SharedSink", "SharedSource"]


class SharedSink:
    """The `HiddenSink` of a target worker. `pools[r]` is the pool of drafter rank r, mapped here; owns `connection`.

    `fingerprint` is the target's. One thread at a time; `waiting_seconds` is the time spent in `acquire`.
    """

    def __init__(self, *, connection: Connection, pools: Sequence[SlotPool], fingerprint: str) -> None:
        self._connection, self._pools, self._fingerprint = connection, pools, fingerprint
        self._closed: Closed | None = None
        self._no_more = False
        self._sending = threading.Lock()  # `announce` comes from other threads
        self.waiting_seconds = 0.0

    def acquire(self) -> Assignment | None:
        """The next pack to produce. Contract: `HiddenSink.acquire`."""
        if self._no_more:
            return None
        started = time.perf_counter()
        try:
            self._send(Acquire())
            answer = self._receive()
        finally:
            self.waiting_seconds += time.perf_counter() - started
        match answer:
            case Assignment():
                return answer
            case NoMore():
                self._no_more = True
                return None
            case Closed():
                self._closed = answer
                raise answer.error()

    def hidden(self, assignment: Assignment) -> torch.Tensor:
        """The slot to write, `[T, K, D]`."""
        return self._pools[assignment.rank].hidden(assignment.slot)

    def scale(self, assignment: Assignment) -> torch.Tensor | None:
        """The slot's scales to write, `[T, K]`; None where the layout has none."""
        return self._pools[assignment.rank].scale(assignment.slot)

    def last_hidden(self, assignment: Assignment) -> torch.Tensor | None:
        """The slot's last hidden states to write, `[T, D]`; None where the layout has none."""
        return self._pools[assignment.rank].last_hidden(assignment.slot)

    def publish(self, assignment: Assignment) -> None:
        """Seal the slot as it is now and hand it over. PeerDied or TransportClosed if there is nobody to hand it to."""
        seal = self._pools[assignment.rank].seal(assignment.slot, assignment.pack_id, assignment.generation)
        self._send(Published(assignment=assignment, seal=seal, fingerprint=self._fingerprint))

    def announce(self, assignment: Assignment, *, seal: int) -> None:
        """Hand over a slot that was written and sealed elsewhere. From any thread; if nobody is left to be told, `acquire`,
        which alone reads from the connection, says why.
        """
        with self._sending, contextlib.suppress(OSError):
            self._connection.send(Published(assignment=assignment, seal=seal, fingerprint=self._fingerprint))

    def interrupt(self) -> None:
        """Have `acquire`, which may be waiting, raise from here on. From any thread."""
        stop_reading(self._connection)

    def close(self) -> None:
        """Leave in order; unfinished packs are issued again. Lets go of the pools."""
        if self._connection.closed:
            return
        with contextlib.suppress(OSError):  # nobody is left to say goodbye to
            self._connection.send(Leaving())
        self._closed = self._closed or LEFT_HERE
        self._connection.close()
        for pool in self._pools:
            pool.close()

    def _send(self, message: ToBroker) -> None:
        if self._closed is not None:
            raise self._closed.error()
        try:
            with self._sending:
                self._connection.send(message)
        except OSError as error:
            self._closed = self._last_word()
            raise self._closed.error() from error

    def _receive(self) -> ToProducer:
        try:
            answer: ToProducer = self._connection.recv()
        except (EOFError, OSError):
            return SUPERVISOR_GONE
        return answer

    def _last_word(self) -> Closed:
        """Why the connection broke: what the broker said before it went, if it said anything."""
        while not isinstance(answer := self._receive(), Closed):
            pass  # an assignment or an end that came too late to matter
        return answer


class SharedSource:
    """The `HiddenSource` of drafter rank `rank`. `pool` is its pool, mapped here; owns `connection` and a reader thread.

    A seal refused is asked for again, one generation on; after `max_rejections` times running, SealBroken. Takes and
    releases come from one thread.
    """

    def __init__(
        self,
        *,
        connection: Connection,
        pool: SlotPool,
        verify: Verify = Verify.EACH_TAKE,
        max_rejections: int = 3,
    ) -> None:
        self._pool = pool
        self._changed = threading.Condition()  # over the shelf and the end
        self._shelf = CheckedShelf(pool=pool, verify=verify, max_rejections=max_rejections)
        self._target = OneTarget()
        self._end = ConsumerEnd(connection, changed=self._changed, hear=self._shelf.put)

    def take(self, pack_id: int) -> HiddenPack:
        """The pack, its seal checked. What is ready can still be taken after the other side closed; waiting ends then.

        Contract: `HiddenSource.take`. TransportError if packs come from two different targets.
        """
        while True:
            with self._changed:
                self._wait_for(pack_id)
                taken = self._shelf.take(pack_id)
            if isinstance(taken, HiddenPack):
                self._target.check(taken)
                return taken
            self._end.send(Rejected(pack_id=taken.pack_id, generation=taken.generation))

    def release(self, pack_id: int) -> None:
        """The last use is over: the slot may be written again. PeerDied or TransportClosed if nobody can be told."""
        with self._changed:
            self._shelf.release(pack_id)
            waited = self._shelf.waiting_seconds
        self._end.send(Released(pack_id=pack_id, waiting_seconds=waited))

    def stats(self) -> SourceStats:
        """So far; waiting is the time spent in `take` until the pack was there."""
        with self._changed:
            return self._shelf.stats()

    def depths(self) -> dict[int, QueueDepth]:
        """The broker knows."""
        return {}

    def close(self) -> None:
        """Leave in order; ends the reader thread and lets go of the pool."""
        with self._changed:
            self._shelf.clear()
        self._end.close()
        self._pool.close()

    def _wait_for(self, pack_id: int) -> None:
        started = time.perf_counter()
        try:
            while pack_id not in self._shelf:
                self._end.check()
                self._changed.wait()
        finally:
            self._shelf.waiting_seconds += time.perf_counter() - started
