"""One rank's training step of the drafter, optimizer included, as the trainer runs it: `Trainer.train_step` on a made-up plan.

Waits for: a CUDA device. T context tokens, K taps, D hidden, N anchors, B block size, V vocabulary.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.config import DrafterShape
from slipstream.config.recipe import ObjectiveSection, Recipe
from slipstream.device.allocated import allocated_memory, forget_peaks
from slipstream.device.graph_choice import GraphReport
from slipstream.drafter import FAMILIES, DFlashDrafter, make_block_batch
from slipstream.launch.bench.ceilings import median_ms
from slipstream.launch.bench.counters import Growth, profile_kernels
from slipstream.launch.bench.drafter_work import DrafterWork, make_columns
from slipstream.objective import BlockLoss, BlockLossParts, planned_denominator
from slipstream.objective.linear_ce import ROW_PASSES
from slipstream.observe import Account
from slipstream.records import BlockBatch, HiddenPack, Pack, Use
from slipstream.trainer.column import ColumnPass
from slipstream.trainer.engine import Engine, EngineParts
from slipstream.trainer.guard import Counters
from slipstream.trainer.lanes import CudaLanes
from slipstream.trainer.late_work import CudaWork
from slipstream.trainer.loop import Trainer
from slipstream.trainer.optim import FlatAdamW
from slipstream.trainer.prefetch import PreparedStep
from slipstream.trainer.tally import StepTally

Report = Callable[[str], None]
PHASES = ("forward", "loss", "backward", "optimizer")
FINGERPRINT = "random hidden states"


@dataclass(frozen=True, slots=True)
class DrafterBench:
    """Medians over the timed steps, which ran without a synchronisation. Milliseconds on the device; GiB allocated by torch.

    `useful_tflop` is `drafter_work.useful_tflop` over the packs; `launch_milliseconds` the least CPU time that launching a
    step took; `graphs` what warm-up decided on replaying it. `growth` is what counters of allocations and compilations gained
    over the timed steps. `kernels` groups the device time of one step by kind of kernel, `calls` counts in its trace what
    would make the CPU wait. The loss's phase is all of it in a launched step; in a replayed one it is the loss's products,
    and its weights count as backward. `peak_gib` has what recordings keep in it.
    """

    milliseconds: float
    phases: Mapping[str, float]
    wall_milliseconds: float
    launch_milliseconds: float
    useful_tflop: float
    tflops: float
    peak_gib: float
    reserved_gib: float
    warmup_seconds: float
    growth: Mapping[str, int]
    loss: float
    parameters: int
    kernels: Mapping[str, float]
    calls: Mapping[str, int]
    graphs: GraphReport


@dataclass(frozen=True, slots=True)
class _Ends:
    """A head on the device, an embedding in host memory."""

    embedding_VD: Tensor
    head_VD: Tensor


class _Slots:
    """A source whose packs are all there."""

    def __init__(self, hidden: list[Tensor]) -> None:
        self._hidden = hidden

    def take(self, pack_id: int) -> HiddenPack:
        """The pack of that number."""
        return HiddenPack(
            pack_id=pack_id, slot=pack_id, generation=0, hidden_TKD=self._hidden[pack_id], last_hidden_TD=None, seal=0,
            target_fingerprint=FINGERPRINT,
        )  # fmt: skip

    def release(self, pack_id: int) -> None:
        """Nothing waits for it."""


class _Marks:
    """Events at the ends of the phases of steps, read when all is over. Stands in an account as its `Stages`.

    A phase reaches from the end of the one before to its own. Outside of steps nothing is marked.
    """

    def __init__(self) -> None:
        self._steps: list[list[tuple[str, torch.cuda.Event]]] = []
        self._is_open = False

    def clear(self) -> None:
        self._steps.clear()

    def open(self) -> None:
        """A step begins."""
        self._is_open = True
        self._steps.append([])
        self.mark("begin")

    def mark(self, name: str) -> None:
        if self._is_open:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._steps[-1].append((name, event))

    def begin(self, state: str, pack: int | None, step: int | None) -> object:
        """Contract: `Stages.begin`. The loss is the end of the state that forward is."""
        return "loss" if state == "forward" else state

    def end(self, stage: object) -> None:
        """Contract: `Stages.end`."""
        if stage in PHASES:
            self.mark(str(stage))

    def close(self) -> None:
        """The step is over."""
        self._is_open = False

    def medians(self) -> tuple[float, dict[str, float]]:
        """Milliseconds of a step and of its phases; a phase that comes once for each pack is summed."""
        totals = [steps[0][1].elapsed_time(steps[-1][1]) for steps in self._steps]
        phases: dict[str, list[float]] = {name: [] for name in PHASES}
        for steps in self._steps:
            sums = dict.fromkeys(PHASES, 0.0)
            for (_, before), (name, after) in itertools.pairwise(steps):
                sums[name] += before.elapsed_time(after)
            for name, value in sums.items():
                phases[name].append(value)
        return statistics.median(totals), {name: statistics.median(values) for name, values in phases.items()}


@dataclass(frozen=True, slots=True)
class _MarkedParts(BlockLossParts):
    """An objective that marks where the loss begins, in a launched step or between recordings."""

    marks: _Marks

    def sum_up(self, *arguments: Any, **keys: Any) -> BlockLoss:
        self.marks.mark("forward")
        return BlockLossParts.sum_up(self, *arguments, **keys)

    def fill(self, *arguments: Any, **keys: Any) -> None:
        self.marks.mark("forward")
        BlockLossParts.fill(self, *arguments, **keys)


@dataclass(slots=True)
class _Rig:
    """Everything that a step runs on. `engine` is there on a GPU, where steps are staged."""

    trainer: Trainer
    engine: Engine | None
    account: Account
    marks: _Marks
    step: PreparedStep

    def warm_up(self) -> GraphReport:
        """As before training; what was decided on recordings."""
        assert self.engine is not None
        with self.account.state("warm_up", whole=True):
            self.engine.warm_up(self.trainer)
        self.step = self.engine.placing.stage(self.step)
        assert self.engine.report is not None
        assert self.engine.report.graphs is not None
        return self.engine.report.graphs

    def run(self) -> Tensor:
        """One training step, marked; its loss, unread."""
        self.marks.open()
        result = self.trainer.train_step(self.step)
        self.marks.close()
        return result.loss_sum / result.weight_sum


def bench_drafter(
    *, shape: DrafterShape, work: DrafterWork, device: torch.device, report: Report = lambda line: None
) -> DrafterBench:
    """Warm up, time `work.steps` steps with synchronisations forbidden, then trace one more."""
    torch.cuda.empty_cache()
    began = time.perf_counter()
    rig, tflop = _build(shape=shape, work=work, device=device)
    report(f"built {rig.trainer.optimizer.num_parameters / 1e9:.2f} B parameters in {time.perf_counter() - began:.1f} s")
    began = time.perf_counter()
    graphs = rig.warm_up()
    for _ in range(3):
        loss = rig.run()
    torch.cuda.synchronize()
    warm = time.perf_counter() - began
    report(f"warm after {warm:.1f} s, loss {float(loss):.3f}; CUDA graphs are {graphs.told()}")
    rig.marks.clear()
    forget_peaks()
    launches: list[float] = []
    with Growth() as grown:
        begun = time.perf_counter()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(work.steps):
                at = time.perf_counter()
                loss = rig.run()
                launches.append(time.perf_counter() - at)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        wall = (time.perf_counter() - begun) / work.steps * 1e3
        growth = grown.so_far()
    milliseconds, phases = rig.marks.medians()
    taken = allocated_memory()
    assert taken is not None
    kernels, calls = profile_kernels(rig.run)
    return DrafterBench(
        milliseconds=milliseconds, phases=phases, wall_milliseconds=wall, launch_milliseconds=min(launches) * 1e3,
        useful_tflop=tflop, tflops=tflop / milliseconds * 1e3, peak_gib=taken.peak_bytes / 2**30,
        reserved_gib=taken.reserved_bytes / 2**30, warmup_seconds=warm,
        growth=growth, loss=float(loss), parameters=rig.trainer.optimizer.num_parameters, kernels=kernels, calls=calls,
        graphs=graphs,
    )  # fmt: skip


def sweep_chunks(
    *, shape: DrafterShape, rows: int, chunks: tuple[int, ...], device: torch.device, report: Report
) -> dict[int, tuple[float, float, float]]:
    """Milliseconds of the loss's forward product, row pass and second product over `rows` rows, for each chunk size."""
    head, hidden = (_random(count, shape.hidden_size, device=device) * 0.02 for count in (shape.vocab_size, rows))
    labels = torch.randint(shape.vocab_size, (rows,), device=device)
    loss, hit = torch.empty(rows, device=device), torch.empty(rows, dtype=torch.bool, device=device)
    row_pass, found = ROW_PASSES["cuda"](), {}
    for chunk in chunks:
        logits, unit = hidden.new_empty(chunk, shape.vocab_size), torch.empty_like(hidden[:chunk])
        whole, tail = divmod(rows, chunk)
        parts = []
        for kind in range(3):
            total = 0.0
            for count, size in ((whole, chunk), (1, tail)):
                if size and count:
                    part = logits[:size]
                    work = (
                        partial(torch.mm, hidden[:size], head.t(), out=part),
                        partial(row_pass, part, labels[:size], loss_R=loss[:size], hit_R=hit[:size], gradient=True),
                        partial(torch.mm, part, head, out=unit[:size]),
                    )[kind]
                    total += count * median_ms(work, repeats=5, warmup=1)
            parts.append(total)
        found[chunk] = (parts[0], parts[1], parts[2])
        report(
            f"chunk {chunk}: logits {parts[0]:.1f} ms, rows {parts[1]:.2f} ms, gradient {parts[2]:.1f} ms, sum {sum(parts):.1f}"
        )
        del logits
    return found


def _build(*, shape: DrafterShape, work: DrafterWork, device: torch.device) -> tuple[_Rig, float]:
    recipe = _recipe(shape=shape, work=work)
    drafter = FAMILIES["dflash"](shape=shape, dtype=torch.bfloat16, device=device, attention="auto")
    with torch.no_grad():
        for weight in drafter.parameters():
            _ = weight.normal_(0.0, 0.02) if weight.dim() > 1 else weight.fill_(1.0)
    embedding, head = (_random(shape.vocab_size, shape.hidden_size, device=device) * 0.02 for _ in range(2))
    ends = _Ends(embedding_VD=embedding.to("cpu"), head_VD=head)
    del embedding
    hidden = [_random(work.documents * work.document_tokens, shape.num_taps, shape.hidden_size, device=device)] * work.packs
    marks, account = _Marks(), Account("bench")
    account.stages = marks
    optimizer = FlatAdamW(drafter, section=recipe.optimizer, num_extra=StepTally.size(shape.block_size))
    engine = None
    if device.type == "cuda":
        engine = _engine(recipe=recipe, shape=shape, drafter=drafter, ends=ends, optimizer=optimizer, device=device)
    column_pass = _column_pass(
        objective=recipe.objective, drafter=drafter, ends=ends, device=device, account=account, marks=marks, engine=engine
    )
    columns, tflop = make_columns(shape=shape, work=work)
    counts = sum(column.use.supervised_per_slot for column in columns)
    denominator = planned_denominator(objective=recipe.objective, supervised_per_slot=np.asarray(counts))
    step = PreparedStep(index=500, epoch=0, denominator=denominator, columns=tuple(columns))
    trainer = Trainer(
        prepare=lambda index: step, num_steps=1000, start_step=0, plan_digest="", block_size=shape.block_size,
        source=_Slots(hidden), column_pass=column_pass, optimizer=optimizer, section=recipe.optimizer,
        checkpoint_every_steps=1000, saving=None, group=None, hooks=(), counters=Counters(), account=account,
        metrics=engine.metrics if engine is not None else None,
    )  # fmt: skip
    return _Rig(trainer=trainer, engine=engine, account=account, marks=marks, step=step), tflop


def _engine(
    *,
    recipe: Recipe,
    shape: DrafterShape,
    drafter: DFlashDrafter,
    ends: _Ends,
    optimizer: FlatAdamW,
    device: torch.device,
) -> Engine:
    chunk_rows = recipe.objective.chunk_rows

    def make_batch(pack: Pack, use: Use) -> BlockBatch:
        return make_block_batch(
            pack=pack, use=use, block_size=shape.block_size, mask_token_id=shape.mask_token_id, chunk_rows=chunk_rows
        )

    parts = EngineParts(
        recipe=recipe, shape=shape, drafter=drafter, ends=ends, device=device, target_fingerprint=FINGERPRINT,
        num_columns=recipe.plan.packs_per_step, is_alone=True, saves=False, log=None, make_batch=make_batch, validate=None,
        take_first=lambda: None, optimizer=optimizer, counters=Counters(), start_step=0,
    )  # fmt: skip
    return Engine(CudaLanes(device), CudaWork(device), parts)


def _column_pass(
    *,
    objective: ObjectiveSection,
    drafter: DFlashDrafter,
    ends: _Ends,
    device: torch.device,
    account: Account,
    marks: _Marks,
    engine: Engine | None,
) -> ColumnPass:
    return ColumnPass(
        drafter=drafter, ends=ends, loss=None, noise=None, target_fingerprint=FINGERPRINT, device=device, account=account,
        placing=engine.placing if engine is not None else None, parts=_MarkedParts(objective, marks),
    )  # fmt: skip


def _recipe(*, shape: DrafterShape, work: DrafterWork) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "bench",
            "target": {"model": FINGERPRINT},
            "corpus": {"path": "none"},
            "plan": {
                "pack_tokens": work.documents * work.document_tokens,
                "pack_anchors": work.anchors,
                "packs_per_step": work.packs,
            },
            "drafter": {
                "num_layers": shape.num_layers,
                "block_size": shape.block_size,
                "mask_token_id": shape.mask_token_id,
            },
            "objective": {"chunk_rows": work.chunk_rows},
            "placement": {"cuda_graphs": work.cuda_graphs},
        }
    )


def _random(*shape: int, device: torch.device) -> Tensor:
    return torch.randn(*shape, device=device, dtype=torch.bfloat16)
