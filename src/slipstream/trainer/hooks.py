"""Side jobs of the loop: five moments, nothing else. A hook is given the parts it needs when it is made.

`step` in `on_start`, `after_step`, `on_checkpoint` and `on_end` is the number of finished updates; in `before_step` it is
the plan's step that comes next, which is the same number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace

from slipstream.observe import Account, MetricLog, StepRecord, step_metrics
from slipstream.trainer.guard import Counters, DivergenceGuard
from slipstream.trainer.worth import DeviceMemory, StepWorths


class Hook:
    """A side job that does nothing. Subclasses override the moments they need."""

    def on_start(self, step: int) -> None:
        """Before the first step of this process, at `step` finished updates (not 0 after a resume)."""

    def before_step(self, step: int) -> None:
        """Before plan step `step`."""

    def after_step(self, step: int, records: Sequence[StepRecord]) -> None:
        """After an update was launched. `records` are the steps that have become readable: usually the one before."""

    def on_checkpoint(self, step: int) -> None:
        """A checkpoint of `step` finished updates has been handed to the writer."""

    def on_end(self, step: int, status: str) -> None:
        """The loop ends in order: `status` is "finished" or "interrupted"."""


class GuardHook(Hook):
    """Counts, and ends a run that does not stay finite. Every rank has one, and all come to the same end."""

    def __init__(self, *, guard: DivergenceGuard, counters: Counters) -> None:
        self._guard = guard
        self._counters = counters

    def after_step(self, step: int, records: Sequence[StepRecord]) -> None:
        """Check what has become readable. Raises `TrainingDiverged`."""
        for record in records:
            self._counters.count(record)
            self._guard.check(record, self._counters)


class MetricsHook(Hook):
    """Hands each step's metrics to the sinks. Rank 0 only; stands before the guard, so that the last bad step is seen.

    `counters` is where the totals start from; they are counted on from there record by record. `worths` know what steps are
    worth, `memory` what is held of the device.
    """

    def __init__(
        self,
        *,
        log: MetricLog,
        counters: Counters,
        facts: Mapping[str, object],
        worths: StepWorths,
        memory: DeviceMemory,
    ) -> None:
        self._log, self._worths, self._memory = log, worths, memory
        self._totals = replace(counters)
        self._facts = dict(facts)

    def on_start(self, step: int) -> None:
        """Mark where this process takes over."""
        self._log.write({"kind": "start", "step": step, **self._facts})

    def after_step(self, step: int, records: Sequence[StepRecord]) -> None:
        """One line for each step that has become readable, with the run's totals up to and including it."""
        for record in records:
            self._totals.count(record)
            line = step_metrics(record, totals=asdict(self._totals), worth=self._worths.of(record.step))
            self._log.write({**line, **self._memory.metrics()})

    def on_checkpoint(self, step: int) -> None:
        """Say that a checkpoint is on its way."""
        self._log.write({"kind": "checkpoint", "step": step})

    def on_end(self, step: int, status: str) -> None:
        """Say how it ended."""
        self._log.write({"kind": "end", "step": step, "status": status, **asdict(self._totals)})


class ValidationHook(Hook):
    """Runs a measurement every so many steps, before the first step of a fresh run, and after the last step.

    `measure(step)` returns metrics by name; "acceptance_length" among them decides which checkpoint is the best one. It
    begins once `finish` has waited for the steps that are still on the device, so that its time is its own. Every rank has
    such a hook, since they measure together, and all come to it at the same steps. `log` is none on ranks that write no
    metrics.
    """

    def __init__(
        self,
        *,
        measure: Callable[[int], Mapping[str, object]],
        log: MetricLog | None,
        every_steps: int,
        num_steps: int,
        account: Account | None = None,
        finish: Callable[[], None] = lambda: None,
    ) -> None:
        self._measure, self._finish = measure, finish
        self._account = account or Account("validation")
        self._log = log
        self._every_steps = every_steps
        self._num_steps = num_steps
        self._latest: tuple[int, Mapping[str, object]] | None = None

    def on_start(self, step: int) -> None:
        """Measure the untrained drafter."""
        if step == 0:
            self._run(step)

    def after_step(self, step: int, records: Sequence[StepRecord]) -> None:
        """Measure when it is due."""
        if step % self._every_steps == 0 or step == self._num_steps:
            self._run(step)

    def acceptance_at(self, step: int) -> float | None:
        """The acceptance length measured with exactly these weights, if there is one."""
        if self._latest is None or self._latest[0] != step:
            return None
        value = self._latest[1].get("acceptance_length")
        return None if value is None else float(str(value))

    def _run(self, step: int) -> None:
        with self._account.state("wait_gpu", step=step):
            self._finish()
        with self._account.state("validate", step=step):
            metrics = self._measure(step)
        self._latest = (step, metrics)
        if self._log is not None:
            self._log.write({"kind": "validation", "step": step, **metrics})
