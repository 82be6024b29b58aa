"""Results of steps on a GPU, read when they have arrived; ranks of a group wait for those of two steps before.

A step's figures are copied to a page-locked slot on a side stream, so that the next step does not queue behind the copy;
`drain` reads the slots whose event has been reached. The run's counts are kept on the device too and travel with every
step's figures, so that a step whose figures had to be dropped is still counted, and the guard sees every skipped one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, fields

import torch
from torch import Tensor

from slipstream.records import StepResult
from slipstream.trainer.guard import SCALARS, CountedRecord, Counters, record_fields
from slipstream.trainer.lanes import Lanes

RING_SLOTS = 16
"""Steps whose figures may be under way; the loop runs ahead by fewer, so that none is dropped unless it is stopped hard."""

GROUP_LAG_STEPS = 2
"""How late the ranks of a group read a step: all at the same step, or they would not stop together."""

COUNTS = tuple(field.name for field in fields(Counters))


class _Slot:
    """One step's figures: fp64 on the device and on the host. `began` and `ended` are the step's, `arrived` the copy's."""

    def __init__(self, lanes: Lanes, width: int) -> None:
        self.computed = lanes.buffer(8 * width).view(torch.float64)
        self.values = lanes.pinned(8 * width).view(torch.float64)
        self.began, self.ended = lanes.timed_event(), lanes.timed_event()
        self.arrived = lanes.event()
        self.step = self.epoch = 0
        self.learning_rate = 0.0

    def fill(self, *parts: Tensor) -> None:
        """Put figures down on the device."""
        torch.cat(parts, out=self.computed)


class LateMetrics:
    """A ring of results on their way to the host. `begin` before a step is launched, `push` after it, `drain` whenever.

    Alone (`together` false), `drain` returns what has arrived; when the ring is full the oldest is dropped and counted in
    `dropped`. With `together`, it returns exactly the steps that are `GROUP_LAG_STEPS` old, waiting for them if it must.
    """

    is_late = True

    def __init__(
        self,
        lanes: Lanes,
        *,
        block_size: int,
        counters: Counters,
        device: torch.device,
        together: bool,
        slots: int = RING_SLOTS,
    ) -> None:
        width = len(SCALARS) + 2 * block_size + len(COUNTS)
        self._lanes, self._side, self._together = lanes, lanes.side("metrics"), together
        self._slots = [_Slot(lanes, width) for _ in range(slots)]
        self._pending: deque[_Slot] = deque()
        self._begun = 0
        self.dropped = 0
        start = torch.tensor([float(value) for value in asdict(counters).values()], dtype=torch.float64)
        self._start = start.to(device)
        self.totals = self._start.clone()
        """The run's counts up to the last step that was pushed: fp64 on the device, in the order of `COUNTS`."""

    def begin(self) -> None:
        """A step is about to be launched."""
        if len(self._pending) == len(self._slots):
            self._pending.popleft()  # overwritten in the order of the side stream: its copy runs before its successor's
            self.dropped += 1
        self._lanes.mark(self._slots[self._begun % len(self._slots)].began)

    @torch.no_grad()
    def push(self, result: StepResult, *, epoch: int, seconds: float) -> None:
        """Take a step's result in; reads nothing from the device. `seconds`, the time to launch it, says nothing here."""
        slot = self._slots[self._begun % len(self._slots)]
        self._begun += 1
        scalars = torch.stack([getattr(result, name).to(torch.float32) for name in SCALARS])
        figures = torch.cat([scalars, result.hits_per_slot, result.supervised_per_slot]).to(torch.float64)
        self._count(dict(zip(SCALARS, figures[: len(SCALARS)].unbind(), strict=True)), supervised=result.supervised_per_slot)
        self._lanes.hold(slot.arrived)  # reached long ago, unless the ring is full
        slot.fill(figures, self.totals)
        self._lanes.mark(slot.ended)
        self._lanes.copy([(slot.values, slot.computed)], on=self._side, after=slot.ended, then=[slot.arrived])
        slot.step, slot.epoch, slot.learning_rate = result.step, epoch, result.learning_rate
        self._pending.append(slot)

    def drain(self, *, all_of_it: bool = False) -> list[CountedRecord]:
        """Records in the order of steps; with `all_of_it`, waits for every step that was pushed."""
        records = []
        keep = GROUP_LAG_STEPS if self._together and not all_of_it else 0
        while len(self._pending) > keep and self._may_read(self._pending[0], wait=all_of_it):
            records.append(_read(self._pending.popleft()))
        return records

    def forget(self) -> None:
        """Drop what was pushed so far and take the counts back to where they began: it was a rehearsal."""
        self._pending.clear()
        self.totals.copy_(self._start)

    def _may_read(self, slot: _Slot, *, wait: bool) -> bool:
        if slot.arrived.query():
            return True
        if wait or self._together:
            slot.arrived.synchronize()
            return True
        return False

    def _count(self, named: Mapping[str, Tensor], *, supervised: Tensor) -> None:
        skipped = (named["finite"] == 0).to(torch.float64)
        step = {
            "skipped_steps": skipped,
            "bad_in_a_row": skipped,
            "unsupervised_steps": (supervised.sum() == 0).to(torch.float64),
        }
        self.totals.add_(torch.stack([step[name] if name in step else named[name] for name in COUNTS]))
        self.totals[COUNTS.index("bad_in_a_row")].mul_(skipped)


def counts_on_host(values: Tensor) -> dict[str, int]:
    """Counts by name from a copy of `LateMetrics.totals` that has arrived on the host."""
    return {name: int(value) for name, value in zip(COUNTS, values.tolist(), strict=True)}


def _read(slot: _Slot) -> CountedRecord:
    values, totals = slot.values[: -len(COUNTS)], slot.values[-len(COUNTS) :]
    named = record_fields(
        step=slot.step,
        epoch=slot.epoch,
        learning_rate=slot.learning_rate,
        seconds=slot.began.elapsed_time(slot.ended) / 1e3,
        values=values.tolist(),
    )
    return CountedRecord(**named, totals=counts_on_host(totals))
