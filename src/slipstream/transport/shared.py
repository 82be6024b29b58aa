"""The transport between processes of one host: shared slots, a broker in the supervisor, an end in each worker.

Hidden states never move: the producer writes the slot that the consumer reads. What crosses the connections is which
slot, whose pack, which generation, and the seal.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

import torch

from slipstream.errors import TransportError
from slipstream.records import HiddenPack
from slipstream.transport.broker import Broker
from slipstream.transport.connections import shut_down
from slipstream.transport.ends import SourceStats, Verify
from slipstream.transport.ledger import Assignment
from slipstream.transport.messages import (
    SUPERVISOR_GONE,
    Acquire,
    Closed,
    Leaving,
    NoMore,
    Published,
    Ready,
    Rejected,
    Released,
    ToBroker,
    ToConsumer,
    ToProducer,
)
from slipstream.transport.shelf import Shelf
from slipstream.transport.slots import SlotPool

__all__ = ["Broker", "SharedSink", "SharedSource"]

_LOG = logging.getLogger(__name__)
_LEFT_HERE = Closed(reason="this end of the transport is closed")


class SharedSink:
    """The `HiddenSink` of a target worker. `pools[r]` is the pool of drafter rank r, mapped here; owns `connection`.

    `fingerprint` is the target's. One thread at a time; `waiting_seconds` is the time spent in `acquire`.
    """

    def __init__(self, *, connection: Connection, pools: Sequence[SlotPool], fingerprint: str) -> None:
        self._connection, self._pools, self._fingerprint = connection, pools, fingerprint
        self._closed: Closed | None = None
        self._no_more = False
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

    def last_hidden(self, assignment: Assignment) -> torch.Tensor | None:
        """The slot's last hidden states to write, `[T, D]`; None where the layout has none."""
        return self._pools[assignment.rank].last_hidden(assignment.slot)

    def publish(self, assignment: Assignment) -> None:
        """Seal the slot as it is now and hand it over. PeerDied or TransportClosed if there is nobody to hand it to."""
        seal = self._pools[assignment.rank].seal(assignment.slot, assignment.pack_id, assignment.generation)
        self._send(Published(assignment=assignment, seal=seal, fingerprint=self._fingerprint))

    def close(self) -> None:
        """Leave in order; unfinished packs are issued again. Lets go of the pools."""
        if self._connection.closed:
            return
        with contextlib.suppress(OSError):  # nobody is left to say goodbye to
            self._connection.send(Leaving())
        self._closed = self._closed or _LEFT_HERE
        self._connection.close()
        for pool in self._pools:
            pool.close()

    def _send(self, message: ToBroker) -> None:
        if self._closed is not None:
            raise self._closed.error()
        try:
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
        self._connection, self._pool = connection, pool
        self._changed = threading.Condition()  # over the shelf and `_closed`
        self._shelf = Shelf(pool=pool, verify=verify, max_rejections=max_rejections)
        self._fingerprint: str | None = None
        self._closed: Closed | None = None
        self._reader = threading.Thread(target=self._read, name="transport-reader", daemon=True)
        self._reader.start()

    def take(self, pack_id: int) -> HiddenPack:
        """The pack, its seal checked. What is ready can still be taken after the other side closed; waiting ends then.

        Contract: `HiddenSource.take`. TransportError if packs come from two different targets.
        """
        while True:
            with self._changed:
                self._wait_for(pack_id)
                taken = self._shelf.take(pack_id)
            if isinstance(taken, HiddenPack):
                self._check_target(taken)
                return taken
            self._send(Rejected(pack_id=taken.pack_id, generation=taken.generation))

    def release(self, pack_id: int) -> None:
        """The last use is over: the slot may be written again. PeerDied or TransportClosed if nobody can be told."""
        with self._changed:
            self._shelf.release(pack_id)
            waited = self._shelf.waiting_seconds
        self._send(Released(pack_id=pack_id, waiting_seconds=waited))

    def stats(self) -> SourceStats:
        """So far; waiting is the time spent in `take` until the pack was there."""
        with self._changed:
            return self._shelf.stats()

    def close(self) -> None:
        """Leave in order; ends the reader thread and lets go of the pool."""
        if self._connection.closed:
            return
        with self._changed:
            self._closed = _LEFT_HERE
            self._shelf.clear()
            self._changed.notify_all()
        with contextlib.suppress(OSError):  # nobody is left to say goodbye to
            self._connection.send(Leaving())
        shut_down(self._connection)
        self._reader.join()
        self._connection.close()
        self._pool.close()

    def _wait_for(self, pack_id: int) -> None:
        started = time.perf_counter()
        try:
            while pack_id not in self._shelf:
                if self._closed is not None:
                    raise self._closed.error()
                self._changed.wait()
        finally:
            self._shelf.waiting_seconds += time.perf_counter() - started

    def _read(self) -> None:
        """The reader thread: hears what the broker says until the connection ends."""
        try:
            while True:
                self._hear(self._connection.recv())
        except (EOFError, OSError):
            last = SUPERVISOR_GONE
        except Exception as error:  # a thread's border: a reader that died in silence would leave `take` waiting
            _LOG.exception("the transport reader failed")
            last = Closed(reason=f"the transport reader failed: {error!r}")
        with self._changed:
            self._closed = self._closed or last
            self._changed.notify_all()

    def _hear(self, message: ToConsumer) -> None:
        with self._changed:
            match message:
                case Ready():
                    self._shelf.put(
                        assignment=message.assignment, seal=message.seal, fingerprint=message.fingerprint, kept=message.kept
                    )
                case Closed():
                    self._closed = self._closed or message
            self._changed.notify_all()

    def _send(self, message: ToBroker) -> None:
        try:
            self._connection.send(message)
        except OSError as error:
            with self._changed:
                while self._closed is None:  # the reader is about to say why
                    self._changed.wait()
            raise self._closed.error() from error

    def _check_target(self, taken: HiddenPack) -> None:
        self._fingerprint = self._fingerprint or taken.target_fingerprint
        if taken.target_fingerprint != self._fingerprint:
            raise TransportError(
                f"pack {taken.pack_id} comes from target {taken.target_fingerprint}, those before it from {self._fingerprint}"
            )
