"""The broker's connections: it sends more than they hold, and waits for nobody to read."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from slipstream.errors import TransportError
from slipstream.transport.broker import Broker
from slipstream.transport.connections import connection_pair
from slipstream.transport.ledger import PackOrder
from slipstream.transport.messages import Closed, Released
from slipstream.transport.shared import SharedSink

MANY = 600
"""Packs of a rank: more than messages fit into a connection."""


class NoPool:
    """Slots that nobody looks into."""

    def seal(self, slot: int, pack_id: int, generation: int) -> int:
        return 2**63 + pack_id

    def close(self) -> None:
        pass


def attached(broker: Broker, rank: int) -> Connection:
    ours, theirs = connection_pair()
    broker.attach_consumer(f"drafter-{rank}", rank, ours)
    return theirs


def test_a_consumer_that_does_not_read_holds_up_nobody_and_is_told_everything_later() -> None:
    """As while a drafter compiles, with many slots, and targets fill them."""
    broker = Broker(order=[PackOrder(pack_id=i, rank=i % 2, slot=i // 2) for i in range(2 * MANY)], slot_bytes=1)
    broker.start()
    slow, quick = (attached(broker, rank) for rank in range(2))
    ours, theirs = connection_pair()
    broker.attach_producer("target-0", ours)
    sink = SharedSink(connection=theirs, pools=[NoPool(), NoPool()], fingerprint="f" * 64)  # type: ignore[list-item]
    heard: list[int] = []

    def produce() -> None:
        for _ in range(2 * MANY):
            assignment = sink.acquire()
            assert assignment is not None
            sink.publish(assignment)

    def read() -> None:
        heard.extend(quick.recv().assignment.pack_id for _ in range(MANY))

    threads = [threading.Thread(target=work, daemon=True) for work in (produce, read)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "the broker waits for a consumer to read"
    assert heard == list(range(1, 2 * MANY, 2))
    assert [slow.recv().assignment.pack_id for _ in range(MANY)] == list(range(0, 2 * MANY, 2))
    broker.close(reason="enough")
    assert slow.recv() == quick.recv() == Closed(reason="enough")
    sink.close()
    for connection in (slow, quick):
        connection.close()


def until(wanted: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not wanted():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_worker_is_silent_only_while_it_has_packs_in_hand() -> None:
    """It waits for a slot with nothing in hand for as long as it likes; each word begins the count anew."""
    broker = Broker(order=[PackOrder(pack_id=i, rank=0, slot=i % 2) for i in range(6)], slot_bytes=1)
    broker.start()
    consumer = attached(broker, 0)
    ours, theirs = connection_pair()
    broker.attach_producer("target-0", ours)
    sink = SharedSink(connection=theirs, pools=[NoPool()], fingerprint="f" * 64)  # type: ignore[list-item]
    assert broker.silence("target-0") is None
    assert broker.silence("target-1") is None
    first, second = sink.acquire(), sink.acquire()
    assert first is not None
    assert second is not None
    time.sleep(0.3)
    silence = broker.silence("target-0")
    assert silence is not None
    assert silence.packs == (0, 1)
    assert 0.3 <= silence.seconds < 5
    sink.publish(first)
    until(lambda: (found := broker.silence("target-0")) is not None and found.packs == (1,))
    silence = broker.silence("target-0")
    assert silence is not None
    assert silence.seconds < 0.3
    sink.publish(second)

    def wait_for_a_slot() -> None:  # both are taken
        with contextlib.suppress(TransportError):
            sink.acquire()

    waiting = threading.Thread(target=wait_for_a_slot, daemon=True)
    waiting.start()
    until(lambda: broker.silence("target-0") is None)
    time.sleep(0.1)
    assert broker.silence("target-0") is None
    broker.detach_producer("target-0")
    assert broker.silence("target-0") is None
    broker.close()
    waiting.join(10)
    assert not waiting.is_alive()
    consumer.close()


def test_a_worker_that_waited_long_for_a_slot_is_not_silent_when_it_gets_one() -> None:
    broker = Broker(order=[PackOrder(pack_id=i, rank=0, slot=0) for i in range(2)], slot_bytes=1)
    broker.start()
    consumer = attached(broker, 0)
    ours, theirs = connection_pair()
    broker.attach_producer("target-0", ours)
    sink = SharedSink(connection=theirs, pools=[NoPool()], fingerprint="f" * 64)  # type: ignore[list-item]
    first = sink.acquire()
    assert first is not None
    sink.publish(first)
    waiting = threading.Thread(target=sink.acquire, daemon=True)  # for the only slot
    waiting.start()
    time.sleep(0.6)
    consumer.send(Released(pack_id=0, waiting_seconds=0.0))
    waiting.join(10)
    assert not waiting.is_alive()
    silence = broker.silence("target-0")
    assert silence is not None
    assert silence.packs == (1,)
    assert silence.seconds < 0.5
    broker.close()
    consumer.close()
