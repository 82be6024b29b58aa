"""The trainer's lanes on a CPU: copies are made at once, and every access to what crosses streams is checked by clocks."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable

import torch
from torch import Tensor

from slipstream.device.stream_model import ModelEvent, ModelStreams, StreamModel, Timeline
from slipstream.trainer.lanes import Lanes, Slab


class ModelLaneEvent(ModelEvent):
    """Reached when `lanes.reached` says so; waits of the main thread are counted. Any two are 5 ms apart."""

    def __init__(self, lanes: ModelLanes) -> None:
        super().__init__(lanes.streams.cpu)
        self._lanes = lanes

    def learn(self) -> None:
        if self.clock is not None:
            self._lanes.thread().learn(self.clock)

    def query(self) -> bool:
        if self._lanes.reached:
            self.learn()
        return self._lanes.reached

    def synchronize(self) -> None:
        self._lanes.num_waits += threading.current_thread() is threading.main_thread() and not self._lanes.reached
        self.learn()

    def elapsed_time(self, end_event: ModelLaneEvent) -> float:
        assert None not in (self.clock, end_event.clock)
        return 5.0


class ModelLanes(Lanes):
    """`touch` is work of the compute stream, `look` of the calling thread; memory is known by its storage.

    A thread knows what it waited for itself and what another told it: `told_by(name)` where one takes over from another.
    """

    def __init__(self) -> None:
        self.model = StreamModel()
        self.streams = ModelStreams(self.model, process="trainer")
        super().__init__(self.streams)
        self.reached = True
        self.num_waits = self.num_finished = self.num_given_back = 0
        self._lock = threading.RLock()
        self._threads: dict[str, Timeline] = {}
        self._kept: list[Tensor] = []

    def touch(self, *, reads: Iterable[Tensor] = (), writes: Iterable[Tensor] = ()) -> None:
        with self._lock:
            self.streams.work(reads=map(_name, reads), writes=map(_name, writes))

    def look(self, *, reads: Iterable[Tensor] = (), writes: Iterable[Tensor] = ()) -> None:
        with self._lock:
            self.model.access(self.thread(), reads=map(_name, reads), writes=map(_name, writes))

    def thread(self) -> Timeline:
        """The calling thread."""
        name = threading.current_thread().name
        if threading.current_thread() is threading.main_thread():
            return self.streams.cpu
        with self._lock:
            if name not in self._threads:
                self._threads[name] = self.model.timeline(name)
            return self._threads[name]

    def told_by(self, name: str) -> None:
        """The calling thread goes on from where the thread of that name is."""
        if name in self._threads:
            self.thread().learn(dict(self._threads[name].clock))

    def event(self) -> ModelLaneEvent:
        return ModelLaneEvent(self)

    def timed_event(self) -> ModelLaneEvent:
        return ModelLaneEvent(self)

    def transfer(self, to: Tensor, of: Tensor) -> None:
        assert to.dtype == of.dtype
        assert to.shape == of.shape
        self.touch(reads=[of], writes=[to])
        to.copy_(of)

    def pinned(self, nbytes: int) -> Tensor:
        return self._keep(torch.zeros(nbytes, dtype=torch.uint8))

    def slab(self, nbytes: int) -> Slab:
        """In small spans, so that every part of the state crosses a border."""
        edges = [*range(0, nbytes, 1024), nbytes]
        return Slab(memory=self.pinned(nbytes), spans=tuple(itertools.pairwise(edges)), ensure=lambda: None)

    def buffer(self, nbytes: int) -> Tensor:
        return self.pinned(nbytes)

    def finish(self) -> None:
        self.num_finished += 1

    def give_back(self) -> None:
        self.num_given_back += 1

    def _keep(self, memory: Tensor) -> Tensor:
        self._kept.append(memory)  # an address that is used again would be known under the old name
        return memory


def _name(memory: Tensor) -> str:
    return f"memory {memory.untyped_storage().data_ptr():x}"


class CountedWork:
    """Counts that a test lets grow."""

    def __init__(self) -> None:
        self.now = {"recompiles": 7, "device_allocations": 100}
        self.compiled: list[str] = []

    def counts(self) -> dict[str, int]:
        return dict(self.now)

    def names(self) -> list[str]:
        names, self.compiled = self.compiled, []
        return names

    def close(self) -> None:
        pass
