"""From a recipe and the parts that launch hands over to a trainer that only needs `fit()`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slipstream.config.drafter_shape import DrafterShape
from slipstream.config.recipe import Recipe
from slipstream.drafter import DFlashDrafter, make_block_batch, noise_std
from slipstream.drafter.noise import add_noise
from slipstream.objective import BlockLossParts, planned_denominator
from slipstream.observe import Account, MetricLog
from slipstream.records import BlockBatch, Pack, Step, Use
from slipstream.trainer.checkpoint import CheckpointIdentity, read_checkpoint
from slipstream.trainer.column import ColumnPass, FrozenEnds
from slipstream.trainer.engine import Engine, EngineParts
from slipstream.trainer.guard import Counters, DivergenceGuard
from slipstream.trainer.hooks import GuardHook, Hook, MetricsHook, ValidationHook
from slipstream.trainer.lanes import CudaLanes, Lanes
from slipstream.trainer.late_work import CudaWork, WorkCounter
from slipstream.trainer.loop import HiddenSource, Saving, Trainer
from slipstream.trainer.optim import FlatAdamW
from slipstream.trainer.prefetch import Planner, PreparedStep, prepare_step
from slipstream.trainer.ranks import ColumnShare, RankGroup
from slipstream.trainer.reduction import GradientSum
from slipstream.trainer.saving import CheckpointWriter
from slipstream.trainer.tally import StepTally
from slipstream.trainer.worth import DeviceMemory, GpuWork, StepWorths


class ScheduleFacts(Protocol):
    """What the trainer must know of a schedule beside its steps."""

    @property
    def num_steps(self) -> int: ...
    @property
    def num_columns(self) -> int: ...
    @property
    def digest(self) -> str: ...
    @property
    def mixing(self) -> Sequence[float] | npt.NDArray[np.float32]: ...


@dataclass(frozen=True, slots=True)
class RunParts:
    """What every rank hands over. `ends` are in the drafter's type and place; `group` is none for a rank alone.

    `drafter` holds the initial weights; the trainer takes its parameters over. `work` is what rank 0's GPU can do, for metrics.
    `validate(step)` measures this rank's share, waits for the others' and returns metrics of all by name, among which
    "acceptance_length" decides which checkpoint is the best; every rank has one or none has.
    """

    recipe: Recipe
    shape: DrafterShape
    schedule: ScheduleFacts
    planner: Planner
    source: HiddenSource
    drafter: DFlashDrafter
    ends: FrozenEnds
    target_fingerprint: str
    share: ColumnShare
    group: RankGroup | None
    account: Account
    device: torch.device
    work: GpuWork | None = None
    validate: Callable[[int], Mapping[str, object]] | None = None


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU's streams and memory, and the counts of what it makes a process do; tests have models of both."""

    lanes: Lanes
    work: WorkCounter


@dataclass(frozen=True, slots=True)
class MainRank:
    """The side jobs that rank 0 does for all. Without a folder for `checkpoints` none is written."""

    log: MetricLog
    checkpoints: Path | None


def build_trainer(*, parts: RunParts, main: MainRank | None, resume: Path | None = None, gpu: Gpu | None = None) -> Trainer:
    """A trainer at step 0, or at the cursor of the checkpoint `resume`. `main` is given to rank 0 and to no other.

    On CUDA it trains through an `Engine`, on the stream that is current here; `gpu` puts others of its parts in place.
    Raises `CheckpointError` when the checkpoint is damaged or belongs to another run.
    """
    if gpu is None and parts.device.type == "cuda":
        gpu = Gpu(lanes=CudaLanes(parts.device), work=CudaWork(parts.device))
    recipe, schedule = parts.recipe, parts.schedule
    assert (main is not None) == (parts.share.rank == 0), "rank 0, and no other, has the side jobs"
    assert (parts.group is None) == (parts.share.ranks == 1), "ranks that are not alone have a group"
    identity = CheckpointIdentity.of(
        recipe=recipe,
        shape=parts.shape,
        plan_digest=schedule.digest,
        target_fingerprint=parts.target_fingerprint,
    )
    block_size = parts.shape.block_size
    optimizer = FlatAdamW(parts.drafter, section=recipe.optimizer, num_extra=StepTally.size(block_size))
    counters, start_step = Counters(), 0
    if resume is not None:
        checkpoint = read_checkpoint(resume, identity=identity)
        optimizer.load_state(checkpoint.state)
        counters, start_step = Counters(**checkpoint.counters), checkpoint.cursor.step
    validation = _validation(parts, main, gpu=gpu)
    engine = _engine(parts, main, gpu=gpu, optimizer=optimizer, counters=counters, start_step=start_step)
    worths = _worths(parts)
    return Trainer(
        prepare=_prepare(parts, engine, worths=worths if main is not None else None),
        num_steps=schedule.num_steps,
        start_step=start_step,
        plan_digest=schedule.digest,
        block_size=block_size,
        source=parts.source,
        column_pass=_column_pass(parts, engine),
        optimizer=optimizer,
        section=recipe.optimizer,
        checkpoint_every_steps=recipe.checkpoint.every_steps,
        saving=_saving(parts, main, identity=identity, validation=validation),
        group=GradientSum(parts.drafter, optimizer=optimizer, group=parts.group) if parts.group is not None else None,
        hooks=_hooks(parts, main, counters=counters, validation=validation, engine=engine, worths=worths),
        counters=counters,
        account=parts.account,
        metrics=engine.metrics if engine else None,
        snapshot=engine.snapshot if engine else None,
        warm_up=engine.warm_up if engine else None,
        room=engine.wait_for_room if engine else None,
    )


def _engine(
    parts: RunParts,
    main: MainRank | None,
    *,
    gpu: Gpu | None,
    optimizer: FlatAdamW,
    counters: Counters,
    start_step: int,
) -> Engine | None:
    if gpu is None:
        return None
    # a fresh run measures before its first step anyway; one that resumes may not for a long time
    validate = parts.validate if 0 < start_step < parts.schedule.num_steps else None
    columns = parts.share.columns(parts.schedule.num_columns)

    def take_first() -> None:
        if start_step < parts.schedule.num_steps:
            parts.source.take(parts.planner.step(start_step).uses[columns[0]].pack_id)

    return Engine(
        gpu.lanes,
        gpu.work,
        EngineParts(
            recipe=parts.recipe,
            shape=parts.shape,
            drafter=parts.drafter,
            ends=parts.ends,
            device=parts.device,
            target_fingerprint=parts.target_fingerprint,
            num_columns=len(columns),
            is_alone=parts.group is None,
            saves=main is not None and main.checkpoints is not None,
            log=main.log if main is not None else None,
            make_batch=_make_batch(parts),
            validate=partial(validate, start_step) if validate is not None else None,
            take_first=take_first,
            optimizer=optimizer,
            counters=counters,
            start_step=start_step,
        ),
    )


def _worths(parts: RunParts) -> StepWorths:
    plan = parts.recipe.plan
    return StepWorths(
        shape=parts.shape,
        token_room=plan.packs_per_step * plan.pack_tokens,
        anchor_room=plan.packs_per_step * plan.pack_anchors,
        mixing=parts.schedule.mixing,
        work=parts.work,
    )


def _prepare(parts: RunParts, engine: Engine | None, *, worths: StepWorths | None) -> Callable[[int], PreparedStep]:
    objective = parts.recipe.objective

    def denominator(step: Step) -> float:
        return planned_denominator(objective=objective, supervised_per_slot=step.supervised_per_slot)

    columns = parts.share.columns(parts.schedule.num_columns)
    plain = _make_batch(parts)

    def make_batch(pack: Pack, use: Use) -> BlockBatch:
        batch = plain(pack, use)
        if worths is not None:
            worths.prepared(pack, use, num_rows=batch.num_rows)
        return batch

    def prepare(index: int) -> PreparedStep:
        step = prepare_step(planner=parts.planner, index=index, columns=columns, make_batch=make_batch, denominator=denominator)
        return step if engine is None else engine.placing.stage(step)

    return prepare


def _make_batch(parts: RunParts) -> Callable[[Pack, Use], BlockBatch]:
    def make_batch(pack: Pack, use: Use) -> BlockBatch:
        return make_block_batch(
            pack=pack,
            use=use,
            block_size=parts.shape.block_size,
            mask_token_id=parts.shape.mask_token_id,
            chunk_rows=parts.recipe.objective.chunk_rows,
        )

    return make_batch


def _column_pass(parts: RunParts, engine: Engine | None) -> ColumnPass:
    objective, seed, num_steps = parts.recipe.objective, parts.recipe.plan.seed, parts.schedule.num_steps

    def noise(hidden_TKD: Tensor, batch: BlockBatch) -> Tensor:
        std = noise_std(objective=objective, step=batch.step, num_steps=num_steps)
        return add_noise(hidden_TKD, std=std, seed=seed, pack_id=batch.pack_id, use_number=batch.use_number)

    return ColumnPass(
        drafter=parts.drafter,
        ends=parts.ends,
        loss=None,
        noise=noise if objective.noise_std or objective.noise_end_std else None,
        target_fingerprint=parts.target_fingerprint,
        device=parts.device,
        account=parts.account,
        placing=engine.placing if engine else None,
        parts=BlockLossParts(objective),
    )


def _validation(parts: RunParts, main: MainRank | None, *, gpu: Gpu | None) -> ValidationHook | None:
    if parts.validate is None:
        return None
    return ValidationHook(
        measure=parts.validate,
        log=main.log if main is not None else None,
        every_steps=parts.recipe.validation.every_steps,
        num_steps=parts.schedule.num_steps,
        account=parts.account,
        finish=gpu.lanes.finish if gpu is not None else lambda: None,
    )


def _saving(
    parts: RunParts, main: MainRank | None, *, identity: CheckpointIdentity, validation: ValidationHook | None
) -> Saving | None:
    if main is None or main.checkpoints is None:
        return None
    keep = parts.recipe.checkpoint.keep
    writer = CheckpointWriter(folder=main.checkpoints, identity=identity, keep=keep, account=parts.account)
    return Saving(writer=writer, acceptance_at=validation.acceptance_at if validation else lambda step: None)


def _hooks(
    parts: RunParts,
    main: MainRank | None,
    *,
    counters: Counters,
    validation: ValidationHook | None,
    engine: Engine | None,
    worths: StepWorths,
) -> list[Hook]:
    """Metrics before the guard, so that the step that ends a run is seen; validation, then the watch over late work."""
    hooks: list[Hook] = []
    if main is not None:
        facts = {"run": parts.recipe.name, "num_steps": parts.schedule.num_steps, "drafter_ranks": parts.share.ranks}
        memory = DeviceMemory(parts.device)
        hooks.append(MetricsHook(log=main.log, counters=counters, facts=facts, worths=worths, memory=memory))
    hooks.append(GuardHook(guard=DivergenceGuard(max_bad_steps=parts.recipe.optimizer.max_bad_steps), counters=counters))
    if validation is not None:
        hooks.append(validation)
    if engine is not None:
        hooks.append(engine.late_work)
    return hooks
