"""Target and drafter in one process, as a colocated run trains: both together against each alone, by turns in one process.

The loop's own parts run: slots on the device with their seals, staged arrays, late metrics, the optimizer, a step a pack.
On one GPU the two stages share the arithmetic, so together they can at best take the sum of their times: a pack is made in
t_T and trained on R times in t_D each, and `ratio` is (t_T + R t_D) over what it took.

T context tokens, N anchors, R uses of a pack.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from slipstream.config import DrafterShape, Recipe, make_recipe
from slipstream.drafter import DFlashDrafter, build_drafter, make_block_batch
from slipstream.launch.bench.counters import counters
from slipstream.launch.bench.target import build_target, mixed_pack
from slipstream.launch.on_gpu import Gpu
from slipstream.objective import block_loss, planned_denominator
from slipstream.observe import Account
from slipstream.records import Pack, Step, Use
from slipstream.target.huggingface import HuggingFaceTarget
from slipstream.trainer.column import ColumnPass
from slipstream.trainer.engine import Engine, EngineParts
from slipstream.trainer.guard import Counters
from slipstream.trainer.lanes import CudaLanes
from slipstream.trainer.late_work import CudaWork
from slipstream.trainer.loop import PREPARED_STEPS, HiddenSource, Trainer
from slipstream.trainer.optim import FlatAdamW
from slipstream.trainer.prefetch import StepPrefetch, prepare_step
from slipstream.trainer.tally import StepTally
from slipstream.trainer.warmup import MadeUpSource
from slipstream.transport.device_inline import DeviceInline
from slipstream.transport.layout import SlotLayout
from slipstream.transport.ledger import PackOrder
from slipstream.transport.planned import PlannedUse

FINGERPRINT = "random"
DISTINCT_PACKS = 2
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PipelineWork:
    """What is trained on: `packs` new packs in each of `rounds` turns, each used `replays` times; `chunk_rows` of logits."""

    pack_tokens: int = 8192
    anchors: int = 512
    packs: int = 6
    rounds: int = 3
    replays: int = 1
    chunk_rows: int = 3328


@dataclass(frozen=True, slots=True)
class PipelineFigures:
    """Medians over rounds, in milliseconds a pack (`drafter_milliseconds`: a use). Tokens are real context tokens.

    `unique_tokens_per_second` counts each pack once, `trained_tokens_per_second` every use; `ratio` is what the two stages
    alone would take over what they took together. `growth` is what counters of allocations and compilations gained.
    """

    target_milliseconds: float
    drafter_milliseconds: float
    together_milliseconds: float
    ratio: float
    trained_tokens_per_second: float
    unique_tokens_per_second: float
    peak_gib: float
    growth: Mapping[str, int]
    skipped_steps: int

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


class StandingPlan:
    """A plan without an end: one column; in R steps running one new pack, and the R - 1 before it once more each."""

    def __init__(self, *, packs: list[Pack], shape: DrafterShape, work: PipelineWork) -> None:
        self._packs = [replace(pack, loss_mask=np.arange(pack.capacity_tokens) < pack.num_tokens) for pack in packs]
        self._work, self._block_size = work, shape.block_size

    def pack_of_step(self, step: int) -> tuple[int, int]:
        """Pack id and use number."""
        group, use = divmod(step, self._work.replays)
        return group + self._work.replays - 1 - use, use

    def pack(self, pack_id: int) -> Pack:
        """One of a few packs, under that id."""
        return replace(self._packs[pack_id % len(self._packs)], pack_id=pack_id)

    def step(self, step: int) -> Step:
        """N anchors drawn for this step, every slot of each supervised."""
        pack_id, number = self.pack_of_step(step)
        pack = self.pack(pack_id)
        anchors = draw_anchors(pack, count=self._work.anchors, block_size=self._block_size, seed=step)
        supervised = np.full(self._block_size, len(anchors), dtype=np.int64)
        supervised[0] = 0
        use = Use(
            step=step, pack_id=pack_id, use_number=number, anchors=anchors,
            anchor_valid=np.ones(len(anchors), dtype=np.bool_), supervised_per_slot=supervised,
            is_last=number == self._work.replays - 1,
        )  # fmt: skip
        return Step(index=step, epoch=0, uses=(use,), supervised_per_slot=supervised)

    def uses(self) -> Iterator[PlannedUse]:
        """What the loop takes, in order."""
        step = 0
        while True:
            pack_id, number = self.pack_of_step(step)
            yield PlannedUse(pack_id=pack_id, is_last=number == self._work.replays - 1)
            step += 1


def draw_anchors(pack: Pack, *, count: int, block_size: int, seed: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Sorted anchors whose whole blocks lie in their documents."""
    length = np.diff(pack.starts)
    places = [
        np.arange(start + 1, start + tokens - block_size)
        for start, tokens in zip(pack.starts[:-1], length, strict=True)
        if tokens > block_size + 1
    ]
    return np.sort(np.random.default_rng(seed).permutation(np.concatenate(places))[:count]).astype(np.int32)


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
    *, shape: DrafterShape, config: Any, taps: tuple[int, ...], work: PipelineWork, say: Say = lambda line: None
) -> PipelineFigures:
    """Warm up, then time target, drafter and both by turns. `config` is the target's, cut after the last of `taps`."""
    device = torch.device("cuda", torch.cuda.current_device())
    target, _ = build_target(config, taps=taps)
    packs = [mixed_pack(work.pack_tokens, vocab_size=shape.mask_token_id, seed=seed) for seed in range(DISTINCT_PACKS)]
    pipeline, close = _build(target=target, shape=shape, work=work, packs=packs, device=device, say=say)
    uses = work.packs * work.replays
    turns = {
        "target": partial(pipeline.target_alone, work.packs),
        "drafter": partial(pipeline.drafter_alone, uses),
        "together": partial(pipeline.both, uses),
    }
    try:
        for name, turn in turns.items():
            say(f"{name}, first turn: {_timed(turn):.1f} s")
        torch.cuda.reset_peak_memory_stats()
        before = counters()
        seconds: dict[str, list[float]] = {name: [] for name in turns}
        for _ in range(work.rounds):
            for name, turn in turns.items():
                seconds[name].append(_timed(turn))
        growth = {name: value - before[name] for name, value in counters().items()}
        skipped = pipeline.skipped_steps + sum(record.skipped for record in pipeline.trainer.metrics.drain(all_of_it=True))
    finally:
        close()
    target_ms, drafter_ms, together_ms = (
        statistics.median(seconds[name]) / count * 1e3
        for name, count in (("target", work.packs), ("drafter", uses), ("together", work.packs))
    )
    tokens = statistics.mean(pack.num_tokens for pack in packs)
    return PipelineFigures(
        target_milliseconds=target_ms, drafter_milliseconds=drafter_ms, together_milliseconds=together_ms,
        ratio=(target_ms + work.replays * drafter_ms) / together_ms,
        trained_tokens_per_second=work.replays * tokens / together_ms * 1e3,
        unique_tokens_per_second=tokens / together_ms * 1e3,
        peak_gib=torch.cuda.max_memory_allocated() / 2**30, growth=growth, skipped_steps=skipped,
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
    *,
    target: HuggingFaceTarget,
    shape: DrafterShape,
    work: PipelineWork,
    packs: list[Pack],
    device: torch.device,
    say: Say,
) -> tuple[Pipeline, Callable[[], None]]:
    plan, recipe = StandingPlan(packs=packs, shape=shape, work=work), _recipe(shape=shape, work=work)
    drafter = build_drafter(shape=shape, dtype="bfloat16", device=str(device), seed=0, attention="auto")
    head_VD = (torch.randn(shape.vocab_size, shape.hidden_size, device=device) * 0.02).to(torch.bfloat16)
    ends = _Ends(embedding_VD=head_VD.cpu(), head_VD=head_VD)
    layout = SlotLayout(pack_tokens=work.pack_tokens, num_taps=shape.num_taps, hidden_size=shape.hidden_size, dtype="bfloat16")
    gpu, num_slots = Gpu.open(), work.replays + 1
    together = DeviceInline(
        order=[PackOrder(pack_id=pack_id, rank=0, slot=pack_id % num_slots) for pack_id in range(100_000)],
        uses=plan.uses(),
        produce=lambda assignment, slot: _capture(target, plan.pack(assignment.pack_id), slot.hidden_TKD),
        berths=gpu.berths(layout, num_slots),
        slot_bytes=layout.nbytes,
        fingerprint=FINGERPRINT,
        streams=gpu.streams,
        operations=gpu.operations,
    )
    size = (work.pack_tokens, shape.num_taps, shape.hidden_size)
    resident = MadeUpSource(torch.zeros(size, dtype=torch.bfloat16, device=device), target_fingerprint=FINGERPRINT)
    _capture(target, plan.pack(0), resident.take(0).hidden_TKD)
    trainer, engine = _trainer(
        recipe=recipe, shape=shape, drafter=drafter, ends=ends, plan=plan, source=resident, device=device
    )
    engine.warm_up(trainer)
    say(f"drafter of {trainer.optimizer.num_parameters / 1e9:.2f} B parameters is warm")
    pipeline = Pipeline(target=target, trainer=trainer, plan=plan, together=together, resident=resident)
    return pipeline, together.close


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
    make_batch = partial(
        _make_batch, block_size=shape.block_size, mask_token_id=shape.mask_token_id, chunk_rows=objective.chunk_rows
    )
    parts = EngineParts(
        recipe=recipe, shape=shape, drafter=drafter, ends=ends, device=device, target_fingerprint=FINGERPRINT,
        num_columns=1, is_alone=True, saves=False, log=None, make_batch=make_batch, validate=None,
        take_first=lambda: None, optimizer=optimizer, counters=Counters(), start_step=0,
    )  # fmt: skip
    engine = Engine(CudaLanes(device), CudaWork(device), parts)
    prepare = partial(
        prepare_step,
        planner=plan,
        columns=(0,),
        make_batch=make_batch,
        denominator=lambda step: planned_denominator(objective=objective, supervised_per_slot=step.supervised_per_slot),
    )
    column_pass = ColumnPass(
        drafter=drafter, ends=ends, loss=partial(block_loss, objective=objective), noise=None,
        target_fingerprint=FINGERPRINT, device=device, account=account, placing=engine.placing,
    )  # fmt: skip
    trainer = Trainer(
        prepare=lambda index: engine.placing.stage(prepare(index=index)), num_steps=1_000_000, start_step=0, plan_digest="",
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


def _make_batch(pack: Pack, use: Use, *, block_size: int, mask_token_id: int, chunk_rows: int) -> Any:
    return make_block_batch(pack=pack, use=use, block_size=block_size, mask_token_id=mask_token_id, chunk_rows=chunk_rows)


def _capture(target: HuggingFaceTarget, pack: Pack, hidden_TKD: torch.Tensor) -> None:
    target.capture(pack, hidden_TKD=hidden_TKD)
