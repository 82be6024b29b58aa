"""What training on a GPU has beside training on a CPU: staged arrays, late metrics, snapshots, warm-up and its watch.

`build_trainer` opens one where the device has streams. T context tokens, K taps, D hidden, N anchors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch

from slipstream.config.drafter_shape import DrafterShape
from slipstream.config.recipe import Recipe
from slipstream.device.graph_choice import GraphReport, should_record, time_steps
from slipstream.drafter import DFlashDrafter
from slipstream.drafter.mask_arrays import mask_arrays, masks_over
from slipstream.errors import PreflightError
from slipstream.observe import MetricLog
from slipstream.records import BlockBatch, Pack, Use
from slipstream.trainer.column import FrozenEnds
from slipstream.trainer.guard import Counters
from slipstream.trainer.lanes import Lanes
from slipstream.trainer.late_metrics import LateMetrics
from slipstream.trainer.late_work import LateWork, WorkCounter
from slipstream.trainer.loop import PREPARED_STEPS, Trainer
from slipstream.trainer.optim import FlatAdamW
from slipstream.trainer.placing import StagedPlacing
from slipstream.trainer.prefetch import PreparedColumn, PreparedStep
from slipstream.trainer.snapshot import Snapshot
from slipstream.trainer.warmup import MadeUpSource, Mode, WarmUpReport, made_up_use, warm_up

SLOT_TYPES: Mapping[str, torch.dtype] = {"float32": torch.float32}
"""Types of hidden states that are not bfloat16, by `target.dtype`."""


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What the engine is built from: `make_batch` builds a use's blocks; `num_columns` are this rank's own.

    `validate` measures as training will; none where nothing is measured, or was by the time training starts.
    `take_first` takes the first pack that training will, which runs the target where it is in this process.
    """

    recipe: Recipe
    shape: DrafterShape
    drafter: DFlashDrafter
    ends: FrozenEnds
    device: torch.device
    target_fingerprint: str
    num_columns: int
    is_alone: bool
    saves: bool
    log: MetricLog | None
    make_batch: Callable[[Pack, Use], BlockBatch]
    validate: Callable[[], object] | None
    take_first: Callable[[], object]
    optimizer: FlatAdamW
    counters: Counters
    start_step: int


class Engine:
    """Owns the persistent memory and the events of one rank's training on a GPU."""

    def __init__(self, lanes: Lanes, work: WorkCounter, parts: EngineParts) -> None:
        self._lanes, self._parts = lanes, parts
        self._largest = self._made_up(parts.recipe.plan.pack_anchors)
        self.placing = StagedPlacing(
            lanes,
            embedding_VD=parts.ends.embedding_VD,
            is_remote=parts.ends.embedding_VD.device.type != parts.device.type,
            mask_arrays=partial(mask_arrays, parts.drafter),
            masks_over=partial(masks_over, parts.drafter),
            largest=self._largest.batch,
            # steps in the queue, the one that waits to be put, and the one that the loop is in
            num_slots=(PREPARED_STEPS + 2) * parts.num_columns,
        )
        self.metrics = LateMetrics(
            lanes,
            block_size=parts.shape.block_size,
            counters=parts.counters,
            device=parts.device,
            together=not parts.is_alone,
        )
        self.snapshot = Snapshot(lanes, optimizer=parts.optimizer, totals=self.metrics.totals) if parts.saves else None
        self.late_work = LateWork(work=work, settle=self._settle, log=parts.log)
        self.report: WarmUpReport | None = None
        """Of warm-up, once it is over."""
        self._graphs: GraphReport | None = None

    def warm_up(self, trainer: Trainer) -> None:
        """Every mode that training will use: steps of the largest and of the smallest use, and no gradient at all.

        Between the two rounds steps are recorded, where that pays: the second round then replays them.
        """
        parts = self._parts
        dtype = SLOT_TYPES.get(parts.recipe.target.dtype, torch.bfloat16)
        size = (parts.recipe.plan.pack_tokens, parts.shape.num_taps, parts.shape.hidden_size)
        hidden_TKD = torch.zeros(size, dtype=dtype, device=parts.device)
        source = MadeUpSource(hidden_TKD, target_fingerprint=parts.target_fingerprint)
        modes = [
            Mode("train, largest", lambda: self._rehearse(trainer, self._largest, source=source)),
            Mode("train, smallest", lambda: self._rehearse(trainer, self._made_up(1), source=source)),
            Mode("no gradient", lambda: self._without_gradient(hidden_TKD)),
        ]
        then = [Mode("validation", parts.validate)] if parts.validate is not None else []
        report = warm_up(
            modes,
            then=then,
            finish=self._lanes.finish,
            give_back=self._lanes.give_back,
            between=lambda: self._consider_recording(trainer, source=source, hidden_TKD=hidden_TKD),
        )
        self.report = replace(report, graphs=self._graphs)

    def wait_for_room(self) -> None:
        """Sleep until a further step can be staged: in the thread that prepares."""
        self.placing.wait_for_room(self._parts.num_columns)

    def _settle(self) -> WarmUpReport:
        """The last of warm-up, after the first validation: a pack taken stays taken only until another is."""
        if self.report is None:  # nothing is left to train
            return WarmUpReport(seconds=0.0, modes={})
        began = time.perf_counter()
        self._parts.take_first()
        self._lanes.finish()
        took = time.perf_counter() - began
        report = self.report
        return replace(report, seconds=report.seconds + took, modes={**report.modes, "first pack": took})

    def _consider_recording(self, trainer: Trainer, *, source: MadeUpSource, hidden_TKD: torch.Tensor) -> None:
        """Record steps from here on if the recipe wants it, or leaves it open and it pays. Every rank decides for itself."""
        wish = self._parts.recipe.placement.cuda_graphs
        if wish == "off":
            self._graphs = GraphReport(used=False, why='placement.cuda_graphs = "off"')
            return
        recorder = self._lanes.recorder() if trainer.can_record else None
        if recorder is None:
            why = "this device cannot record launches" if trainer.can_record else "this objective comes in one piece"
            if wish == "on":
                raise PreflightError(key="placement.cuda_graphs", value=wish, rule=why, hint='use "auto" or "off"')
            self._graphs = GraphReport(used=False, why=why)
            return
        times = partial(
            time_steps,
            partial(trainer.rehearse, source=source),
            prepare=lambda: self._staged(self._largest),  # in training another thread does that
            finish=self._lanes.finish,
        )
        plain = times()
        used, why = should_record(plain, wish=wish)
        if used:
            trainer.record(recorder, hidden_TKD=hidden_TKD, several=self._parts.num_columns > 1)
        # ranks of a group rehearse equally often, whatever each of them decides: a rehearsal reduces as a step does
        recorded = times() if used and self._parts.is_alone else None
        self._graphs = GraphReport(used=used, why=why, plain=plain, recorded=recorded, nbytes=recorder.nbytes)

    def _made_up(self, num_valid: int) -> PreparedColumn:
        plan = self._parts.recipe.plan
        pack, use = made_up_use(
            pack_tokens=plan.pack_tokens,
            pack_anchors=plan.pack_anchors,
            block_size=self._parts.shape.block_size,
            num_valid=num_valid,
            step=self._parts.start_step,
        )
        return PreparedColumn(use=use, batch=self._parts.make_batch(pack, use), context_tokens=pack.num_tokens, unique_tokens=0)

    def _rehearse(self, trainer: Trainer, column: PreparedColumn, *, source: MadeUpSource) -> None:
        trainer.rehearse(self._staged(column), source=source)

    def _staged(self, column: PreparedColumn) -> PreparedStep:
        # a second use adds to the gradients that the first one left
        columns = (column,) * min(2, self._parts.num_columns)
        return self.placing.stage(PreparedStep(index=self._parts.start_step, epoch=0, denominator=1.0, columns=columns))

    @torch.no_grad()
    def _without_gradient(self, hidden_TKD: torch.Tensor) -> None:
        step = PreparedStep(index=self._parts.start_step, epoch=0, denominator=1.0, columns=(self._largest,))
        (column,) = self.placing.stage(step).columns
        assert column.staged is not None
        placed = self.placing.send(column.batch, column.staged)
        self._parts.drafter(hidden_TKD=hidden_TKD, batch=placed.batch, embedding_VD=placed.embedding_VD, masks=placed.masks)
        self.placing.used()
