"""One process of the replay measurement: a target that stays, and drafters trained one after the other, as a run trains them.

The target is loaded once, and what the first drafter compiles serves the others. Acceptance is measured on states that no
slot has rounded, whatever the slots of training are: they are those that a server has.

Shape letters: T context tokens · K tapped layers · D hidden size.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slipstream.config import Recipe, make_recipe, read_target_info, resolve_drafter
from slipstream.corpus.store import CorpusStore
from slipstream.device.float8 import DTYPE, dequantise
from slipstream.device.threads import set_threads
from slipstream.drafter import DFlashDrafter
from slipstream.errors import SlipstreamError, WorkerFailed
from slipstream.evaluate.acceptance import simulate_pack
from slipstream.evaluate.summary import AcceptancePath
from slipstream.export.warm_start import read_warm_start
from slipstream.launch.answers import Answer
from slipstream.launch.bench.paired import PromptCounts
from slipstream.launch.new_drafter import new_drafter
from slipstream.launch.planning import RunPlan, ValidationPack, corpus_index, validation_packs
from slipstream.launch.recording import load_recipe_target
from slipstream.launch.roles.colocated import open_source
from slipstream.observe import Account, MetricLog
from slipstream.plan import Planner, make_schedule
from slipstream.target.ends import load_frozen_ends
from slipstream.trainer import ColumnShare, MainRank, RunParts, build_trainer


@dataclass(frozen=True, slots=True)
class Trained:
    """One drafter: what it was trained with, and what it is worth.

    `planned_distance` is the shortest distance of regular packs, none without replays. `counts` are measured on the target's
    own states, `rounded` on states rounded to eight bits, for slots that do so.
    """

    name: str
    seed: int
    steps: int
    anchors: int
    packs: int
    planned_distance: int | None
    seconds: float
    counts: PromptCounts
    rounded: PromptCounts | None


class Ground:
    """What all drafters of a process share. `recipe` is the one that theirs differ from in plan and slots only."""

    def __init__(self, recipe: Recipe, *, answers: Sequence[Answer], device: str) -> None:
        self._recipe, self._device = recipe, device
        self._info = read_target_info(recipe.target.model)
        self._shape = resolve_drafter(recipe=recipe, info=self._info)
        self._store = CorpusStore.open(Path(recipe.corpus.path))
        self._ends = load_frozen_ends(info=self._info, dtype=recipe.drafter.dtype, device=device)
        self._target = load_recipe_target(recipe=recipe, info=self._info, shape=self._shape, device=device)
        self._validation = validation_packs(answers=answers, recipe=recipe, first_pack=0)
        self._states = [self._capture(item, rounded=False) for item in self._validation]

    def train(self, name: str, recipe: Recipe) -> Trained:
        """Train a drafter to the end of its plan and measure it. Raises what a run raises."""
        schedule = make_schedule(index=corpus_index(self._store), plan=recipe.plan, block_size=recipe.drafter.block_size)
        planner = Planner(schedule=schedule, document=self._store.document)
        plan = RunPlan(schedule=schedule, planner=planner, validation=(), ranks=1, start_step=0)
        began = time.perf_counter()
        drafter = self._fit(recipe, plan=plan)
        seconds = time.perf_counter() - began
        summary = schedule.summary()
        rounds = recipe.slot_dtype != recipe.target.hidden_dtype
        trained = Trained(
            name=name,
            seed=recipe.plan.seed,
            steps=schedule.num_steps,
            anchors=summary.anchors,
            packs=summary.packs,
            planned_distance=summary.steady_distance,
            seconds=seconds,
            counts=self._measure(drafter, self._states),
            rounded=self._measure(drafter, self._rounded_states()) if rounds else None,
        )
        del drafter
        self._clear()
        return trained

    def _clear(self) -> None:
        """Leave the next drafter a process like a new one: none of its tensors shares a piece of memory with what went.

        Warm-up gives back what is wholly free; weights in a corner of a freed piece would hold all of it, to be cut up anew.
        """
        gc.collect()
        torch.cuda.empty_cache()  # nothing on a CPU

    def _fit(self, recipe: Recipe, *, plan: RunPlan) -> DFlashDrafter:
        device, account = torch.device(self._device), Account("bench")
        warm_start = recipe.drafter.warm_start
        drafter = new_drafter(recipe=recipe, shape=self._shape, device=self._device, draws=warm_start is None)
        source = open_source(
            recipe=recipe, info=self._info, shape=self._shape, plan=plan, target=self._target, rank=0,
            device=self._device, account=account,
        )  # fmt: skip
        try:
            parts = RunParts(
                recipe=recipe, shape=self._shape, schedule=plan.schedule, planner=plan.planner, source=source,
                drafter=drafter, ends=self._ends, target_fingerprint=self._target.fingerprint,
                share=ColumnShare(rank=0, ranks=1), group=None, account=account, device=device,
            )  # fmt: skip
            with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as scratch, MetricLog({}) as log:
                main = MainRank(log=log, checkpoints=Path(scratch))
                trainer = build_trainer(parts=parts, main=main)
                if warm_start is not None:
                    trainer.optimizer.load_weights(read_warm_start(Path(warm_start), shape=self._shape))
                trainer.fit()
        finally:
            source.close()
        return drafter

    def _measure(self, drafter: DFlashDrafter, states: Sequence[torch.Tensor]) -> PromptCounts:
        paths: dict[int, AcceptancePath] = {}
        for item, hidden_TKD in zip(self._validation, states, strict=True):
            found = simulate_pack(
                drafter=drafter,
                ends=self._ends,
                shape=self._shape,
                hidden_TKD=hidden_TKD,
                pack=item.pack,
                uses=item.uses,
                max_lengths=item.max_lengths,
            )
            paths |= {document.document_id: document.path for document in found}
        ordered = [paths[number] for number in sorted(paths)]
        return PromptCounts(
            tokens=tuple(sum(path.lengths) for path in ordered), steps=tuple(len(path.lengths) for path in ordered)
        )

    def _rounded_states(self) -> list[torch.Tensor]:
        return [self._capture(item, rounded=True) for item in self._validation]

    def _capture(self, item: ValidationPack, *, rounded: bool) -> torch.Tensor:
        shape = (item.pack.capacity_tokens, self._shape.num_taps, self._shape.hidden_size)
        wide_TKD = torch.zeros(shape, dtype=getattr(torch, self._recipe.target.hidden_dtype), device=self._device)
        if not rounded:
            self._target.capture(item.pack, hidden_TKD=wide_TKD)
            return wide_TKD
        values_TKD = torch.zeros(shape, dtype=DTYPE, device=self._device)
        scale_TK = torch.zeros(shape[:2], device=self._device)
        self._target.capture(item.pack, hidden_TKD=values_TKD, scale_TK=scale_TK)
        dequantise(values_TKD, scale_TK=scale_TK, out_TKD=wide_TKD)
        return wide_TKD


_ground: list[Ground] = []
"""Of a process that the measurement started: opened by its first drafter, for all that follow."""


def train_in_child(
    name: str, recipe: dict[str, Any], *, base: dict[str, Any], answers: Sequence[Answer], device: str, threads: int
) -> Trained:
    """`Ground.train` in a process of its own, which stays for the next one. Raises `WorkerFailed`."""
    try:
        if not _ground:
            set_threads(threads)
            _ground.append(Ground(make_recipe(base), answers=answers, device=device))
        return _ground[0].train(name, make_recipe(recipe))
    except SlipstreamError as error:  # a process's border: what is raised here is made again from its message over there
        raise WorkerFailed(f"{name}: {error}") from None
