"""The staging classes over modelled streams: processes whose threads take turns as a random number says.

Nothing here decides what is ordered: the departures, arrivals and inline sources under test do, and the stream model judges.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch

from slipstream.device.completer import Completer
from slipstream.device.float8 import dequantise, quantise_rows
from slipstream.device.stream_model import ModelStreams, StreamModel
from slipstream.device.streams import Event
from slipstream.records import HiddenPack
from slipstream.transport.arrivals import Arrivals, Buffer
from slipstream.transport.departures import Departures
from slipstream.transport.host_slots import HostSlots
from slipstream.transport.ledger import Assignment, Ledger, PackOrder
from slipstream.transport.messages import Ready
from slipstream.transport.operations import DeviceSlot, device_slots, plain_checksum, sum_of_parts, tensors_of
from slipstream.transport.planned import PlannedUse
from slipstream.transport.shelf import Shelf
from slipstream.transport.slots import SlotLayout, SlotPool

LAYOUT = SlotLayout(pack_tokens=8, num_taps=2, hidden_size=8, dtype="bfloat16")
SCALED = SlotLayout(pack_tokens=8, num_taps=2, hidden_size=8, dtype="float8_e4m3")


def name_of(tensor: torch.Tensor) -> str:
    """What the model calls the memory of a tensor; every slot and every row of seals begins somewhere else."""
    return f"memory at {tensor.data_ptr():#x}"


class ModelOperations:
    """The operations, done at once and noted down as work of the stream that they were given to."""

    num_parts = 1

    def __init__(self, streams: ModelStreams) -> None:
        self.streams = streams

    def copy(self, *, target: torch.Tensor, source: torch.Tensor) -> None:
        self.streams.work(reads=[name_of(source)], writes=[name_of(target)])
        target.copy_(source)

    def add_up(self, slot: DeviceSlot, *, parts_P: torch.Tensor) -> None:
        self.streams.work(reads=[name_of(tensor) for tensor in tensors_of(slot)], writes=[name_of(parts_P)])
        total = plain_checksum(slot)
        parts_P[0] = total - (total >> 63 << 64)

    def read(self, parts_P: torch.Tensor) -> int:
        self.streams.look(reads=[name_of(parts_P)])
        return sum_of_parts(parts_P)


class Unlocked:
    """Host memory that needs no page-locking."""

    def ensure(self, slot: int) -> None:
        pass

    def close(self) -> None:
        pass


class Steps:
    """A background whose completers move when told to, one event at a time; waiting means that they do."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.completers: list[StepCompleter] = []

    def completer(self, name: str, *, failed: Callable[[Exception], None]) -> Completer:
        self.completers.append(StepCompleter(failed))
        return self.completers[-1]

    def condition(self) -> threading.Condition:
        steps = self

        class Waiting(threading.Condition):
            def wait(self, timeout: float | None = None) -> bool:
                assert steps.step(), "everybody waits for everybody"
                return True

        return Waiting()

    def step(self) -> bool:
        """Let one completer, chosen at random, do its next piece of work; False when none has any."""
        busy = [completer for completer in self.completers if completer.pending]
        if busy:
            self.chance.choice(busy).step()
        return bool(busy)


class StepCompleter:
    def __init__(self, failed: Callable[[Exception], None]) -> None:
        self.pending: deque[tuple[Event, Callable[[], None]]] = deque()
        self.failed = failed

    def submit(self, event: Event, done: Callable[[], None]) -> None:
        self.pending.append((event, done))

    def step(self) -> None:
        event, done = self.pending.popleft()
        event.synchronize()
        try:
            done()
        except AssertionError:  # the model's verdict
            raise
        except Exception as error:
            self.failed(error)

    def close(self) -> None:
        while self.pending:
            self.step()


def states_of(pack_id: int) -> torch.Tensor:
    """What the target says of a pack: deterministic, different for each."""
    shape = (LAYOUT.pack_tokens, LAYOUT.num_taps, LAYOUT.hidden_size)
    return (torch.arange(shape[0] * shape[1] * shape[2]).view(shape) % 97 + 100 * pack_id).to(torch.bfloat16)


def host_slots(pool: SlotPool, streams: ModelStreams) -> HostSlots:
    return HostSlots(
        pool=pool,
        locked=Unlocked(),
        parts_MP=torch.zeros(pool.num_slots, 1, dtype=torch.int64),
        landed=[streams.event() for _ in range(pool.num_slots)],
    )


def make_slots(operations: ModelOperations, count: int, layout: SlotLayout = LAYOUT) -> list[DeviceSlot]:
    return device_slots(layout, count, operations=operations, device=torch.device("cpu"))


def make_buffers(operations: ModelOperations, count: int, layout: SlotLayout = LAYOUT) -> list[Buffer]:
    event = operations.streams.event
    return [
        Buffer(slot=slot, found_P=torch.zeros(1, dtype=torch.int64), copied=event(), checked=event(), used=event())
        for slot in make_slots(operations, count, layout)
    ]


def activations(streams: ModelStreams) -> str:
    """Memory that every forward of a process writes again, as the allocator hands it out again."""
    return f"activations of {streams.cpu.name}"


def forward(streams: ModelStreams, assignment: Assignment, slot: DeviceSlot) -> None:
    """A target that packs in its hook: layer by layer into the slot, on the stream it computes on."""
    for _ in range(LAYOUT.num_taps):
        streams.work(writes=[activations(streams)])
        streams.work(reads=[activations(streams)], writes=[name_of(slot.hidden_TKD)])
    slot.hidden_TKD.copy_(states_of(assignment.pack_id))


def forward_scaled(streams: ModelStreams, assignment: Assignment, slot: DeviceSlot) -> None:
    """The same into eight bits: each layer's values and scales are written together, in its hook."""
    assert slot.scale_TK is not None
    states = states_of(assignment.pack_id)
    for tap in range(SCALED.num_taps):
        streams.work(writes=[activations(streams)])
        streams.work(reads=[activations(streams)], writes=[name_of(slot.hidden_TKD), name_of(slot.scale_TK)])
        bad = torch.zeros(SCALED.pack_tokens, dtype=torch.bool)
        quantise_rows(states[:, tap], values_RD=slot.hidden_TKD[:, tap], scale_R=slot.scale_TK[:, tap], bad_R=bad)


def train(streams: ModelStreams, pack: HiddenPack) -> None:
    """A drafter's forward and backward, both of which read the pack. What it reads must be the pack."""
    if pack.scale_TK is not None:
        wide = torch.empty(pack.hidden_TKD.shape)
        streams.work(reads=[name_of(pack.hidden_TKD), name_of(pack.scale_TK)], writes=["widened pack"])
        dequantise(pack.hidden_TKD, scale_TK=pack.scale_TK, out_TKD=wide)
        assert torch.allclose(wide, states_of(pack.pack_id).float(), rtol=1 / 16, atol=0.01)
        return
    assert torch.equal(pack.hidden_TKD, states_of(pack.pack_id))
    for _ in range(2):
        streams.work(reads=[name_of(pack.hidden_TKD)])


class Targets:
    """A target process: takes assignments, runs forwards, departs."""

    def __init__(self, world: World, name: str, *, num_slots: int = 2) -> None:
        self.world, self.name = world, name
        self.streams = ModelStreams(world.model, process=name)
        self.operations = ModelOperations(self.streams)
        self.completer = StepCompleter(world.fail)
        self.departures = world.departures_class(
            streams=self.streams,
            operations=self.operations,
            slots=make_slots(self.operations, num_slots, world.layout),
            hosts={0: host_slots(world.pool, self.streams)},
            completer=self.completer,
            publish=self.publish,
        )

    def publish(self, assignment: Assignment, *, seal: int) -> None:
        ready = Ready(assignment=assignment, seal=seal, fingerprint="target", kept=False)
        self.world.to_broker.append((dict(self.streams.cpu.clock), lambda: self.world.published(self.name, ready)))

    def step(self) -> bool:
        assignment = self.world.ledger.issue(self.name)
        if assignment is None:
            return False
        self.streams.cpu.learn(self.world.broker.clock)
        slot = self.departures.begin(assignment)
        self.world.forward(self.streams, assignment, slot)
        self.departures.depart(assignment)
        return True


class World:
    """Target workers, a broker, and a drafter that takes `uses`, each with its own CPU; messages carry what was known.

    The fault switches put a class or a function with a planted fault in place of the real one.
    """

    departures_class: type[Departures] = Departures
    arrivals_class: type[Arrivals] = Arrivals
    may_be_damaged = True
    layout = LAYOUT
    forward = staticmethod(forward)

    def __init__(
        self,
        *,
        chance: random.Random,
        order: Sequence[PackOrder],
        uses: Sequence[PlannedUse],
        num_targets: int = 1,
        num_buffers: int = 2,
        damage: float = 0.0,
    ) -> None:
        self.chance, self.damage = chance, damage
        self.model = StreamModel()
        self.pool = SlotPool.private(self.layout, 1 + max(pack.slot for pack in order))
        self.ledger = Ledger(order, slot_bytes=self.layout.nbytes)
        self.broker = self.model.timeline("broker")
        self.to_broker: deque[tuple[dict[str, int], Callable[[], None]]] = deque()
        self.to_drafter: deque[tuple[dict[str, int], Ready]] = deque()
        self.shelf = Shelf(max_rejections=99)
        self.targets = [Targets(self, f"target-{i}") for i in range(num_targets)]
        self.drafter = ModelStreams(self.model, process="drafter")
        operations = ModelOperations(self.drafter)
        self.completer = StepCompleter(self.fail)
        self.arrivals = self.arrivals_class(
            streams=self.drafter,
            operations=operations,
            buffers=make_buffers(operations, num_buffers, self.layout),
            guest=None,
            host=host_slots(self.pool, self.drafter),
            uses=uses,
            link=self,
            completer=self.completer,
            changed=threading.Condition(),
        )
        self.uses: Iterator[PlannedUse] = iter(uses)
        self.next_use = next(self.uses, None)

    def fail(self, error: Exception) -> None:
        raise error

    def run(self) -> None:
        """All uses to the end, one step of a random thread after the other."""
        threads = [self.train_step, self.hear, self.broker_step, lambda: _complete(self.completer)]
        for target in self.targets:
            threads += [target.step, lambda target=target: _complete(target.completer)]
        while self.next_use is not None:
            turns = self.chance.sample(threads, len(threads))
            assert any(step() for step in turns), "everybody waits for everybody"

    def train_step(self) -> bool:
        assert self.next_use is not None
        pack = self.arrivals.take(self.next_use.pack_id)
        if pack is None:
            return False
        train(self.drafter, pack)
        if self.next_use.is_last:
            self.arrivals.finish()
            self.arrivals.pump()
        self.next_use = next(self.uses, None)
        return True

    def hear(self) -> bool:
        if not self.to_drafter:
            return False
        clock, ready = self.to_drafter.popleft()
        self.drafter.cpu.learn(clock)
        self.shelf.put(ready)
        self.arrivals.pump()
        return True

    def broker_step(self) -> bool:
        if not self.to_broker:
            return False
        clock, message = self.to_broker.popleft()
        self.broker.learn(clock)
        message()
        return True

    def published(self, name: str, ready: Ready) -> None:
        assert self.ledger.published(name, ready.assignment)
        if self.chance.random() < self.damage:
            scale = self.pool.scale(ready.assignment.slot)
            damaged = self.pool.hidden(ready.assignment.slot) if scale is None else scale[:, :, None]
            damaged.view(torch.int16)[3, 1, 0] ^= 16
        self.to_drafter.append((dict(self.broker.clock), ready))

    # The drafter's link to the broker.
    def ready(self, pack_id: int) -> Ready | None:
        return self.shelf.ready(pack_id)

    def accept(self, pack_id: int) -> None:
        self.shelf.accept(pack_id)

    def refuse(self, pack_id: int) -> None:
        broken = self.shelf.refuse(pack_id)
        self._tell(lambda: self.ledger.rejected(pack_id, broken.generation))

    def release(self, pack_id: int) -> None:
        self.shelf.release(pack_id)
        self._tell(lambda: self.ledger.released(pack_id))

    def _tell(self, message: Callable[[], object]) -> None:
        self.to_broker.append((dict(self.drafter.cpu.clock), lambda: void(message())))


def void(_: object) -> None:
    """For lambdas that must return nothing."""


def _complete(completer: StepCompleter) -> bool:
    busy = bool(completer.pending)
    if busy:
        completer.step()
    return busy


def ring_plan(
    chance: random.Random, *, num_packs: int, num_slots: int, distance: int
) -> tuple[list[PackOrder], list[PlannedUse]]:
    """A plan as the planner makes them: packs by first use; each used once, or again `distance` packs later; slots reused
    only by packs whose first use comes after the last use of the pack before.
    """
    uses: list[tuple[int, bool]] = []
    again: deque[int] = deque()
    for pack_id in range(num_packs):
        replayed = distance > 0 and chance.random() < 0.5
        uses.append((pack_id, not replayed))
        again.append(pack_id if replayed else -1)
        if len(again) > distance:
            due = again.popleft()
            if due >= 0 and distance > 0:
                uses.append((due, True))
    uses += [(due, True) for due in again if due >= 0 and distance > 0]
    first = {pack: uses.index(next(u for u in uses if u[0] == pack)) for pack in range(num_packs)}
    last = {pack: max(i for i, u in enumerate(uses) if u[0] == pack) for pack in range(num_packs)}
    free_from = [-1] * (num_slots + distance)
    order = []
    for pack in range(num_packs):
        slot = min(range(len(free_from)), key=lambda slot: free_from[slot])
        assert free_from[slot] < first[pack]
        free_from[slot] = last[pack]
        order.append(PackOrder(pack_id=pack, rank=0, slot=slot))
    return order, [PlannedUse(pack_id=pack, is_last=is_last) for pack, is_last in uses]
