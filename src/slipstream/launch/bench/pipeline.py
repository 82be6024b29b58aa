"""Target and drafter in one process, as a colocated run trains: both together against each alone, by turns in one process.

The loop's own parts run: slots on the device with their seals, staged arrays, late metrics, the optimizer, a step a pack.
On one GPU the two stages share the arithmetic, so together they can at best take the sum of their times: a pack is made in
t_T and trained on R times in t_D each, and `ratio` is (t_T + R t_D) over what it took.

T context tokens, N anchors, R uses of a pack.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from transformers import AutoModel

from slipstream.config import DrafterShape, Recipe, make_recipe
from slipstream.config.recipe import ObjectiveSection
from slipstream.config.target_info import spread_taps
from slipstream.drafter import DFlashDrafter, build_drafter, make_block_batch
from slipstream.launch.bench.counters import Growth
from slipstream.launch.bench.standing_plan import PipelineWork, StandingPlan, make_packs
from slipstream.launch.bench.target import build_target, random_info, synchronises
from slipstream.launch.on_gpu import Gpu
from slipstream.objective import BlockLossParts, planned_denominator
from slipstream.observe import Account
from slipstream.plan import plan_memory
from slipstream.records import BlockBatch, Pack, Step, Use
from slipstream.target.huggingface import HuggingFaceTarget
from slipstream.target.loading import truncate_config
from slipstream.trainer.column import ColumnPass
from slipstream.trainer.engine import Engine, EngineParts
from slipstream.trainer.guard import Counters
from slipstream.trainer.lanes import CudaLanes
from slipstream.trainer.late_work import CudaWork
from slipstream.trainer.loop import PREPARED_STEPS, HiddenSource, Trainer
from slipstream.trainer.optim import FlatAdamW
from slipstream.trainer.prefetch import PreparedStep, StepPrefetch, prepare_step
from slipstream.trainer.tally import StepTally
from slipstream.trainer.warmup import MadeUpSource
from slipstream.transport.device_inline import DeviceInline
from slipstream.transport.layout import SlotLayout
from slipstream.transport.ledger import PackOrder

FINGERPRINT = "random"
DISTINCT_PACKS = 2
ORDERED_PACKS = 100_000
PERIOD = 4
"""Layers by which a target is cut: hybrid ones repeat after so many."""
SPARE = 0.05
"""Share of the free memory that the choice of layers leaves alone."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PipelineFigures:
    """Medians over rounds, in milliseconds a pack (`drafter_milliseconds`: a use). Tokens are real context tokens.

    `unique_tokens_per_second` counts each pack once, `trained_tokens_per_second` every use; `ratio` is what the two stages
    alone would take over what they took together. `gain` is the trained rate over that of the two stages one after the
    other without replays, `gain_bound` = (t_T + t_D) / (t_T / R + t_D) the most that it can be. `growth` is what counters of
    allocations and compilations gained, `synchronised` "never" or what made the CPU wait in a turn that forbids it.
    """

    replays: int
    target_milliseconds: float
    drafter_milliseconds: float
    together_milliseconds: float
    ratio: float
    gain: float
    gain_bound: float
    trained_tokens_per_second: float
    unique_tokens_per_second: float
    peak_gib: float
    growth: Mapping[str, int]
    skipped_steps: int
    synchronised: str


@dataclass(frozen=True, slots=True)
class PipelineBench:
    """What was built, and the figures for each number of uses."""

    layers: int
    taps: tuple[int, ...]
    pack_tokens: int
    real_tokens: float
    anchors: int
    build_seconds: float
    figures: tuple[PipelineFigures, ...]


class Pipeline:
    """Both stages, ready to run alone or together; each turn together goes on where the one before ended."""

    def __init__(
        self, *, target: HuggingFaceTarget, trainer: Trainer, plan: StandingPlan, together: HiddenSource, resident: HiddenSource
    ) -> None:
        self._target, self.trainer, self._plan = target, trainer, plan
        self._together, self._resident = together, resident
        self._next_step = self.skipped_steps = 0

    def target_alone(self, count: int) -> None:
        """Make packs into a slot, nothing else."""
        slot_TKD = self._resident.take(0).hidden_TKD
        for pack_id in range(count):
            self._target.capture(self._plan.pack(pack_id), hidden_TKD=slot_TKD)

    def drafter_alone(self, count: int) -> None:
        """Train on packs that are there."""
        self._train(range(count), source=self._resident)

    def both(self, count: int) -> None:
        """Make packs and train on them."""
        steps = range(self._next_step, self._next_step + count)
        self._next_step = steps.stop
        self._train(steps, source=self._together)

    def _train(self, steps: range, *, source: HiddenSource) -> None:
        trainer = self.trainer
        trainer.source = source
        with StepPrefetch(trainer.prepare, steps=steps, depth=PREPARED_STEPS) as prefetch:
            for prepared in prefetch:
                trainer.launch(prepared)
                self.skipped_steps += sum(record.skipped for record in trainer.metrics.drain())


def bench_pipeline(
    *,
    shape: DrafterShape,
    config: Any,
    work: PipelineWork,
    replays: Sequence[int] = (1,),
    layers: int | None = None,
    say: Say = lambda line: None,
) -> PipelineBench:
    """Warm up, then time target, drafter and both by turns, for each number of uses in `replays` (`work` gives the rest).

    `config` is the whole target's. With `layers` only so many of it run, the taps spread over them; without, all up to the
    last tap, or as many as the free memory holds.
    """
    began = time.perf_counter()
    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.empty_cache()
    layers = layers or layers_that_fit(shape=shape, config=config, work=work, free_bytes=torch.cuda.mem_get_info()[0])
    taps = spread_taps(num_layers=min(layers + 2, config.num_hidden_layers), num_taps=shape.num_taps)
    shape = replace(shape, tap_layers=taps)
    target, _ = build_target(config, taps=taps)
    packs = make_packs(work, vocab_size=shape.mask_token_id, count=DISTINCT_PACKS)
    rig = _build(target=target, shape=shape, work=work, packs=packs, device=device)
    built = time.perf_counter() - began
    say(f"{taps[-1] + 1} layers and a drafter of {rig.trainer.optimizer.num_parameters / 1e9:.2f} B parameters: {built:.0f} s")
    figures = tuple(_measure(rig, work=replace(work, replays=number), say=say) for number in replays)
    return PipelineBench(
        layers=taps[-1] + 1, taps=taps, pack_tokens=work.pack_tokens, anchors=work.anchors, build_seconds=built,
        real_tokens=statistics.mean(pack.num_tokens for pack in packs), figures=figures,
    )  # fmt: skip


def layers_that_fit(*, shape: DrafterShape, config: Any, work: PipelineWork, free_bytes: int) -> int:
    """Layers of a target up to its last tap, or fewer, in whole periods of four, where memory does not hold them all.

    The rest of the process is taken from the memory plan; a layer's bytes are counted on the meta device.
    """
    wanted = spread_taps(num_layers=config.num_hidden_layers, num_taps=shape.num_taps)[-1] + 1
    some = copy.deepcopy(config)
    truncate_config(some, num_layers=min(PERIOD, config.num_hidden_layers))
    with torch.device("meta"):
        model = AutoModel.from_config(some, dtype=torch.bfloat16)
    layer: int = sum(weight.nbytes for weight in model.layers.parameters()) // len(model.layers)
    (process,) = plan_memory(
        recipe=_recipe(shape=shape, work=work), info=random_info(config), shape=shape, schedule_slots_per_column=1,
        validation_slots=0, device="cuda",
    ).of("colocated")  # fmt: skip
    rest = process.peak_bytes - sum(item.nbytes for item in process.items if item.name == "target weights")
    ends = 2 * config.vocab_size * config.hidden_size
    slots = 5 * work.pack_tokens * shape.num_taps * config.hidden_size * 2
    fit: int = (int(free_bytes * (1 - SPARE)) - rest - ends - slots) // layer
    if fit >= wanted:
        return wanted
    fewest = shape.num_taps + 1
    return max(fewest, fit // PERIOD * PERIOD)


@dataclass(frozen=True, slots=True)
class _Rig:
    """Both stages, built and warm; what crosses between them depends on the number of uses and comes later."""

    target: HuggingFaceTarget
    trainer: Trainer
    engine: Engine
    shape: DrafterShape
    packs: list[Pack]
    resident: MadeUpSource
    gpu: Gpu


def _measure(rig: _Rig, *, work: PipelineWork, say: Say) -> PipelineFigures:
    plan = StandingPlan(packs=rig.packs, shape=rig.shape, work=work)
    together = _together(rig, plan=plan, work=work)
    rig.trainer.prepare = _prepare(rig.engine, plan=plan, shape=rig.shape, chunk_rows=work.chunk_rows)
    pipeline = Pipeline(target=rig.target, trainer=rig.trainer, plan=plan, together=together, resident=rig.resident)
    uses = work.packs * work.replays
    turns = {
        "target": partial(pipeline.target_alone, work.packs),
        "drafter": partial(pipeline.drafter_alone, uses),
        "together": partial(pipeline.both, uses),
    }
    try:
        for name, turn in turns.items():
            say(f"replays {work.replays}, {name}, first turn: {_timed(turn):.1f} s")
        torch.cuda.reset_peak_memory_stats()
        seconds: dict[str, list[float]] = {name: [] for name in turns}
        with Growth() as grown:
            for _ in range(work.rounds):
                for name, turn in turns.items():
                    seconds[name].append(_timed(turn))
            growth = grown.so_far()
        peak = torch.cuda.max_memory_allocated() / 2**30
        synchronised = synchronises(partial(pipeline.both, work.replays))
        skipped = pipeline.skipped_steps + sum(record.skipped for record in rig.trainer.metrics.drain(all_of_it=True))
    finally:
        together.close()
    target_ms, drafter_ms, together_ms = (
        statistics.median(seconds[name]) / count * 1e3
        for name, count in (("target", work.packs), ("drafter", uses), ("together", work.packs))
    )
    per_second = statistics.mean(pack.num_tokens for pack in rig.packs) / together_ms * 1e3
    return PipelineFigures(
        replays=work.replays,
        target_milliseconds=target_ms, drafter_milliseconds=drafter_ms, together_milliseconds=together_ms,
        ratio=(target_ms + work.replays * drafter_ms) / together_ms,
        gain=work.replays * (target_ms + drafter_ms) / together_ms,
        gain_bound=(target_ms + drafter_ms) / (target_ms / work.replays + drafter_ms),
        trained_tokens_per_second=work.replays * per_second, unique_tokens_per_second=per_second,
        peak_gib=peak, growth=growth, skipped_steps=skipped, synchronised=synchronised,
    )  # fmt: skip


def _timed(turn: Callable[[], None]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    turn()
    torch.cuda.synchronize()
    return time.perf_counter() - began


@dataclass(frozen=True, slots=True)
class _Ends:
    embedding_VD: torch.Tensor
    head_VD: torch.Tensor


def _build(
    *, target: HuggingFaceTarget, shape: DrafterShape, work: PipelineWork, packs: list[Pack], device: torch.device
) -> _Rig:
    recipe = _recipe(shape=shape, work=work)
    drafter = build_drafter(shape=shape, dtype="bfloat16", device=str(device), seed=0, attention="auto")
    head_VD = (torch.randn(shape.vocab_size, shape.hidden_size, device=device) * shape.initializer_range).to(torch.bfloat16)
    ends = _Ends(embedding_VD=head_VD.cpu(), head_VD=head_VD)
    size = (work.pack_tokens, shape.num_taps, shape.hidden_size)
    resident = MadeUpSource(torch.zeros(size, dtype=torch.bfloat16, device=device), target_fingerprint=FINGERPRINT)
    plan = StandingPlan(packs=packs, shape=shape, work=work)
    _capture(target, plan.pack(0), resident.take(0).hidden_TKD)
    trainer, engine = _trainer(
        recipe=recipe, shape=shape, drafter=drafter, ends=ends, plan=plan, source=resident, device=device
    )
    engine.warm_up(trainer)
    return _Rig(
        target=target, trainer=trainer, engine=engine, shape=shape, packs=packs, resident=resident, gpu=Gpu.open()
    )  # fmt: skip


def _together(rig: _Rig, *, plan: StandingPlan, work: PipelineWork) -> DeviceInline:
    """The transport of a colocated process, with a slot more than packs are alive."""
    shape, gpu, num_slots = rig.shape, rig.gpu, work.replays + 1
    layout = SlotLayout(pack_tokens=work.pack_tokens, num_taps=shape.num_taps, hidden_size=shape.hidden_size, dtype="bfloat16")
    return DeviceInline(
        order=[PackOrder(pack_id=pack_id, rank=0, slot=pack_id % num_slots) for pack_id in range(ORDERED_PACKS)],
        uses=plan.uses(),
        produce=lambda assignment, slot: _capture(rig.target, plan.pack(assignment.pack_id), slot.hidden_TKD),
        berths=gpu.berths(layout, num_slots),
        slot_bytes=layout.nbytes,
        fingerprint=FINGERPRINT,
        streams=gpu.streams,
        operations=gpu.operations,
    )


def _prepare(engine: Engine, *, plan: StandingPlan, shape: DrafterShape, chunk_rows: int) -> Callable[[int], PreparedStep]:
    make_batch = _make_batch(shape, chunk_rows=chunk_rows)
    objective = ObjectiveSection(chunk_rows=chunk_rows)

    def denominator(step: Step) -> float:
        return planned_denominator(objective=objective, supervised_per_slot=step.supervised_per_slot)

    def prepare(index: int) -> PreparedStep:
        step = prepare_step(planner=plan, index=index, columns=(0,), make_batch=make_batch, denominator=denominator)
        return engine.placing.stage(step)

    return prepare


def _trainer(
    *,
    recipe: Recipe,
    shape: DrafterShape,
    drafter: DFlashDrafter,
    ends: _Ends,
    plan: StandingPlan,
    source: HiddenSource,
    device: torch.device,
) -> tuple[Trainer, Engine]:
    objective, account = recipe.objective, Account("bench")
    optimizer = FlatAdamW(drafter, section=recipe.optimizer, num_extra=StepTally.size(shape.block_size))
    make_batch = _make_batch(shape, chunk_rows=objective.chunk_rows)
    parts = EngineParts(
        recipe=recipe, shape=shape, drafter=drafter, ends=ends, device=device, target_fingerprint=FINGERPRINT,
        num_columns=1, is_alone=True, saves=False, log=None, make_batch=make_batch, validate=None,
        take_first=lambda: None, optimizer=optimizer, counters=Counters(), start_step=0,
    )  # fmt: skip
    engine = Engine(CudaLanes(device), CudaWork(device), parts)
    column_pass = ColumnPass(
        drafter=drafter, ends=ends, loss=None, noise=None,
        target_fingerprint=FINGERPRINT, device=device, account=account, placing=engine.placing,
        parts=BlockLossParts(objective),
    )  # fmt: skip
    trainer = Trainer(
        prepare=_prepare(engine, plan=plan, shape=shape, chunk_rows=objective.chunk_rows),
        num_steps=1_000_000, start_step=0, plan_digest="",
        block_size=shape.block_size, source=source, column_pass=column_pass, optimizer=optimizer, section=recipe.optimizer,
        checkpoint_every_steps=1_000_000, saving=None, group=None, hooks=(), counters=Counters(), account=account,
        metrics=engine.metrics,
    )  # fmt: skip
    return trainer, engine


def _recipe(*, shape: DrafterShape, work: PipelineWork) -> Recipe:
    return make_recipe(
        {
            "name": "bench",
            "target": {"model": FINGERPRINT, "dtype": "bfloat16"},
            "corpus": {"path": "none"},
            "plan": {"pack_tokens": work.pack_tokens, "pack_anchors": work.anchors, "packs_per_step": 1},
            "drafter": {
                "num_layers": shape.num_layers,
                "block_size": shape.block_size,
                "mask_token_id": shape.mask_token_id,
                "dtype": "bfloat16",
            },
            "objective": {"chunk_rows": work.chunk_rows},
        }
    )


def _make_batch(shape: DrafterShape, *, chunk_rows: int) -> Callable[[Pack, Use], BlockBatch]:
    return partial(_batch_of, block_size=shape.block_size, mask_token_id=shape.mask_token_id, chunk_rows=chunk_rows)


def _batch_of(pack: Pack, use: Use, *, block_size: int, mask_token_id: int, chunk_rows: int) -> BlockBatch:
    return make_block_batch(pack=pack, use=use, block_size=block_size, mask_token_id=mask_token_id, chunk_rows=chunk_rows)


def _capture(target: HuggingFaceTarget, pack: Pack, hidden_TKD: torch.Tensor) -> None:
    target.capture(pack, hidden_TKD=hidden_TKD)
