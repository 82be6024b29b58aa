"""What every process of a run derives from the run folder alone: schedule, validation packs, owners and slots.

Nothing here is sent between processes: the supervisor, the targets and the drafters each read the same files and get the
same result.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from slipstream.config import DrafterShape, Recipe, TargetInfo
from slipstream.corpus.store import CorpusStore
from slipstream.errors import PlanError
from slipstream.launch.answers import ANSWERS_FILE, Answer, read_answers
from slipstream.plan import CorpusIndex, Planner, Schedule, make_schedule, plan_validation
from slipstream.records import Document, Pack, Use
from slipstream.runfolder import RunFolder
from slipstream.transport.layout import SlotLayout
from slipstream.transport.ledger import PackOrder

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ValidationPack:
    """A pack of answered validation prompts and the uses that cover all its anchors. Its slot is kept for the whole run.

    `max_lengths[document_id]` is the length in tokens at which decoding would have stopped.
    """

    pack: Pack
    uses: tuple[Use, ...]
    max_lengths: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The planned run as one process sees it. `start_step` is the cursor to continue from."""

    schedule: Schedule
    planner: Planner
    validation: tuple[ValidationPack, ...]
    ranks: int
    start_step: int

    @property
    def training_slots(self) -> int:
        """Slots of one rank's pool for training packs."""
        return self.schedule.num_columns // self.ranks * self.schedule.slots_per_column

    def num_slots(self, rank: int) -> int:
        """Slots of one rank's pool, those of the validation packs that it measures included."""
        return self.training_slots + len(self.measured_by(rank))

    def orders(self) -> list[PackOrder]:
        """All packs in the order they are to be made: validation first, then those alive at the cursor, then the rest."""
        kept = [
            PackOrder(
                pack_id=item.pack.pack_id,
                rank=index % self.ranks,
                slot=self.training_slots + index // self.ranks,
                kept=True,
            )
            for index, item in enumerate(self.validation)
        ]
        per_column = self.schedule.slots_per_column
        return kept + [
            PackOrder(
                pack_id=order.pack_id,
                rank=order.column % self.ranks,
                slot=order.column // self.ranks * per_column + order.slot,
                kept=False,
            )
            for order in self.planner.issue_order(start_step=self.start_step)
        ]

    def pack(self, pack_id: int) -> Pack:
        """A training or validation pack by its id."""
        first = self.schedule.num_packs
        return self.validation[pack_id - first].pack if pack_id >= first else self.planner.pack(pack_id)

    def measured_by(self, rank: int) -> tuple[ValidationPack, ...]:
        """The validation packs that a drafter rank measures: rank, rank + ranks, ...; none where there are more ranks."""
        return self.validation[rank :: self.ranks]

    def owned_columns(self, rank: int) -> tuple[int, ...]:
        """The columns that a drafter rank trains on."""
        return tuple(range(rank, self.schedule.num_columns, self.ranks))


def corpus_index(store: CorpusStore) -> CorpusIndex:
    """What the plan needs to know of a corpus."""
    return CorpusIndex(num_tokens=store.num_tokens, num_anchors=store.num_anchors, fingerprint=store.meta.fingerprint)


def write_schedule(*, recipe: Recipe, folder: RunFolder) -> Schedule:
    """Plan the run and save the schedule, or, where one is saved, prove that it is the one this recipe gives.

    Raises `PlanError` when it is not: the corpus, a key of `[plan]` or the block size has changed since.
    """
    store = CorpusStore.open(Path(recipe.corpus.path))
    schedule = make_schedule(index=corpus_index(store), plan=recipe.plan, block_size=recipe.drafter.block_size)
    if not folder.schedule.is_dir():
        schedule.save(folder.schedule)
        return schedule
    saved = Schedule.load(folder.schedule)
    if saved.digest != schedule.digest:
        raise PlanError(
            key="corpus.path",
            value=recipe.corpus.path,
            rule=f"gives the plan {schedule.digest[:12]}, the run was started with {saved.digest[:12]}",
            hint="the corpus, a key of [plan] or drafter.block_size changed since; start a run of another name",
        )
    return saved


def open_run_plan(*, recipe: Recipe, folder: RunFolder, ranks: int, start_step: int) -> RunPlan:
    """Read the schedule, the corpus and the validation answers of a run. Raises `PlanError` or `CorpusError` when damaged."""
    store = CorpusStore.open(Path(recipe.corpus.path))
    schedule = Schedule.load(folder.schedule)
    answers = [] if recipe.validation.prompts is None else read_answers(folder.validation / ANSWERS_FILE)
    return RunPlan(
        schedule=schedule,
        planner=Planner(schedule=schedule, document=store.document),
        validation=validation_packs(answers=answers, recipe=recipe, first_pack=schedule.num_packs),
        ranks=ranks,
        start_step=start_step,
    )


def validation_packs(*, answers: Sequence[Answer], recipe: Recipe, first_pack: int) -> tuple[ValidationPack, ...]:
    """Pack the answered prompts; their pack ids follow the training packs', in the order planned.

    An answer that is longer than a pack cannot be measured: it is left out, with a warning. Raises `PlanError` when all are.
    """
    documents = [answer_document(index=index, answer=answer) for index, answer in enumerate(answers)]
    fitting = [document for document in documents if len(document.token_ids) <= recipe.plan.pack_tokens]
    if documents and not fitting:
        raise PlanError(
            key="plan.pack_tokens",
            value=recipe.plan.pack_tokens,
            rule=f"is shorter than every one of the {len(documents)} validation prompts with its answer",
            hint="raise it, lower validation.max_new_tokens, or take shorter validation.prompts",
        )
    if len(fitting) < len(documents):
        log.warning("%d of %d validation answers are longer than a pack", len(documents) - len(fitting), len(documents))
    limit = recipe.validation.max_new_tokens
    max_lengths = {index: len(answer.prompt_ids) + limit for index, answer in enumerate(answers)}
    planned = plan_validation(
        documents=fitting,
        pack_tokens=recipe.plan.pack_tokens,
        pack_anchors=recipe.plan.pack_anchors,
        block_size=recipe.drafter.block_size,
    )
    return tuple(
        ValidationPack(
            pack=replace(pack, pack_id=first_pack + index),
            uses=tuple(replace(use, pack_id=first_pack + index) for use in uses),
            max_lengths=max_lengths,
        )
        for index, (pack, uses) in enumerate(planned)
    )


def answer_document(*, index: int, answer: Answer) -> Document:
    """A prompt with the target's own answer; the answer is what the assistant generated."""
    ids = np.asarray([*answer.prompt_ids, *answer.answer_ids], dtype=np.int32)
    mask = np.zeros(len(ids), dtype=np.bool_)
    mask[len(answer.prompt_ids) :] = True
    return Document(document_id=index, token_ids=ids, loss_mask=mask)


def slot_layout(*, recipe: Recipe, shape: DrafterShape, info: TargetInfo) -> SlotLayout:
    """The slot that one pack's hidden states need: the target's dtype, so that nothing is rounded on the way, or e4m3."""
    return SlotLayout(
        pack_tokens=recipe.plan.pack_tokens,
        num_taps=shape.num_taps,
        hidden_size=info.hidden_size,
        dtype=recipe.slot_dtype,
    )
