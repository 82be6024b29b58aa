"""Steps prepared ahead on the CPU, in a thread of their own, while the drafter computes.

Waits for: a free place in the queue. Unblocked by: the loop taking a step.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from slipstream.observe import Account
from slipstream.records import BlockBatch, Pack, Step, Use
from slipstream.trainer.metadata import StagedArrays


class Planner(Protocol):
    """What the trainer asks of a plan; the answers depend on the arguments alone."""

    def step(self, step: int) -> Step:
        """Step `step` with the uses of all columns and the global supervised counts."""
        ...

    def pack(self, pack_id: int) -> Pack:
        """The pack of that id."""
        ...


@dataclass(frozen=True, slots=True)
class PreparedColumn:
    """One use of this rank, ready to compute on but for its hidden states. Token counts are real tokens of the pack.

    `batch` is on the CPU; on its way to a GPU its arrays are `staged` as well.
    """

    use: Use
    batch: BlockBatch
    context_tokens: int
    unique_tokens: int
    staged: StagedArrays | None = None


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """One step of this rank; `denominator` is that of the whole global step."""

    index: int
    epoch: int
    denominator: float
    columns: tuple[PreparedColumn, ...]


def prepare_step(
    *,
    planner: Planner,
    index: int,
    columns: Sequence[int],
    make_batch: Callable[[Pack, Use], BlockBatch],
    denominator: Callable[[Step], float],
) -> PreparedStep:
    """Build the batches of the owned columns of a step. A step with nothing supervised has denominator 1."""
    step = planner.step(index)
    prepared = []
    for column in columns:
        use = step.uses[column]
        pack = planner.pack(use.pack_id)
        tokens = pack.num_tokens
        prepared.append(
            PreparedColumn(
                use=use,
                batch=make_batch(pack, use),
                context_tokens=tokens,
                unique_tokens=tokens if use.use_number == 0 else 0,
            )
        )
    value = denominator(step) if step.supervised_per_slot.any() else 1.0
    return PreparedStep(index=index, epoch=step.epoch, denominator=value, columns=tuple(prepared))


class StepPrefetch:
    """Iterates over prepared steps in order, at most `depth` ahead. An error in the thread is raised where it is awaited.

    `room` waits until the device has used up what a further step's arrays would overwrite. `account`, that of the thread that
    iterates, is told what its waits are for: for the device, while this thread is in `room`, else for this thread.
    """

    def __init__(
        self,
        prepare: Callable[[int], PreparedStep],
        *,
        steps: range,
        depth: int,
        account: Account | None = None,
        room: Callable[[], None] | None = None,
    ) -> None:
        self._prepare, self._room, self._steps, self._depth = prepare, room, steps, depth
        self._account = account or Account("steps")
        self._changed = threading.Condition()
        self._ready: deque[PreparedStep | Exception] = deque()
        self._closing = self._held = False
        self._thread = threading.Thread(target=self._run, name="step-prefetch", daemon=True)

    def __enter__(self) -> StepPrefetch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def __iter__(self) -> Iterator[PreparedStep]:
        for index in self._steps:
            item = self._next(index)
            if isinstance(item, Exception):
                raise item
            yield item

    def _next(self, index: int) -> PreparedStep | Exception:
        with self._changed:
            while not self._ready:
                held = self._held
                with self._account.state("wait_gpu" if held else "wait_loader", step=index):
                    self._changed.wait_for(partial(self._moved, held))
            self._changed.notify_all()
            return self._ready.popleft()

    def _moved(self, held: bool) -> bool:
        return bool(self._ready) or self._held != held

    def _run(self) -> None:
        try:
            for index in self._steps:
                self._wait_for_room()
                with self._account.aside("loader", "build", step=index):
                    prepared = self._prepare(index)
                if not self._put(prepared):
                    return
        except Exception as error:  # carried to the loop's thread, where it belongs
            with self._changed:
                self._ready.append(error)
                self._changed.notify_all()

    def _wait_for_room(self) -> None:
        if self._room is not None:
            self._hold(True)
            self._room()
            self._hold(False)

    def _hold(self, held: bool) -> None:
        with self._changed:
            self._held = held
            self._changed.notify_all()

    def _put(self, prepared: PreparedStep) -> bool:
        """Hand a step over once there is a place for it. False when no more are wanted."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or len(self._ready) < self._depth)
            if self._closing:
                return False
            self._ready.append(prepared)
            self._changed.notify_all()
            return True
