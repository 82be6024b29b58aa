"""One host: from a recipe to a trained drafter, with processes that are started here and nowhere else.

Preflight → schedule → answers to the validation prompts → memory and broker → children → the end, in order.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from slipstream.config import Recipe, dump_recipe, make_recipe
from slipstream.device.limits import available_memory
from slipstream.device.shared import SharedMemory
from slipstream.device.threads import share_threads
from slipstream.errors import CheckpointError, Interrupted, PlanError, WorkerFailed
from slipstream.launch.planning import RunPlan, open_run_plan, slot_layout, write_schedule
from slipstream.launch.preflight import Preflight
from slipstream.launch.processes import Child, start_child
from slipstream.launch.runbook import RunBook
from slipstream.launch.supervisor import Supervisor
from slipstream.plan import plan_memory
from slipstream.trainer.checkpoint import latest, read_cursor
from slipstream.transport.broker import Broker
from slipstream.transport.connections import connection_pair

GIB = 2**30
Report = Callable[[str, str, Any], None]
VERSIONS_OF = ("slipstream", "torch", "transformers", "datasets", "numpy", "safetensors")


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a run ended. `train_seconds` is wall time of this start from the first step on; `validations` as measured."""

    folder: Path
    steps: int
    train_seconds: float
    checkpoint: Path
    summary: dict[str, Any]
    validations: list[dict[str, Any]] = field(default_factory=list)


def train_run(*, flight: Preflight, given: str | None = None, on_report: Report | None = None) -> RunResult:
    """Train as the recipe says and return where the result lies.

    `given` is the recipe file's own text, kept beside the resolved one. `on_report(worker, kind, payload)` hears every report
    of every worker. A flight with `resume` goes on from the run's newest checkpoint.
    """
    recipe, folder = flight.recipe, flight.folder
    if flight.resume:
        _check_same_recipe(recipe=recipe, saved=folder.recipe)
    folder.create()
    folder.recipe.write_text(dump_recipe(recipe))
    if given is not None:
        folder.recipe_given.write_text(given)
    _record_environment(folder.environment)
    book = RunBook(folder=folder, recipe=recipe, on_report=on_report)
    book.state("starting")
    try:
        return _Run(flight=flight, book=book).run()
    except Interrupted as error:
        book.state("interrupted", cause=str(error))
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
    book: RunBook
    memories: list[SharedMemory] = field(default_factory=list)
    broker: Broker | None = None
    checkpoint: Path | None = None

    def run(self) -> RunResult:
        recipe, folder = self.flight.recipe, self.flight.folder
        schedule = write_schedule(recipe=recipe, folder=folder)
        self._check_memory(slots_per_column=schedule.slots_per_column, validation_slots=0)
        start_step = 0
        if self.flight.resume:
            self.checkpoint = latest(folder.checkpoints)
            if self.checkpoint is not None:
                start_step = _cursor_step(self.checkpoint, digest=schedule.digest)
        self.book.begin(start_step=start_step, num_steps=schedule.num_steps)
        self._answer_validation_prompts()
        plan = open_run_plan(recipe=recipe, folder=folder, ranks=recipe.placement.drafter_ranks, start_step=start_step)
        self._check_memory(slots_per_column=schedule.slots_per_column, validation_slots=len(plan.validation))
        began = time.monotonic()
        with ExitStack() as stack:
            rendezvous = folder.root / f".rendezvous-{uuid.uuid4().hex}"
            stack.callback(rendezvous.unlink, missing_ok=True)
            stack.callback(self._close_memories)
            summary = self._supervise(plan=plan, rendezvous=rendezvous)
        if "checkpoint" not in summary:
            raise WorkerFailed("the drafter ended without naming its last checkpoint")
        self.book.state("finished", step=schedule.num_steps)
        return RunResult(
            folder=folder.root,
            steps=schedule.num_steps,
            train_seconds=float(summary.get("train_seconds", time.monotonic() - began)),
            checkpoint=Path(summary["checkpoint"]),
            summary=summary,
            validations=self.book.validations,
        )

    def _supervise(self, *, plan: RunPlan, rendezvous: Path) -> dict[str, Any]:
        split = self.flight.placement.mode == "split"
        recipe = self.flight.recipe
        if split:
            self._make_memories(plan)
            self.broker = Broker(order=plan.orders(), slot_bytes=self._layout().nbytes)
            self.broker.start()
        job = self._job(plan=plan, rendezvous=rendezvous)
        try:
            drafters = [self._start_drafter(rank=rank, job=job, split=split) for rank in range(plan.ranks)]
            supervisor = Supervisor(
                drafters=drafters,
                starter=_TargetStarter(run=self, job=job) if split else None,
                num_targets=recipe.placement.target_workers if split else 0,
                max_restarts=recipe.placement.max_restarts,
                ready_seconds=recipe.placement.ready_seconds,
                on_report=self.book.take,
                close_broker=self._close_broker,
            )
            return supervisor.run()
        finally:
            self._close_broker("")

    def _start_drafter(self, *, rank: int, job: Mapping[str, Any], split: bool) -> Child:
        descriptors: dict[str, int] = {}
        if split:
            assert self.broker is not None
            ours, theirs = connection_pair()
            descriptors = {"transport": theirs.fileno(), "memory": self.memories[rank].fd}
        name = f"drafter-{rank}" if split else f"worker-{rank}"
        child = start_child(
            name=name,
            job={**job, "role": "drafter" if split else "colocated", "rank": rank},
            descriptors=descriptors,
            log=self.flight.folder.logs / f"{name}.log",
            threads=self.threads(role="drafter"),
            environment=self.environment(role="drafter", index=rank),
        )
        if split:
            assert self.broker is not None
            theirs.close()
            self.broker.attach_consumer(name, rank, ours)
        return child

    def _answer_validation_prompts(self) -> None:
        """Have the target answer the validation prompts, in a process that ends with its memory given back."""
        folder = self.flight.folder
        if self.flight.recipe.validation.prompts is None or (folder.validation / "answers.jsonl").is_file():
            return
        folder.validation.mkdir(exist_ok=True)
        child = start_child(
            name="answers",
            job={"role": "answers", **self._shared_job()},
            descriptors={},
            log=folder.logs / "answers.log",
            threads=os.cpu_count() or 1,
            environment=self.environment(role="target", index=0),
        )
        supervisor = Supervisor(
            drafters=[child],
            starter=None,
            num_targets=0,
            max_restarts=0,
            ready_seconds=self.flight.recipe.placement.ready_seconds,
            on_report=self.book.take,
            close_broker=lambda cause: None,
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
        self.memories = [SharedMemory.create(self._layout().nbytes * plan.num_slots(rank)) for rank in range(plan.ranks)]

    def _close_memories(self) -> None:
        for memory in self.memories:
            memory.close()

    def _close_broker(self, cause: str) -> None:
        if self.broker is not None:
            self.broker.close(reason=cause or "the run is over")

    def _check_memory(self, *, slots_per_column: int, validation_slots: int) -> None:
        """Refuse a run that cannot fit, before any weight loads."""
        flight = self.flight
        memory = plan_memory(
            recipe=flight.recipe,
            info=flight.info,
            shape=flight.shape,
            schedule_slots_per_column=slots_per_column,
            validation_slots=validation_slots,
            device=flight.device,
        )
        memory.check_host_slots()
        if flight.device == "cpu":
            memory.check_machine(placement=flight.placement.mode, memory_bytes=available_memory())

    def threads(self, *, role: str) -> int:
        """CPU threads of one process of a role: as the recipe says, else the cores shared out evenly."""
        section = self.flight.recipe.placement
        share = share_threads(
            target_workers=section.target_workers if self.flight.placement.mode == "split" else 0,
            drafter_ranks=section.drafter_ranks,
            target_threads=section.target_threads,
            drafter_threads=section.drafter_threads,
        )
        return share.target if role == "target" else share.drafter

    def environment(self, *, role: str, index: int) -> dict[str, str]:
        """The GPU of a process, by `CUDA_VISIBLE_DEVICES`, and the interface that ranks on one host meet on."""
        if self.flight.device == "cpu":
            return {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
        processes = [p for p in self.flight.placement.processes if p.role in (role, "colocated")]
        gpu = processes[index].gpu
        assert gpu is not None
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return {"CUDA_VISIBLE_DEVICES": visible.split(",")[gpu].strip() if visible else str(gpu)}


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
            job={**self.job, "role": "target", "rank": index, "attempt": attempt},
            descriptors={"transport": theirs.fileno(), **memories},
            log=self.run.flight.folder.logs / f"{name}.log",
            threads=self.run.threads(role="target"),
            environment=self.run.environment(role="target", index=index),
        )
        theirs.close()
        self.names[index] = f"{name}.{attempt}"
        self.run.broker.attach_producer(self.names[index], ours)
        return child

    def detach(self, index: int, cause: str) -> None:
        assert self.run.broker is not None
        self.run.broker.detach_producer(self.names[index])


def _check_same_recipe(*, recipe: Recipe, saved: Path) -> None:
    """A resumed run keeps every key that its result depends on; placement, observation and checkpoints may change."""
    import tomllib

    before = make_recipe(tomllib.loads(saved.read_text())).model_dump()
    now = recipe.model_dump()
    for section in ("target", "corpus", "plan", "drafter", "objective", "optimizer"):
        for key, value in now[section].items():
            if value != before[section][key]:
                raise CheckpointError(
                    key=f"{section}.{key}",
                    value=value,
                    rule=f"the run to resume was started with {before[section][key]}",
                    hint="resume with the run's own recipe, or start a new run under another name",
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


def _record_environment(path: Path) -> None:
    """Append what this start ran on."""
    versions: dict[str, str | None] = {}
    for name in VERSIONS_OF:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    row = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "disk_free_bytes": shutil.disk_usage(path.parent).free,
        "versions": versions,
    }
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
