"""Steps prepared ahead on the CPU, in a thread of their own, while the drafter computes.

Waits for: a free place in the queue. Unblocked by: the loop taking a step.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

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
    """Iterates over prepared steps in order, at most `depth` ahead. An error in the thread is raised where it is awaited."""

    def __init__(self, prepare: Callable[[int], PreparedStep], *, steps: range, depth: int) -> None:
        self._prepare = prepare
        self._steps = steps
        self._queue: queue.Queue[PreparedStep | Exception] = queue.Queue(maxsize=depth)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="step-prefetch", daemon=True)

    def __enter__(self) -> StepPrefetch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        while not self._queue.empty():
            self._queue.get_nowait()
        self._thread.join()  # at most one more step is put after closing, and for that there is room now

    def __iter__(self) -> Iterator[PreparedStep]:
        for _ in self._steps:
            item = self._queue.get()
            if isinstance(item, Exception):
                raise item
            yield item

    def _run(self) -> None:
        try:
            for index in self._steps:
                if self._closing.is_set():
                    return
                self._queue.put(self._prepare(index))
        except Exception as error:  # carried to the loop's thread, where it belongs
            self._queue.put(error)
