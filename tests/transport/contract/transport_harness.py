"""What the contract suite drives: one harness a kind of transport, with deterministic packs and a log of what happened."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest
import torch

from slipstream.device.shared import SharedMemory
from slipstream.errors import TransportClosed, TransportError
from slipstream.transport.connections import connection_pair
from slipstream.transport.ends import HiddenSource, Verify
from slipstream.transport.inline import InlineTransport
from slipstream.transport.ledger import Assignment, PackOrder
from slipstream.transport.shared import Broker, SharedSink, SharedSource
from slipstream.transport.slots import SlotLayout, SlotPool

LAYOUT = SlotLayout(pack_tokens=128, num_taps=2, hidden_size=8, dtype="bfloat16", last_hidden=True)
FINGERPRINT = "target-under-test"
WAIT_SECONDS = 30.0

Produce = Callable[[Assignment, torch.Tensor, torch.Tensor], None]


def states_of(pack_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What the target would say of this pack: hidden `[T, K, D]` and last hidden `[T, D]`, the same wherever asked."""
    generator = torch.Generator().manual_seed(pack_id + 1)
    shape = (LAYOUT.pack_tokens, LAYOUT.num_taps, LAYOUT.hidden_size)
    hidden = torch.randn(shape, generator=generator).to(torch.bfloat16)
    last = torch.randn((shape[0], shape[2]), generator=generator).to(torch.bfloat16)
    return hidden, last


def write_states(assignment: Assignment, hidden: torch.Tensor, last_hidden: torch.Tensor) -> None:
    """A faithful producer."""
    states, last = states_of(assignment.pack_id)
    hidden.copy_(states)
    last_hidden.copy_(last)


def ring(num_packs: int, *, num_slots: int, first: int = 0, rank: int = 0) -> list[PackOrder]:
    """Packs in turn over the slots of one rank."""
    return [PackOrder(pack_id=first + i, rank=rank, slot=i % num_slots) for i in range(num_packs)]


class InlineHarness:
    """The colocated transport: the consumer produces by itself."""

    kind = "colocated"

    def __init__(self) -> None:
        self.log: list[tuple[str, int, int]] = []

    def start(
        self,
        order: Sequence[PackOrder],
        *,
        num_slots: int,
        produce: Produce = write_states,
        verify: Verify = Verify.EACH_TAKE,
        pool_class: type[SlotPool] = SlotPool,
    ) -> HiddenSource:
        self.pool = pool_class.private(LAYOUT, num_slots)

        def fill(assignment: Assignment) -> None:
            last = self.pool.last_hidden(assignment.slot)
            assert last is not None
            self.log.append(("write", assignment.pack_id, assignment.generation))
            produce(assignment, self.pool.hidden(assignment.slot), last)

        self.source = InlineTransport(order, self.pool, fill, fingerprint=FINGERPRINT, verify=verify)
        return self.source

    def release(self, pack_id: int) -> None:
        self.log.append(("release", pack_id, 0))
        self.source.release(pack_id)

    def hold_back(self, blocked: int) -> None:
        """The transport must not write `blocked` while its slot is held; inline, asking for it is an error, not a wait."""
        with pytest.raises(TransportError, match="its slot is still held"):
            self.source.take(blocked)

    def slot_tensor(self, slot: int) -> torch.Tensor:
        return self.pool.hidden(slot)

    def close_from_elsewhere(self) -> None:
        self.source.close()

    def stop(self) -> None:
        self.source.close()


class SharedHarness:
    """The split transport: a broker, producer threads with their own mappings, the consumer's end in the test's thread."""

    kind = "split"

    def __init__(self, num_producers: int = 1) -> None:
        self.log: list[tuple[str, int, int]] = []
        self.num_producers = num_producers
        self.failures: list[str] = []

    def start(
        self,
        order: Sequence[PackOrder],
        *,
        num_slots: int,
        produce: Produce = write_states,
        verify: Verify = Verify.EACH_TAKE,
        pool_class: type[SlotPool] = SlotPool,
    ) -> HiddenSource:
        self.memory = SharedMemory.create(LAYOUT.nbytes * num_slots)
        self.pool = SlotPool.shared(LAYOUT, num_slots, self.memory)
        self.broker = Broker(order=order, slot_bytes=LAYOUT.nbytes)
        self.broker.start()
        ours, theirs = connection_pair()
        self.broker.attach_consumer("drafter-0", 0, ours)
        pool = pool_class.shared(LAYOUT, num_slots, self.memory)
        self.source = SharedSource(connection=theirs, pool=pool, verify=verify)
        self.threads = []
        for number in range(self.num_producers):
            ours, theirs = connection_pair()
            self.broker.attach_producer(f"target-{number}", ours)
            sink = SharedSink(
                connection=theirs, pools=[pool_class.shared(LAYOUT, num_slots, self.memory)], fingerprint=FINGERPRINT
            )
            self.threads.append(threading.Thread(target=self._produce, args=(sink, produce)))
            self.threads[-1].start()
        return self.source

    def _produce(self, sink: SharedSink, produce: Produce) -> None:
        try:
            while (assignment := sink.acquire()) is not None:
                last = sink.last_hidden(assignment)
                assert last is not None
                self.log.append(("write", assignment.pack_id, assignment.generation))
                produce(assignment, sink.hidden(assignment), last)
                sink.publish(assignment)
        except TransportClosed:  # the harness was stopped
            pass
        except BaseException as error:
            self.failures.append(repr(error))
        sink.close()

    def release(self, pack_id: int) -> None:
        self.log.append(("release", pack_id, 0))
        self.source.release(pack_id)

    def hold_back(self, blocked: int) -> None:
        """All that may be written is; every producer waits for a slot, and `blocked` has not been touched."""
        wait_until(lambda: self.broker.stats().packs.in_flight == 0 and self._all_ask())
        assert all(pack_id != blocked for what, pack_id, _ in self.log if what == "write")

    def _all_ask(self) -> bool:
        before = self.broker.stats().producer_waiting_seconds
        after = self.broker.stats().producer_waiting_seconds
        return all(after[name] > before[name] for name in before)

    def slot_tensor(self, slot: int) -> torch.Tensor:
        return self.pool.hidden(slot)

    def close_from_elsewhere(self) -> None:
        self.broker.close()

    def stop(self) -> None:
        self.source.close()
        self.broker.close()
        for thread in self.threads:
            thread.join(WAIT_SECONDS)
            assert not thread.is_alive()
        assert not self.failures
        self.pool.close()
        self.memory.close()


class TwoProducers(SharedHarness):
    """The split transport with two target workers."""

    def __init__(self) -> None:
        super().__init__(num_producers=2)


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for another thread to get somewhere; the suite fails rather than hangs."""
    pause = threading.Event()
    for _ in range(int(WAIT_SECONDS / 0.01)):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError("it did not come to that in time")


# By kind of transport, as `slipstream.transport.SOURCES`: a kind without a harness fails the suite.
HARNESSES: dict[str, list[type[InlineHarness] | type[SharedHarness]]] = {
    "colocated": [InlineHarness],
    "split": [SharedHarness, TwoProducers],
}
