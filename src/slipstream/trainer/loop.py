"""The training loop: for each step, a pass over this rank's columns, one sum over the ranks, one update, the side jobs.

Waits for: hidden states of the next planned use. Unblocked by: the transport.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Literal, Protocol

import torch

from slipstream.config.recipe import OptimizerSection
from slipstream.device.recorder import Recorder
from slipstream.observe import Account, StepRecord
from slipstream.records import Cursor, HiddenPack, StepResult
from slipstream.trainer.checkpoint import Checkpoint
from slipstream.trainer.column import ColumnPass
from slipstream.trainer.guard import Counters, MetricsRing
from slipstream.trainer.hooks import Hook
from slipstream.trainer.learning_rate import learning_rate
from slipstream.trainer.optim import FlatAdamW
from slipstream.trainer.prefetch import PreparedStep, StepPrefetch
from slipstream.trainer.recorded import RecordedColumns, RecordedEnd
from slipstream.trainer.reduction import GradientSum
from slipstream.trainer.saving import CheckpointWriter
from slipstream.trainer.snapshot import Snapshot
from slipstream.trainer.step_end import StepEnd
from slipstream.trainer.tally import StepTally

PREPARED_STEPS = 2
"""Steps whose batches are built ahead."""


class HiddenSource(Protocol):
    """The consumer end of a transport."""

    def take(self, pack_id: int) -> HiddenPack:
        """The hidden states of a pack; waits for them. The same again while the pack is live."""
        ...

    def release(self, pack_id: int) -> None:
        """The pack's last use is over: its slot is free."""
        ...


class Metrics(Protocol):
    """The results of steps on their way to the host: `guard.MetricsRing` on a CPU, `late_metrics.LateMetrics` on a GPU."""

    @property
    def is_late(self) -> bool:
        """Whether results arrive by themselves, so that the loop must not ask for all of them before the end."""
        ...

    def begin(self) -> None:
        """A step is about to be launched."""
        ...

    def push(self, result: StepResult, *, epoch: int, seconds: float) -> None:
        """Take in what a step computed."""
        ...

    def drain(self, *, all_of_it: bool = False) -> Sequence[StepRecord]:
        """Records that can be read, in order; `all_of_it` waits for the rest."""
        ...

    def forget(self) -> None:
        """It was a rehearsal."""
        ...


@dataclass(frozen=True, slots=True)
class FitSeconds:
    """Wall time of `fit` in three parts: what comes before the first step, measurements on this rank, and training."""

    warm_up: float
    train: float
    validate: float


@dataclass(frozen=True, slots=True)
class FitResult:
    """How `fit` ended: updates finished in all (over resumes), and whether it was asked to stop before the last."""

    step: int
    status: Literal["finished", "interrupted"]
    counters: Counters
    seconds: FitSeconds = field(compare=False)


@dataclass(frozen=True, slots=True)
class Saving:
    """What the loop needs to write checkpoints: rank 0 has one, no other rank does. `acceptance_at(step)` may know none."""

    writer: CheckpointWriter
    acceptance_at: Callable[[int], float | None]


class Trainer:
    """Trains one rank's share of the plan. `build.build_trainer` makes one from a recipe."""

    def __init__(
        self,
        *,
        prepare: Callable[[int], PreparedStep],
        num_steps: int,
        start_step: int,
        plan_digest: str,
        block_size: int,
        source: HiddenSource,
        column_pass: ColumnPass,
        optimizer: FlatAdamW,
        section: OptimizerSection,
        checkpoint_every_steps: int,
        saving: Saving | None,
        group: GradientSum | None,
        hooks: Sequence[Hook],
        counters: Counters,
        account: Account,
        metrics: Metrics | None = None,
        snapshot: Snapshot | None = None,
        warm_up: Callable[[Trainer], None] | None = None,
        room: Callable[[], None] | None = None,
    ) -> None:
        self.optimizer, self.source, self.hooks, self.counters = optimizer, source, tuple(hooks), counters
        self.num_steps, self.start_step, self._plan_digest, self._section = num_steps, start_step, plan_digest, section
        self.prepare, self._group, self._account = prepare, group, account
        self._checkpoint_every_steps, self._saving = checkpoint_every_steps, saving
        self._tally = StepTally(optimizer.extra, block_size=block_size)
        self._column_pass: ColumnPass | RecordedColumns = column_pass
        self._end: StepEnd | RecordedEnd = StepEnd(optimizer=optimizer, tally=self._tally)
        self.metrics: Metrics = metrics or MetricsRing()
        self._snapshot, self._warm_up, self._room = snapshot, warm_up, room

    def fit(self, *, stop: Callable[[], bool] = lambda: False) -> FitResult:
        """Train from `start_step` to the end of the plan, or until `stop()`; the state is saved either way.

        A rank alone asks `stop` after every step, and so finishes the one it is in. The ranks of a group ask before every
        step and agree through its reduction, which they read a step late, on a GPU two: all stop together, after the step that
        the question came with and one or two more. Raises `TrainingDiverged`, `CheckpointError`, and whatever the
        transport or a hook raises.
        """
        watch = _Watch(self._account)
        if self._warm_up is not None and self.start_step < self.num_steps:
            with self._account.state("warm_up", whole=True):
                self._warm_up(self)
        with self._account.state("hooks", step=self.start_step):
            for hook in self.hooks:
                hook.on_start(self.start_step)
        watch.training_begins()
        done = self.start_step
        with ExitStack() as stack:
            stack.callback(self._finish_saving)
            steps = range(done, self.num_steps)
            prefetch = StepPrefetch(self.prepare, steps=steps, depth=PREPARED_STEPS, account=self._account, room=self._room)
            for prepared in stack.enter_context(prefetch):
                stopping = self._one_step(prepared, stop=stop)
                done = prepared.index + 1
                if stopping:
                    break
        status: Literal["finished", "interrupted"] = "finished" if done == self.num_steps else "interrupted"
        with self._account.state("hooks", step=done):
            for hook in self.hooks:
                hook.on_end(done, status)
        return FitResult(step=done, status=status, counters=self.counters, seconds=watch.read())

    def _one_step(self, prepared: PreparedStep, *, stop: Callable[[], bool]) -> bool:
        """A step and its side jobs. Returns whether to stop."""
        if self._saving is not None:
            self._saving.writer.check()
        with self._account.state("hooks", step=prepared.index):
            for hook in self.hooks:
                hook.before_step(prepared.index)
        self.launch(prepared, stop_asked=self._group is not None and stop())
        done = prepared.index + 1
        due = done % self._checkpoint_every_steps == 0 or done == self.num_steps
        whole = done == self.num_steps or (due and not self.metrics.is_late)
        records = self._drain(all_of_it=whole, step=prepared.index)
        stopping = stop() if self._group is None else any(record.stop for record in records)
        if stopping:
            records += self._drain(all_of_it=True, step=prepared.index)
        with self._account.state("hooks", step=done):
            for hook in self.hooks:
                hook.after_step(done, records)
        if due or stopping:
            self._checkpoint(done)
        return stopping

    def _drain(self, *, all_of_it: bool, step: int) -> list[StepRecord]:
        """Results that have come. Ranks of a group and the last step wait for theirs."""
        waits = self.metrics.is_late and (all_of_it or self._group is not None)
        with self._account.state("wait_gpu" if waits else "hooks", step=step):
            return list(self.metrics.drain(all_of_it=all_of_it))

    def launch(self, prepared: PreparedStep, *, stop_asked: bool = False) -> None:
        """A step and its figures; no side jobs."""
        began = time.perf_counter()
        self.metrics.begin()
        result = self.train_step(prepared, stop_asked=stop_asked)
        self.metrics.push(result, epoch=prepared.epoch, seconds=time.perf_counter() - began)

    def rehearse(self, prepared: PreparedStep, *, source: HiddenSource) -> None:
        """A step as any other, except that it changes nothing: not weights, moments nor counts."""
        self.metrics.begin()
        result = self._train_step(prepared, source=source, stop_asked=False, rehearsal=True)
        self.metrics.push(result, epoch=prepared.epoch, seconds=0.0)
        self.metrics.forget()

    def train_step(self, prepared: PreparedStep, *, stop_asked: bool = False) -> StepResult:
        """Gradients of all columns of all ranks, then one update."""
        return self._train_step(prepared, source=self.source, stop_asked=stop_asked, rehearsal=False)

    def _train_step(self, prepared: PreparedStep, *, source: HiddenSource, stop_asked: bool, rehearsal: bool) -> StepResult:
        optimizer, tally, account = self.optimizer, self._tally, self._account
        optimizer.zero_grad()
        if stop_asked:
            tally.ask_to_stop()
        for number, column in enumerate(prepared.columns, start=1):
            with account.state("wait_input", pack=column.use.pack_id, step=prepared.index):
                hidden = source.take(column.use.pack_id)
            if self._group is not None and number == len(prepared.columns):
                self._group.begin_last()
            self._column_pass(hidden, column, denominator=prepared.denominator, tally=tally)
            if column.use.is_last:
                source.release(column.use.pack_id)
        if self._group is not None:
            with account.state("wait_peer", step=prepared.index):
                self._group.finish()
        rate = learning_rate(step=prepared.index, num_steps=self.num_steps, optimizer=self._section)
        with account.state("optimizer", step=prepared.index):
            if self._snapshot is not None:
                self._snapshot.before_update()
            return self._end(step=prepared.index, learning_rate=rate, rehearsal=rehearsal)

    def record(self, recorder: Recorder, *, hidden_TKD: torch.Tensor, several: bool) -> None:
        """From here on steps are replayed, with the same results. In warm-up; `several` columns a step, packs like this one."""
        assert isinstance(self._column_pass, ColumnPass), "steps are recorded once"
        assert isinstance(self._end, StepEnd)
        columns = RecordedColumns(
            self._column_pass,
            hidden_TKD=hidden_TKD,
            optimizer=self.optimizer,
            tally=self._tally,
            recorder=recorder,
            several=several,
        )
        self._end = RecordedEnd(self._end, recorder=recorder, unreached=columns.unreached)
        self._column_pass = columns

    @property
    def can_record(self) -> bool:
        """Whether its columns are staged and its objective comes in parts."""
        return isinstance(self._column_pass, ColumnPass) and None not in (self._column_pass.placing, self._column_pass.parts)

    def _checkpoint(self, done: int) -> None:
        if self._saving is None:
            return
        writer, cursor = self._saving.writer, Cursor(step=done, plan_digest=self._plan_digest)
        acceptance = self._saving.acceptance_at(done)
        self._wait_for_disk(writer, step=done)  # it may still hold the snapshot's memory
        with self._account.state("checkpoint", step=done):
            if self._snapshot is None:
                counters, state = asdict(self.counters), self.optimizer.state()
                writer.save(Checkpoint(cursor=cursor, state=state, counters=counters, acceptance_length=acceptance))
            else:
                writer.save(self._snapshot.take(cursor=cursor, acceptance_length=acceptance))
        for hook in self.hooks:
            hook.on_checkpoint(done)

    def _wait_for_disk(self, writer: CheckpointWriter, *, step: int | None = None) -> None:
        with self._account.state("wait_disk", step=step):
            writer.wait()

    def _finish_saving(self) -> None:
        if self._saving is not None:
            self._wait_for_disk(self._saving.writer)


class _Watch:
    """Splits the time of `fit`; measurements are what the account charged to their state."""

    def __init__(self, account: Account) -> None:
        self._account = account
        self._began = self._trained_from = self._read()

    def training_begins(self) -> None:
        self._trained_from = self._read()

    def read(self) -> FitSeconds:
        (began, measured), (from_here, measured_first), (now, measured_in_all) = self._began, self._trained_from, self._read()
        return FitSeconds(
            warm_up=from_here - began - (measured_first - measured),
            train=now - from_here - (measured_in_all - measured_first),
            validate=measured_in_all - measured,
        )

    def _read(self) -> tuple[float, float]:
        """Seconds of the account in all, and in measurements."""
        wall, states = self._account.read()
        return wall / 1e9, states.get("validate", 0) / 1e9
