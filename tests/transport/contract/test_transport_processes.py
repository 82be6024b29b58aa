"""The split transport between processes: peers that die by SIGKILL, the supervisor that goes, several ranks at once."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from transport_harness import FINGERPRINT, LAYOUT, WAIT_SECONDS, ring, states_of, wait_until, write_states

from slipstream.device.shared import SharedMemory
from slipstream.device.threads import thread_environment
from slipstream.errors import PeerDied, TransportClosed, TransportError
from slipstream.transport.connections import connection_pair, shut_down
from slipstream.transport.ledger import Assignment, PackOrder
from slipstream.transport.messages import Acquire, Published, Ready
from slipstream.transport.shared import Broker, SharedSink, SharedSource
from slipstream.transport.slots import SlotPool

_CHILD = Path(__file__).with_name("transport_child.py")


class Host:
    """A supervisor in miniature: memory, broker, and children stopped by their own handles."""

    def __init__(self, order: list[PackOrder], *, num_slots: int, num_ranks: int = 1) -> None:
        self.num_slots = num_slots
        self.memories = [SharedMemory.create(LAYOUT.nbytes * num_slots) for _ in range(num_ranks)]
        self.broker = Broker(order=order, slot_bytes=LAYOUT.nbytes)
        self.broker.start()
        self.sources: list[SharedSource] = []
        self.sinks: list[SharedSink] = []
        self.children: list[subprocess.Popen[str]] = []

    def pool(self, rank: int = 0) -> SlotPool:
        return SlotPool.shared(LAYOUT, self.num_slots, self.memories[rank])

    def source(self, rank: int = 0) -> SharedSource:
        ours, theirs = connection_pair()
        self.broker.attach_consumer(f"drafter-{rank}", rank, ours)
        self.sources.append(SharedSource(connection=theirs, pool=self.pool(rank)))
        return self.sources[-1]

    def sink(self, name: str, *, fingerprint: str = FINGERPRINT) -> SharedSink:
        ours, theirs = connection_pair()
        self.broker.attach_producer(name, ours)
        pools = [self.pool(rank) for rank in range(len(self.memories))]
        self.sinks.append(SharedSink(connection=theirs, pools=pools, fingerprint=fingerprint))
        return self.sinks[-1]

    def child(self, role: str, name: str, *, stop_at: int | None = None) -> subprocess.Popen[str]:
        ours, theirs = connection_pair()
        if role == "producer":
            self.broker.attach_producer(name, ours)
        else:
            self.broker.attach_consumer(name, 0, ours)
        told = {"role": role, "connection": theirs.fileno(), "memory": self.memories[0].fd, "num_slots": self.num_slots}
        child = subprocess.Popen(
            [sys.executable, str(_CHILD), json.dumps({**told, "stop_at": stop_at})],
            pass_fds=[theirs.fileno(), self.memories[0].fd],
            env=thread_environment(1, base=os.environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        theirs.close()
        self.children.append(child)
        return child

    def stop(self) -> None:
        for end in (*self.sources, *self.sinks):
            end.close()
        self.broker.close()
        for child in self.children:
            child.kill()
            child.communicate(timeout=WAIT_SECONDS)
        for memory in self.memories:
            memory.close()


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    made: list[Host] = []
    yield made
    for host in made:
        host.stop()


def said(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def produce_one(sink: SharedSink) -> Assignment | None:
    assignment = sink.acquire()
    if assignment is not None:
        last = sink.last_hidden(assignment)
        assert last is not None
        write_states(assignment, sink.hidden(assignment), last)
        sink.publish(assignment)
    return assignment


def assert_all_come(source: SharedSource, num_packs: int) -> list[int]:
    """Takes all packs in order; their bytes are right; returns their generations."""
    generations = []
    for pack_id in range(num_packs):
        pack = source.take(pack_id)
        assert torch.equal(pack.hidden_TKD, states_of(pack_id)[0])
        generations.append(pack.generation)
        source.release(pack_id)
    return generations


def test_a_producer_process_killed_mid_pack_is_replaced_and_the_bytes_are_right(hosts: list[Host]) -> None:
    hosts.append(host := Host(ring(8, num_slots=3), num_slots=3))
    doomed = host.child("producer", "target-0", stop_at=4)
    source = host.source()
    generations = [source.take(pack_id).generation for pack_id in (0, 1, 2)]
    for pack_id in (0, 1, 2):
        source.release(pack_id)
    assert said(doomed) == "half"
    doomed.kill()
    assert doomed.wait(WAIT_SECONDS) == -9
    host.broker.detach_producer("target-0")
    host.broker.detach_producer("target-0")  # whoever notices first, the broker or the supervisor
    host.child("producer", "target-0")
    for pack_id in range(3, 8):
        pack = source.take(pack_id)
        assert torch.equal(pack.hidden_TKD, states_of(pack_id)[0])
        assert pack.last_hidden_TD is not None
        assert torch.equal(pack.last_hidden_TD, states_of(pack_id)[1])
        generations.append(pack.generation)
        source.release(pack_id)
    assert generations == [0, 0, 0, 0, 1, 0, 0, 0]
    assert host.children[1].wait(WAIT_SECONDS) == 0  # after the last release it was told that no more will come
    stats = host.broker.stats()
    assert stats.lost == ("target-0",)
    assert (stats.packs.reissued, stats.packs.rejected, stats.packs.released) == (1, 0, 8)
    assert host.broker.finished


def test_a_killed_consumer_ends_the_run_and_is_named(hosts: list[Host]) -> None:
    hosts.append(host := Host(ring(20, num_slots=2), num_slots=2))
    consumer = host.child("consumer", "drafter-0", stop_at=1)
    sink = host.sink("target-0")
    for _ in range(3):
        produce_one(sink)
    assert said(consumer) == "taken"
    threading.Timer(0.1, consumer.kill).start()
    with pytest.raises(PeerDied, match="drafter-0 died"):  # waits for the slot of pack 1, which will not be released
        produce_one(sink)
    with pytest.raises(PeerDied, match="drafter-0 died"):
        sink.acquire()
    assert consumer.wait(WAIT_SECONDS) == -9
    assert host.broker.closed_because == "drafter-0 died, the run cannot go on without it"
    assert host.broker.stats().lost == ("drafter-0",)
    with pytest.raises(PeerDied, match="drafter-0"):
        host.sink("late").acquire()


def test_the_other_ranks_learn_which_rank_died(hosts: list[Host]) -> None:
    order = [PackOrder(pack_id=i, rank=i % 2, slot=i // 2) for i in range(4)]
    hosts.append(host := Host(order, num_slots=2, num_ranks=2))
    sources = [host.source(rank) for rank in range(2)]
    sink = host.sink("target-0")
    produce_one(sink)
    wait_until(lambda: host.broker.stats().packs.ready == 1)
    threading.Timer(0.05, shut_down, [sources[1]._end._connection]).start()  # as the kernel does when its process ends
    with pytest.raises(PeerDied, match="drafter-1 died"):
        sources[0].take(2)
    assert torch.equal(sources[0].take(0).hidden_TKD, states_of(0)[0])  # what is there can still be used to end a step
    assert host.broker.stats().lost == ("drafter-1",)


def test_a_broker_that_fails_tells_everybody(hosts: list[Host]) -> None:
    hosts.append(host := Host(ring(2, num_slots=2), num_slots=2))
    source, sink = host.source(), host.sink("target-0")
    source._end._connection.send(Acquire())  # no consumer says that
    with pytest.raises(TransportClosed, match=r"the transport broker failed: .*drafter-0 sent Acquire"):
        source.take(0)
    with pytest.raises(TransportClosed, match="the transport broker failed"):
        sink.acquire()


def test_a_supervisor_that_is_gone_is_noticed_by_both_ends(hosts: list[Host]) -> None:
    hosts.append(host := Host([], num_slots=1))
    ours, theirs = connection_pair()
    source = SharedSource(connection=theirs, pool=host.pool())
    threading.Timer(0.05, ours.close).start()
    with pytest.raises(PeerDied, match="supervisor"):
        source.take(0)
    source.close()

    ours, theirs = connection_pair()
    sink = SharedSink(connection=theirs, pools=[host.pool()], fingerprint=FINGERPRINT)
    threading.Timer(0.05, ours.close).start()
    with pytest.raises(PeerDied, match="supervisor"):
        sink.acquire()
    with pytest.raises(PeerDied, match="supervisor"):
        sink.publish(Assignment(pack_id=0, rank=0, slot=0, generation=0))
    sink.close()


def test_a_close_reaches_who_waits_and_who_comes_later(hosts: list[Host]) -> None:
    hosts.append(host := Host(ring(1, num_slots=1), num_slots=1, num_ranks=2))
    source, sink, busy = host.source(), host.sink("target-0"), host.sink("target-1")
    assignment = busy.acquire()
    assert assignment is not None
    errors: list[BaseException] = []

    def wait_in(call: object) -> None:
        try:
            call()  # type: ignore[operator]
        except TransportError as error:
            errors.append(error)

    waiters = [threading.Thread(target=wait_in, args=[call]) for call in (sink.acquire, lambda: source.take(0))]
    for waiter in waiters:
        waiter.start()
    wait_until(lambda: host.broker.stats().producer_waiting_seconds["target-0"] > 0)
    host.broker.close(reason="it was started too often", lost="target-7")
    for waiter in waiters:
        waiter.join(WAIT_SECONDS)
    assert [(type(error), str(error)) for error in errors] == [(PeerDied, "target-7 died: it was started too often")] * 2
    for call in (lambda: busy.publish(assignment), busy.acquire, lambda: source.release(0)):
        with pytest.raises((PeerDied, AssertionError)):
            call()
    with pytest.raises(PeerDied, match="target-7"):
        host.sink("late").acquire()
    with pytest.raises(PeerDied, match="target-7"):
        host.source(1).take(0)


def test_packs_of_two_targets_are_not_mixed(hosts: list[Host]) -> None:
    hosts.append(host := Host(ring(2, num_slots=2), num_slots=2))
    source = host.source()
    produce_one(host.sink("target-0"))
    produce_one(host.sink("target-1", fingerprint="another-target"))
    source.take(0)
    with pytest.raises(TransportError, match="another-target"):
        source.take(1)


def test_several_producers_and_ranks_with_jitter_and_losses(hosts: list[Host]) -> None:
    """Three workers, two ranks, one worker that leaves and one whose connection breaks: every rank sees the same packs."""
    ranks, columns, slots = 2, 4, 3
    order = [
        PackOrder(pack_id=i, rank=i % columns % ranks, slot=i % columns // ranks * slots + i // columns % slots)
        for i in range(80)
    ]
    hosts.append(host := Host(order, num_slots=2 * slots, num_ranks=ranks))
    sources = [host.source(rank) for rank in range(ranks)]
    failures: list[BaseException] = []

    def work(name: str, seed: int, packs: int | None) -> None:
        sink, dice, pause = host.sink(name), random.Random(seed), threading.Event()
        try:
            while packs is None or packs > 0:
                pause.wait(dice.random() * 0.004)
                if packs == 1:
                    assert sink.acquire() is not None  # and never published
                elif produce_one(sink) is None:
                    break
                packs = packs and packs - 1
            sink.close()
        except BaseException as error:
            failures.append(error)

    def train(rank: int) -> None:
        dice, pause = random.Random(rank), threading.Event()
        try:
            for pack in order:
                if pack.rank == rank:
                    taken = sources[rank].take(pack.pack_id)
                    pause.wait(dice.random() * 0.004)
                    assert torch.equal(taken.hidden_TKD, states_of(pack.pack_id)[0])
                    sources[rank].release(pack.pack_id)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=args) for args in (("a", 1, None), ("b", 2, None), ("c", 3, 10))]
    threads += [threading.Thread(target=train, args=[rank]) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_SECONDS)
    assert not failures
    assert host.broker.finished
    stats = host.broker.stats()
    assert (stats.packs.released, stats.packs.reissued, stats.packs.in_flight) == (80, 1, 0)
    assert all(account.ready_bytes == 0 for account in stats.ranks.values())
    assert all(seconds > 0 for seconds in stats.producer_waiting_seconds.values())
    assert set(stats.consumer_waiting_seconds) == {"drafter-0", "drafter-1"}


def test_a_consumer_that_leaves_in_order_ends_the_producers_work(hosts: list[Host]) -> None:
    """Interrupted after a few steps: nobody is reported dead, what was not trained is counted."""
    hosts.append(host := Host(ring(10, num_slots=2), num_slots=2))
    source, sink = host.source(), host.sink("target-0")
    for pack_id in range(3):
        produce_one(sink)
        source.take(pack_id)
        source.release(pack_id)
    source.close()
    wait_until(lambda: host.broker.finished)
    assert sink.acquire() is None
    assert sink.acquire() is None
    stats = host.broker.stats()
    assert (stats.packs.released, stats.packs.abandoned, stats.lost) == (3, 7, ())


def test_a_late_or_forged_publication_is_not_believed(hosts: list[Host]) -> None:
    """What a lost worker said before it was lost counts once; a seal of an older generation is refused."""
    hosts.append(host := Host(ring(1, num_slots=1), num_slots=1))
    source, pool = host.source(), host.pool()
    ours, theirs = connection_pair()
    host.broker.attach_producer("liar", ours)
    theirs.send(Acquire())
    assignment = theirs.recv()
    write_states(assignment, pool.hidden(0), pool.last_hidden(0))
    old = pool.seal(0, 0, assignment.generation)
    theirs.close()
    wait_until(lambda: host.broker.stats().packs.waiting == 1)

    ours, theirs = connection_pair()
    host.broker.attach_producer("replay", ours)
    theirs.send(Published(assignment=assignment, seal=old, fingerprint=FINGERPRINT))
    theirs.send(Acquire())
    again = theirs.recv()
    assert (again.pack_id, again.generation) == (0, 1)
    theirs.send(Published(assignment=again, seal=old, fingerprint=FINGERPRINT))
    theirs.close()
    honest = host.sink("honest")
    threading.Timer(0.05, produce_one, [honest]).start()
    taken = source.take(0)
    assert taken.generation == 2
    assert source.stats().seals_rejected == 1
    assert host.broker.stats().packs.rejected == 1


def test_packs_published_before_their_consumer_came_are_handed_over(hosts: list[Host]) -> None:
    hosts.append(host := Host(ring(2, num_slots=2), num_slots=2))
    sink = host.sink("target-0")
    produce_one(sink)
    produce_one(sink)
    wait_until(lambda: host.broker.stats().packs.ready == 2)
    assert assert_all_come(host.source(), 2) == [0, 0]


def test_what_a_dead_worker_published_counts_even_if_nobody_had_read_it(hosts: list[Host]) -> None:
    """Detached before the broker could look: the publication lies in the connection and is read first."""
    broker = Broker(order=ring(2, num_slots=2), slot_bytes=LAYOUT.nbytes)  # not started: it looks at nothing by itself
    ours, theirs = connection_pair()
    broker.attach_producer("target-0", ours)
    producer = broker._producers["target-0"]
    theirs.send(Acquire())
    broker._receive(ours)
    broker._serve()
    assignment = theirs.recv()
    theirs.send(Published(assignment=assignment, seal=1, fingerprint=FINGERPRINT))
    theirs.send(Acquire())
    theirs.close()
    broker.detach_producer("target-0")
    assert producer.connection is ours
    counts = broker.stats().packs
    assert (counts.ready, counts.waiting, counts.in_flight, counts.unissued) == (1, 0, 0, 1)
    mine, yours = connection_pair()
    broker.attach_consumer("drafter-0", 0, mine)
    assert isinstance(_next(yours), Ready)
    yours.close()
    broker.close()


def _next(connection: Connection) -> object:
    assert connection.poll(WAIT_SECONDS)
    return connection.recv()
