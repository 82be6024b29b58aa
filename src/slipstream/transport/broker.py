"""The broker: a thread of the supervisor that tells producers which slot to write and consumers which slot is ready.

Waits for: messages of its peers. It never touches hidden states, so it needs no torch and no shared memory. Its sends do not
block on a slow peer: a producer has at most one answer outstanding, and what a consumer has no room for waits here.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from slipstream.transport.connections import connection_pair, has_room, wait_for
from slipstream.transport.ledger import Ledger, PackOrder, QueueDepth
from slipstream.transport.messages import (
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
from slipstream.transport.stats import Silence, TransportStats

_LOG = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Producer:
    """A target worker. `asking_since` is set while it waits for an assignment; `spoke_at` is when it or we spoke last."""

    name: str
    connection: Connection
    spoke_at: float
    asking_since: float | None = None


@dataclass(slots=True, eq=False)
class _Consumer:
    """The drafter rank that reads one pool. `unsent` are messages for it, oldest first."""

    name: str
    rank: int
    connection: Connection
    unsent: deque[ToConsumer] = field(default_factory=deque)


class Broker:
    """Serves `order` to the peers that are attached; start it with `start()`, end it with `close()`.

    A producer that dies has its unfinished packs issued again; whether to start another one is the supervisor's choice. A
    consumer that dies closes the transport, and everybody who waits gets PeerDied with its name.
    """

    def __init__(self, *, order: Sequence[PackOrder], slot_bytes: int) -> None:
        self._ledger = Ledger(order, slot_bytes=slot_bytes)
        self._lock = threading.RLock()  # over everything below
        self._producers: dict[str, _Producer] = {}
        self._consumers: dict[int, _Consumer] = {}
        self._ready: dict[int, Published] = {}  # published for a rank that nobody has attached to yet
        self._retired: list[Connection] = []  # closed by the thread, which may be waiting on them just now
        self._producer_waiting: dict[str, float] = {}
        self._consumer_waiting: dict[str, float] = {}
        self._lost: list[str] = []
        self._closed: Closed | None = None
        self._stopping = False
        self._wake_read, self._wake_write = connection_pair()
        self._thread = threading.Thread(target=self._run, name="transport-broker", daemon=True)

    def start(self) -> None:
        """Begin to serve. Peers may be attached before or after."""
        self._thread.start()

    def attach_producer(self, name: str, connection: Connection) -> None:
        """Serve a target worker at the other end of `connection`, which the broker owns from here on."""
        with self._lock:
            assert name not in self._producers, f"producer {name} is attached already"
            if self._refused(connection):
                return
            self._producers[name] = _Producer(name=name, connection=connection, spoke_at=time.perf_counter())
            self._producer_waiting.setdefault(name, 0.0)
        self._wake()

    def attach_consumer(self, name: str, rank: int, connection: Connection) -> None:
        """Serve the drafter rank at the other end of `connection`, which the broker owns from here on."""
        with self._lock:
            assert rank not in self._consumers, f"rank {rank} has a consumer already"
            if self._refused(connection):
                return
            self._consumers[rank] = _Consumer(name=name, rank=rank, connection=connection)
            self._consumer_waiting.setdefault(name, 0.0)
            for published in [ready for ready in self._ready.values() if ready.assignment.rank == rank]:
                self._hand_over(self._ready.pop(published.assignment.pack_id))
        self._wake()

    def detach_producer(self, name: str) -> None:
        """Forget a worker and issue its unfinished packs again. Call it once its process is reaped: while it lives, it
        could still write. Also when the broker has noticed by itself; what the worker published before it died counts.
        """
        with self._lock:
            producer = self._producers.get(name)
            if producer is None:
                return
            with contextlib.suppress(EOFError, OSError):
                while name in self._producers and producer.connection.poll(0):
                    self._from_producer(producer, producer.connection.recv())
            if name in self._producers:
                self._lost.append(name)
                self._producer_gone(producer)
        self._wake()

    def stats(self) -> TransportStats:
        """Where all packs stand now, and who waited how long. From any thread, also after `close()`."""
        with self._lock:
            now = time.perf_counter()
            waiting = dict(self._producer_waiting)
            for producer in self._producers.values():
                if producer.asking_since is not None:
                    waiting[producer.name] += now - producer.asking_since
            return TransportStats(
                packs=self._ledger.counts(),
                ranks=self._ledger.accounts(),
                producer_waiting_seconds=waiting,
                consumer_waiting_seconds=dict(self._consumer_waiting),
                lost=tuple(self._lost),
            )

    def silence(self, name: str) -> Silence | None:
        """How long a worker has had packs in hand without a word; none for one that has none, or is not attached.

        What it was given has its slot, so that nobody else keeps it waiting. From any thread.
        """
        with self._lock:
            producer, packs = self._producers.get(name), self._ledger.in_flight(name)
            if producer is None or not packs:
                return None
            return Silence(seconds=time.perf_counter() - producer.spoke_at, packs=packs)

    def depths(self) -> dict[int, QueueDepth]:
        """The queue of every rank that has not left, now. From any thread."""
        with self._lock:
            return self._ledger.depths()

    @property
    def finished(self) -> bool:
        """Every pack was released, or its consumer has left: producers get None."""
        with self._lock:
            return self._ledger.finished

    @property
    def closed_because(self) -> str | None:
        """Why nothing is served any more; None while it is."""
        with self._lock:
            return None if self._closed is None else self._closed.reason

    def close(self, *, reason: str = "the transport was closed", lost: str | None = None) -> None:
        """Stop serving: who waits gets TransportClosed, or, with `lost`, PeerDied naming that peer. May be called twice."""
        with self._lock:
            already = self._stopping
            self._stopping = True
            self._refuse_from_now(Closed(reason=reason if lost is None else f"{lost} died: {reason}", lost=lost))
        if already:
            return
        self._wake()
        if self._thread.ident is not None:
            self._thread.join()
        for connection in (*self._connections(), *self._retired, self._wake_read, self._wake_write):
            connection.close()

    def _run(self) -> None:
        try:
            while True:
                with self._lock:
                    self._serve()
                    for consumer in self._consumers.values():
                        self._send_unsent(consumer)
                    if self._stopping:
                        return
                    while self._retired:
                        self._retired.pop().close()
                    watched = self._connections()
                    full = [consumer.connection for consumer in self._consumers.values() if consumer.unsent]
                for connection in wait_for([*watched, self._wake_read], with_room=full):
                    self._receive(connection)
        except Exception as error:  # a thread's border: a broker that failed in silence would leave every peer waiting
            _LOG.exception("the transport broker failed")
            with self._lock:
                self._refuse_from_now(Closed(reason=f"the transport broker failed: {error!r}"))

    def _receive(self, connection: object) -> None:
        with self._lock:
            if connection is self._wake_read:
                self._wake_read.recv_bytes()
                return
            for peer in self._peers():
                if peer.connection is connection:
                    self._receive_from(peer)
                    return

    def _receive_from(self, peer: _Producer | _Consumer) -> None:
        message: ToBroker
        try:
            message = peer.connection.recv()
        except (EOFError, OSError):  # the kernel ends a connection only when its process can write no more
            self._lost.append(peer.name)
            if isinstance(peer, _Producer):
                _LOG.warning("producer %s is gone; its unfinished packs are issued again", peer.name)
                self._producer_gone(peer)
            else:
                self._consumer_lost(peer)
            return
        if isinstance(peer, _Producer):
            self._from_producer(peer, message)
        else:
            self._from_consumer(peer, message)

    def _from_producer(self, producer: _Producer, message: ToBroker) -> None:
        producer.spoke_at = time.perf_counter()
        match message:
            case Acquire():
                if self._closed is None:  # else the answer went out when the transport closed
                    producer.asking_since = producer.spoke_at
            case Published():
                if self._ledger.published(producer.name, message.assignment):
                    self._hand_over(message)
            case Leaving():
                self._producer_gone(producer)
            case _:
                raise AssertionError(f"producer {producer.name} sent {message}")

    def _from_consumer(self, consumer: _Consumer, message: ToBroker) -> None:
        match message:
            case Released():
                self._consumer_waiting[consumer.name] = message.waiting_seconds
                self._ledger.released(message.pack_id)
            case Rejected():
                _LOG.info("%s refused the seal of pack %d, generation %d", consumer.name, message.pack_id, message.generation)
                self._ledger.rejected(message.pack_id, message.generation)
            case Leaving():
                self._consumer_left(consumer)
            case _:
                raise AssertionError(f"consumer {consumer.name} sent {message}")

    def _serve(self) -> None:
        """Give assignments to those who ask, longest wait first, or tell them that no more will come."""
        asking = [producer for producer in self._producers.values() if producer.asking_since is not None]
        for producer in sorted(asking, key=lambda producer: producer.asking_since or 0.0):
            answer: ToProducer | None = self._ledger.issue(producer.name)
            if answer is None and self._ledger.finished:
                answer = NoMore()
            if answer is None:
                return
            self._answer(producer, answer)

    def _answer(self, producer: _Producer, answer: ToProducer) -> None:
        assert producer.asking_since is not None
        producer.spoke_at = time.perf_counter()
        self._producer_waiting[producer.name] += producer.spoke_at - producer.asking_since
        producer.asking_since = None
        self._send(producer.connection, answer)

    def _hand_over(self, published: Published) -> None:
        assignment = published.assignment
        consumer = self._consumers.get(assignment.rank)
        if consumer is None:
            self._ready[assignment.pack_id] = published
            return
        kept = self._ledger.kept(assignment.pack_id)
        ready = Ready(assignment=assignment, seal=published.seal, fingerprint=published.fingerprint, kept=kept)
        self._tell(consumer, ready)

    def _producer_gone(self, producer: _Producer) -> None:
        if producer.asking_since is not None:
            self._producer_waiting[producer.name] += time.perf_counter() - producer.asking_since
        del self._producers[producer.name]
        self._retired.append(producer.connection)
        again = self._ledger.worker_lost(producer.name)
        if again:
            _LOG.info("packs %s of %s are issued again", list(again), producer.name)

    def _consumer_left(self, consumer: _Consumer) -> None:
        del self._consumers[consumer.rank]
        self._retired.append(consumer.connection)
        self._ledger.rank_left(consumer.rank)

    def _consumer_lost(self, consumer: _Consumer) -> None:
        self._consumer_left(consumer)
        self._refuse_from_now(Closed(reason=f"{consumer.name} died, the run cannot go on without it", lost=consumer.name))

    def _refuse_from_now(self, closed: Closed) -> None:
        """Tell everybody, once: the first reason stands. Who does not wait just now reads it when next waiting."""
        if self._closed is not None:
            return
        self._closed = closed
        for producer in self._producers.values():
            if producer.asking_since is not None:
                self._answer(producer, closed)
            else:
                self._send(producer.connection, closed)
        for consumer in self._consumers.values():
            self._tell(consumer, closed)

    def _refused(self, connection: Connection) -> bool:
        """Whether a newcomer came too late; it is told why."""
        if self._closed is None:
            return False
        self._send(connection, self._closed)
        connection.close()
        return True

    def _tell(self, consumer: _Consumer, message: ToConsumer) -> None:
        consumer.unsent.append(message)
        self._send_unsent(consumer)

    def _send_unsent(self, consumer: _Consumer) -> None:
        """As much as there is room for: what is left goes out once the consumer has read."""
        while consumer.unsent and has_room(consumer.connection):
            self._send(consumer.connection, consumer.unsent.popleft())

    def _send(self, connection: Connection, message: ToProducer | ToConsumer) -> None:
        with contextlib.suppress(OSError):  # a peer that is gone is noticed when its connection is read
            connection.send(message)

    def _peers(self) -> list[_Producer | _Consumer]:
        return [*self._producers.values(), *self._consumers.values()]

    def _connections(self) -> list[Connection]:
        return [peer.connection for peer in self._peers()]

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # closed meanwhile: nobody is left to wake
            self._wake_write.send_bytes(b"!")
