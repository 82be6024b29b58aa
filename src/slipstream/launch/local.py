"""One host: from a recipe to a trained drafter, with processes that are started here and nowhere else.

Preflight → schedule → answers to the validation prompts → memory and broker → children → the end, in order.
"""

from __future__ import annotations

import logging
import shutil
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.config import dump_recipe
from slipstream.device.limits import available_cores
from slipstream.device.numa import prefer_node
from slipstream.device.shared import SharedMemory
from slipstream.errors import Interrupted, PlanError, PreflightError, WorkerFailed
from slipstream.launch.ending import closing_verdict
from slipstream.launch.environment import record_environment
from slipstream.launch.forecast import forecast_of_run, refill_of, workload
from slipstream.launch.handle import RunHandle
from slipstream.launch.lock import RunLock
from slipstream.launch.planning import RunPlan, open_run_plan, slot_layout, write_schedule
from slipstream.launch.prediction import write_memory
from slipstream.launch.preflight import Preflight, check_run_folder
from slipstream.launch.processes import Child, end_all, start_child
from slipstream.launch.resources import Resources
from slipstream.launch.resume import check_same_recipe, finished_steps
from slipstream.launch.runbook import RunBook
from slipstream.launch.sampling import sampled_gpus, sampled_queues
from slipstream.launch.signals import sigterm_raises
from slipstream.launch.stage_costs import Subject, known_costs
from slipstream.launch.supervisor import Supervisor, stopped_outside
from slipstream.plan import Schedule
from slipstream.report.verdict import Verdict
from slipstream.trainer.checkpoint import latest, read_cursor
from slipstream.transport.broker import Broker
from slipstream.transport.connections import connection_pair
from slipstream.transport.stats import Silence

Report = Callable[[str, str, Any], None]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a run ended. Of this start: `warm_up_seconds` before the first step, `validate_seconds` of all measurements, and
    `train_seconds`, which is the rest; `validations` as measured."""

    folder: Path
    steps: int
    warm_up_seconds: float
    train_seconds: float
    validate_seconds: float
    checkpoint: Path
    summary: dict[str, Any]
    validations: list[dict[str, Any]] = field(default_factory=list)
    verdict: Verdict | None = None


def train_run(*, flight: Preflight, given: str | None = None, on_report: Report | None = None) -> RunResult:
    """Train as the recipe says and return where the result lies.

    `given` is the recipe file's own text, kept beside the resolved one. `on_report(worker, kind, payload)` hears every report
    of every worker. A flight with `resume` goes on from the run's newest checkpoint. Raises `CheckpointError` when its recipe
    is not the run's, `PreflightError` when the run has finished or another process is training it.
    """
    recipe, folder = flight.recipe, flight.folder
    folder.root.mkdir(parents=True, exist_ok=True)
    with RunLock(folder) as lock, sigterm_raises(stopped_outside):
        check_run_folder(folder=folder, resume=flight.resume)  # again: another start may have come between
        if flight.resume:
            _check_resume(flight)
        folder.create()
        RunHandle.of_this_process().write(folder)
        book = RunBook(folder=folder, recipe=recipe, on_report=on_report)
        book.state("starting")
        try:
            resources = Resources.of(flight)
            with sampled_gpus(flight):
                return _Run(flight=flight, given=given, book=book, lock=lock, resources=resources).run()
        except (Interrupted, KeyboardInterrupt) as error:
            book.state("interrupted", cause=str(error) or type(error).__name__)
            raise
        except BaseException as error:
            book.state("failed", cause=str(error) or type(error).__name__)
            raise
        finally:
            book.close()


@dataclass(slots=True)
class _Run:
    """One start of a run: what its processes share, and how they are started."""

    flight: Preflight
    given: str | None
    book: RunBook
    lock: RunLock
    resources: Resources
    memories: list[SharedMemory] = field(default_factory=list)
    broker: Broker | None = None
    checkpoint: Path | None = None

    def run(self) -> RunResult:
        recipe, folder = self.flight.recipe, self.flight.folder
        schedule = self._plan()
        start_step = self._start_step(schedule)
        self._record_start()
        self.book.begin(start_step=start_step, num_steps=schedule.num_steps)
        self._answer_validation_prompts()
        plan = open_run_plan(recipe=recipe, folder=folder, ranks=recipe.placement.drafter_ranks, start_step=start_step)
        self._plan_memory(schedule, validation_slots=len(plan.validation))
        self._forecast(schedule, start_step=start_step)
        with ExitStack() as stack:
            rendezvous = folder.root / f".rendezvous-{uuid.uuid4().hex}"
            stack.callback(rendezvous.unlink, missing_ok=True)
            stack.callback(self._close_memories)
            summary = self._supervise(plan=plan, rendezvous=rendezvous)
        if "checkpoint" not in summary:
            raise WorkerFailed("the drafter ended without naming its last checkpoint")
        verdict = closing_verdict(folder.root)
        if verdict is not None:
            self.book.conclude(verdict)
        self.book.state("finished", step=schedule.num_steps)
        return RunResult(
            folder=folder.root,
            steps=schedule.num_steps,
            warm_up_seconds=float(summary["warm_up_seconds"]),
            train_seconds=float(summary["train_seconds"]),
            validate_seconds=float(summary["validate_seconds"]),
            checkpoint=Path(summary["checkpoint"]),
            summary=summary,
            validations=self.book.validations,
            verdict=verdict,
        )

    def _forecast(self, schedule: Schedule, *, start_step: int) -> None:
        """Put down how fast the run is predicted to be, where stage costs are known, and what a resume makes again first:
        the replayed packs that are alive at its step.
        """
        flight, gpus = self.flight, self.resources.gpus
        subject = Subject.of(recipe=flight.recipe, info=flight.info, shape=flight.shape, device=flight.device, gpus=gpus)
        costs, work = known_costs(subject), workload(flight.recipe, num_steps=schedule.num_steps)
        forecast_of_run(flight.folder.prediction, costs=costs, placement=flight.placement, work=work)
        if packs := len(schedule.live_packs(start_step)):
            self.book.refill(packs=packs, seconds=refill_of(packs, costs=costs, placement=flight.placement))

    def _plan(self) -> Schedule:
        """The schedule, on disk. What a start that was refused left there belongs to no run and goes first."""
        recipe, folder = self.flight.recipe, self.flight.folder
        if not self.flight.resume:
            shutil.rmtree(folder.schedule, ignore_errors=True)
        schedule = write_schedule(recipe=recipe, folder=folder)
        self._plan_memory(schedule, validation_slots=0)
        return schedule

    def _plan_memory(self, schedule: Schedule, *, validation_slots: int) -> None:
        """Refuse a run that cannot fit, before any weight loads; put down what one that fits is to take."""
        memory = self.resources.plan_memory(slots_per_column=schedule.slots_per_column, validation_slots=validation_slots)
        self.resources.check_memory(memory)
        write_memory(self.flight.folder.prediction, plan=memory, placement=self.flight.placement)

    def _start_step(self, schedule: Schedule) -> int:
        if not self.flight.resume:
            return 0
        self.checkpoint = latest(self.flight.folder.checkpoints)
        if self.checkpoint is None:
            log.warning("%s has no checkpoint yet: it starts again at step 0", self.flight.folder.root.name)
            return 0
        return _cursor_step(self.checkpoint, digest=schedule.digest)

    def _record_start(self) -> None:
        """Only a run that can be planned and held in memory is put down as one: until here, its name stays free."""
        folder = self.flight.folder
        folder.recipe.write_text(dump_recipe(self.flight.recipe))
        if self.given is not None:
            folder.recipe_given.write_text(self.given)
        record_environment(folder.environment, resources=self.resources)

    def _supervise(self, *, plan: RunPlan, rendezvous: Path) -> dict[str, Any]:
        split = self.flight.placement.mode == "split"
        recipe = self.flight.recipe
        if split:
            self._make_memories(plan)
            self.broker = Broker(order=plan.orders(), slot_bytes=self._layout().nbytes)
            self.broker.start()
        job = self._job(plan=plan, rendezvous=rendezvous)
        drafters: list[Child] = []
        try:
            for rank in range(plan.ranks):
                drafters.append(self._start_drafter(rank=rank, job=job, split=split))
            supervisor = Supervisor(
                drafters=drafters,
                starter=_TargetStarter(run=self, job=job) if split else None,
                num_targets=recipe.placement.target_workers if split else 0,
                max_restarts=recipe.placement.max_restarts,
                ready_seconds=recipe.placement.ready_seconds,
                stall_seconds=recipe.placement.stall_seconds,
                on_report=self.book.take,
                close_broker=self._close_broker,
            )
            slot_bytes = self._layout().nbytes
            with sampled_queues(self.broker, book=self.book, plan=plan, slot_bytes=slot_bytes):
                return supervisor.run()
        except BaseException:
            end_all(drafters, grace_seconds=0)  # of those that the supervisor had not come to own yet
            raise
        finally:
            self._close_broker("the run is over", None)

    def _start_drafter(self, *, rank: int, job: Mapping[str, Any], split: bool) -> Child:
        descriptors = {"lock": self.lock.fd}
        if split:
            assert self.broker is not None
            ours, theirs = connection_pair()
            descriptors |= {"transport": theirs.fileno(), "memory": self.memories[rank].fd}
        name = f"drafter-{rank}" if split else f"worker-{rank}"
        child = start_child(
            name=name,
            job={
                **job,
                "role": "drafter" if split else "colocated",
                "rank": rank,
                "gpu": self.gpu(role="drafter", index=rank),
                "binding": self.resources.job_binding(role="drafter", index=rank),
            },
            descriptors=descriptors,
            log=self.flight.folder.logs / f"{name}.log",
            threads=self.resources.threads(role="drafter", index=rank),
            environment=self.resources.environment(role="drafter", index=rank),
        )
        if split:
            assert self.broker is not None
            theirs.close()
            self.broker.attach_consumer(name, rank, ours)
        return child

    def _answer_validation_prompts(self) -> None:
        """Have the target answer the validation prompts, in a process that ends with its memory given back."""
        folder = self.flight.folder
        if self.flight.recipe.validation.prompts is None:
            return
        folder.validation.mkdir(exist_ok=True)
        child = start_child(
            name="answers",
            job={
                "role": "answers",
                "gpu": self.gpu(role="target", index=0),
                "binding": self.resources.job_binding(role="target", index=0),
                **self._shared_job(),
            },
            descriptors={"lock": self.lock.fd},
            log=folder.logs / "answers.log",
            threads=available_cores(),
            environment=self.resources.environment(role="target", index=0),
        )
        supervisor = Supervisor(
            drafters=[child],
            starter=None,
            num_targets=0,
            max_restarts=0,
            ready_seconds=self.flight.recipe.placement.ready_seconds,
            stall_seconds=self.flight.recipe.placement.stall_seconds,
            on_report=self.book.take,
            close_broker=lambda reason, lost: None,
        )
        supervisor.run()

    def _shared_job(self) -> dict[str, Any]:
        return {
            "recipe": self.flight.recipe.model_dump(mode="json"),
            "folder": str(self.flight.folder.root),
            "device": self.flight.device,
        }

    def _job(self, *, plan: RunPlan, rendezvous: Path) -> dict[str, Any]:
        return {
            **self._shared_job(),
            "ranks": plan.ranks,
            "start_step": plan.start_step,
            "checkpoint": str(self.checkpoint) if self.checkpoint else None,
            "rendezvous": str(rendezvous),
            "pool_slots": [plan.num_slots(rank) for rank in range(plan.ranks)],
        }

    def _layout(self) -> Any:
        return slot_layout(recipe=self.flight.recipe, shape=self.flight.shape, info=self.flight.info)

    def _make_memories(self, plan: RunPlan) -> None:
        """A pool for each drafter rank, its pages to be next to the rank's GPU whoever touches them first."""
        self.memories = [SharedMemory.create(self._layout().nbytes * plan.num_slots(rank)) for rank in range(plan.ranks)]
        for rank, memory in enumerate(self.memories):
            binding = self.resources.binding(role="drafter", index=rank)
            refused = None if binding is None else prefer_node(memory.mapping, binding.node)
            if refused is not None:
                log.warning("slots of drafter rank %d lie where they are touched first: mbind: %s", rank, refused)

    def _close_memories(self) -> None:
        for memory in self.memories:
            memory.close()

    def _close_broker(self, reason: str, lost: str | None) -> None:
        if self.broker is not None:
            self.broker.close(reason=reason, lost=lost)

    def gpu(self, *, role: str, index: int) -> int | None:
        """The GPU of a process of a role, by its index among the visible ones; none on a CPU."""
        processes = [p for p in self.flight.placement.processes if p.role in (role, "colocated")]
        return processes[index].gpu


@dataclass(slots=True)
class _TargetStarter:
    """Starts target workers and tells the broker who they are."""

    run: _Run
    job: Mapping[str, Any]
    names: dict[int, str] = field(default_factory=dict)

    def start(self, index: int, attempt: int) -> Child:
        assert self.run.broker is not None
        ours, theirs = connection_pair()
        name = f"target-{index}"
        memories = {f"memory-{rank}": memory.fd for rank, memory in enumerate(self.run.memories)}
        child = start_child(
            name=name,
            job={
                **self.job,
                "role": "target",
                "rank": index,
                "attempt": attempt,
                "gpu": self.run.gpu(role="target", index=index),
                "binding": self.run.resources.job_binding(role="target", index=index),
            },
            descriptors={"lock": self.run.lock.fd, "transport": theirs.fileno(), **memories},
            log=self.run.flight.folder.logs / f"{name}.log",
            threads=self.run.resources.threads(role="target", index=index),
            environment=self.run.resources.environment(role="target", index=index),
        )
        theirs.close()
        self.names[index] = f"{name}.{attempt}"
        self.run.broker.attach_producer(self.names[index], ours)
        return child

    def detach(self, index: int, cause: str) -> None:
        assert self.run.broker is not None
        self.run.broker.detach_producer(self.names[index])

    def silence(self, index: int) -> Silence | None:
        assert self.run.broker is not None
        return self.run.broker.silence(self.names[index])


def _check_resume(flight: Preflight) -> None:
    check_same_recipe(recipe=flight.recipe, saved=flight.folder.recipe)
    steps = finished_steps(flight.folder)
    if steps is not None:
        raise PreflightError(
            key="resume",
            value=flight.folder.root.name,
            rule=f"all {steps} steps of this run are done",
            hint=f"slipstream export {flight.folder.root} --out DIR",
        )


def _cursor_step(checkpoint: Path, *, digest: str) -> int:
    cursor = read_cursor(checkpoint)
    if cursor.plan_digest != digest:
        raise PlanError(
            key="resume",
            value=str(checkpoint),
            rule=f"belongs to the plan {cursor.plan_digest[:12]}, this recipe and corpus give {digest[:12]}",
            hint="the corpus or a key of [plan] or drafter.block_size changed since",
        )
    return cursor.step
