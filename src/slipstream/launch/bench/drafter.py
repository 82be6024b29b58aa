"""One rank's training step of the drafter, optimizer included, as the trainer runs it: `Trainer.train_step` on a made-up plan.

Waits for: a CUDA device. T context tokens, K taps, D hidden, N anchors, B block size, V vocabulary.
"""

from __future__ import annotations

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
from slipstream.config.recipe import ObjectiveSection, OptimizerSection
from slipstream.drafter import FAMILIES, DFlashDrafter, batch_to, embedding_rows, make_block_batch, to_device
from slipstream.launch.bench.ceilings import median_ms
from slipstream.launch.bench.counters import counters, profile_kernels
from slipstream.objective import block_loss, planned_denominator
from slipstream.objective.linear_ce import ROW_PASSES
from slipstream.observe import Account
from slipstream.records import BlockBatch, HiddenPack, Pack, Use
from slipstream.target.ends import FrozenEnds
from slipstream.trainer.column import ColumnPass
from slipstream.trainer.guard import Counters
from slipstream.trainer.loop import Trainer
from slipstream.trainer.optim import FlatAdamW
from slipstream.trainer.prefetch import PreparedColumn, PreparedStep
from slipstream.trainer.tally import StepTally

Report = Callable[[str], None]
PHASES = ("forward", "loss", "backward", "optimizer")
FINGERPRINT = "random hidden states"


@dataclass(frozen=True, slots=True)
class DrafterWork:
    """What a step trains on: `packs` packs of `documents` documents, all slots of all anchors supervised."""

    documents: int = 2
    document_tokens: int = 2048
    anchors: int = 1024
    packs: int = 1
    chunk_rows: int = 3328
    steps: int = 12


@dataclass(frozen=True, slots=True)
class DrafterBench:
    """Medians over the timed steps, which ran without a synchronisation. Milliseconds on the device; GiB allocated by torch.

    `useful_tflop` counts, for each step, multiply-adds twice and backward as twice forward: all layers on all Q slots and
    the context's keys and values (3 x), fusion without the gradient of its input (2 x), the frozen head on supervised rows
    (2 x), and attention's two products on visible pairs alone (3 x). What a trick leaves out still counts; what is
    computed twice counts once. `growth` is what counters of allocations and compilations gained over the timed steps.
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


def useful_tflop(*, shape: DrafterShape, pack: Pack, use: Use, num_rows: int) -> float:
    """See `DrafterBench`."""
    hidden, width = shape.hidden_size, shape.head_dim
    slots, tokens = len(use.anchors) * shape.block_size, pack.capacity_tokens
    key_value = 2 * hidden * shape.num_key_value_heads * width
    per_slot = 2 * hidden * shape.num_attention_heads * width + key_value + 3 * hidden * shape.intermediate_size
    starts = pack.starts[np.searchsorted(pack.starts, use.anchors, side="right") - 1]
    pairs = float(((use.anchors - starts) + shape.block_size).sum()) * shape.block_size
    attention = 2 * pairs * shape.num_attention_heads * width
    layers = shape.num_layers * (slots * per_slot + tokens * key_value + attention)
    fusion = tokens * shape.num_taps * hidden * hidden
    head = num_rows * hidden * shape.vocab_size
    return 2 * (3 * layers + 2 * fusion + 2 * head) / 1e12


def make_columns(*, shape: DrafterShape, work: DrafterWork, seed: int = 0) -> list[PreparedColumn]:
    """The step's packs with sorted random anchors, each followed by B - 1 tokens of its document."""
    columns, size, length = [], shape.block_size, work.document_tokens
    tokens = work.documents * length
    for index in range(work.packs):
        rng = np.random.default_rng((seed, index))
        each = work.anchors // work.documents
        drawn = [np.sort(rng.permutation(length - size)[:each]) + length * place for place in range(work.documents)]
        anchors = np.concatenate(drawn).astype(np.int32)
        pack = Pack(
            pack_id=index, epoch=0, column=index, slot=0,
            document_ids=np.arange(work.documents, dtype=np.int64),
            starts=(np.arange(work.documents + 1) * length).astype(np.int32),
            token_ids=rng.integers(0, shape.mask_token_id, tokens).astype(np.int32),
            position_ids=np.tile(np.arange(length, dtype=np.int32), work.documents),
            loss_mask=np.ones(tokens, dtype=bool),
        )  # fmt: skip
        counts = np.full(size, len(anchors), dtype=np.int64)
        counts[0] = 0
        use = Use(
            step=0, pack_id=index, use_number=0, anchors=anchors, anchor_valid=np.ones(len(anchors), dtype=bool),
            supervised_per_slot=counts, is_last=False,
        )  # fmt: skip
        batch = make_block_batch(
            pack=pack, use=use, block_size=size, mask_token_id=shape.mask_token_id, chunk_rows=work.chunk_rows
        )
        columns.append(PreparedColumn(pack=pack, use=use, batch=batch, context_tokens=tokens, unique_tokens=tokens))
    return columns


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
    """Events between the phases of steps, read when all is over."""

    def __init__(self) -> None:
        self._steps: list[list[tuple[str, torch.cuda.Event]]] = []

    def begin(self) -> None:
        self._steps.append([])
        self.mark("begin")

    def mark(self, name: str) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._steps[-1].append((name, event))

    def medians(self) -> tuple[float, dict[str, float]]:
        """Milliseconds of a step and of its phases; a phase that comes once for each pack is summed."""
        totals = [steps[0][1].elapsed_time(steps[-1][1]) for steps in self._steps]
        phases: dict[str, list[float]] = {name: [] for name in PHASES}
        for steps in self._steps:
            sums = dict.fromkeys(PHASES, 0.0)
            for (_, before), (name, after) in zip(steps, steps[1:], strict=False):
                sums[name] += before.elapsed_time(after)
            for name, value in sums.items():
                phases[name].append(value)
        return statistics.median(totals), {name: statistics.median(values) for name, values in phases.items()}


class _MarkedDrafter:
    """A drafter that marks the end of its forward, and that of backward before it is called again."""

    def __init__(self, drafter: DFlashDrafter, marks: _Marks) -> None:
        self._drafter, self._marks = drafter, marks
        self.make_masks = drafter.make_masks
        self.forwards = 0

    def __call__(self, **arguments: Any) -> Tensor:
        if self.forwards:
            self._marks.mark("backward")
        self.forwards += 1
        hidden: Tensor = self._drafter(**arguments)
        self._marks.mark("forward")
        return hidden


@dataclass(slots=True)
class _Rig:
    """Everything that a step runs on."""

    drafter: DFlashDrafter
    marked: _MarkedDrafter
    ends: FrozenEnds
    trainer: Trainer
    marks: _Marks
    step: PreparedStep
    objective: ObjectiveSection

    def run(self) -> Tensor:
        """One training step, marked; its loss, unread."""
        self.marks.begin()
        self.marked.forwards = 0
        result = self.trainer.train_step(self.step)
        self.marks.mark("optimizer")
        return result.loss_sum / result.weight_sum

    @torch.no_grad()
    def validate(self, device: torch.device) -> None:
        """The forward pass without gradients, which compiles on its own."""
        column = self.step.columns[0]
        batch, rows = embedding_rows(column.batch, self.ends.embedding_VD)
        hidden = self.trainer.source.take(column.use.pack_id).hidden_TKD
        blocks = self.drafter(
            hidden_TKD=hidden,
            batch=batch_to(batch, device=device),
            embedding_VD=to_device(rows, device=device),
            masks=self.drafter.make_masks(batch),
        )
        block_loss(
            hidden_NBD=blocks,
            head_VD=self.ends.head_VD,
            batch=batch_to(column.batch, device=device),
            objective=self.objective,
        )


def _build(*, shape: DrafterShape, work: DrafterWork, device: torch.device) -> _Rig:
    objective, section = ObjectiveSection(chunk_rows=work.chunk_rows), OptimizerSection()
    drafter = FAMILIES["dflash"](shape=shape, dtype=torch.bfloat16, device=device, attention="auto")
    with torch.no_grad():
        for weight in drafter.parameters():
            _ = weight.normal_(0.0, 0.02) if weight.dim() > 1 else weight.fill_(1.0)
    embedding, head = (_random(shape.vocab_size, shape.hidden_size, device=device) * 0.02 for _ in range(2))
    ends = FrozenEnds(embedding_VD=embedding.to("cpu"), head_VD=head)
    del embedding
    hidden = [_random(work.documents * work.document_tokens, shape.num_taps, shape.hidden_size, device=device)] * work.packs
    marks, account = _Marks(), Account("bench")
    marked = _MarkedDrafter(drafter, marks)

    def loss(**arguments: Any) -> Any:
        sums = block_loss(**arguments, objective=objective)
        marks.mark("loss")
        return sums

    columns = make_columns(shape=shape, work=work)
    optimizer = FlatAdamW(drafter, section=section, num_extra=StepTally.size(shape.block_size))
    _mark_before(optimizer, marks)
    column_pass = ColumnPass(
        drafter=marked, ends=ends, loss=loss, noise=None, target_fingerprint=FINGERPRINT, device=device, account=account
    )
    trainer = Trainer(
        prepare=lambda index: step, num_steps=1000, start_step=0, plan_digest="", block_size=shape.block_size,
        source=_Slots(hidden), column_pass=column_pass, optimizer=optimizer, section=section,
        checkpoint_every_steps=1000, saving=None, group=None, hooks=(), counters=Counters(), account=account,
    )  # fmt: skip
    counts = sum(column.use.supervised_per_slot for column in columns)
    denominator = planned_denominator(objective=objective, supervised_per_slot=np.asarray(counts))
    step = PreparedStep(index=500, epoch=0, denominator=denominator, columns=tuple(columns))
    return _Rig(drafter=drafter, marked=marked, ends=ends, trainer=trainer, marks=marks, step=step, objective=objective)
