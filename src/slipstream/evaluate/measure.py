"""A prompt set from answers to figures: the target's own answers, the real loop beside them, and the simulated path.

Each function needs only one model in memory, so that a caller can hold the whole target first and the capturing one later.
Equality claims (path, losslessness) are fp32 claims, at batch 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slipstream.evaluate.acceptance import simulate_pack
from slipstream.evaluate.decode import DecodedAnswer, greedy_plain, speculative_decode
from slipstream.evaluate.lossless import Losslessness, compare_answers, teacher_forced_agreement, top_gap_of
from slipstream.evaluate.prompts import PromptSet, answered_document
from slipstream.evaluate.sampling import Sampled, Sampling
from slipstream.evaluate.session import TargetSession
from slipstream.evaluate.summary import AcceptancePath, AcceptanceSummary, summarise
from slipstream.plan.evaluation import plan_validation
from slipstream.records import Pack

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from slipstream.config import DrafterShape
    from slipstream.drafter.dflash import DFlashDrafter
    from slipstream.target.ends import FrozenEnds

TILE = 128
PACK_TOKENS = 1024
"""Packs of the simulation hold at least so many tokens; a longer answer makes them longer."""

Progress = Callable[[], None]
"""Called after each answer."""


@dataclass(frozen=True, slots=True)
class AnswerLimits:
    """Where an answer ends: at a stop token, or after `max_new_tokens`. `sampling` adds a sampled answer, drawn by `seed`."""

    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    sampling: Sampling | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class DecodedSet:
    """Answers of one set, in the order of its prompts: plain greedy, with the drafter, and sampled (empty if not asked)."""

    plain: tuple[DecodedAnswer, ...]
    drafted: tuple[DecodedAnswer, ...]
    sampled: tuple[DecodedAnswer, ...]
    lossless: Losslessness


@dataclass(frozen=True, slots=True)
class SetReport:
    """The figures of one set. `equal_paths`: answers whose simulated path is the decoded one. Tokens a second are of the
    decode loop at batch 1, prompts left out; `None` where the loop gave no token. `bf16_agreement`: share of answer tokens
    that a bfloat16 target would have chosen too, `None` if not asked."""

    name: str
    prompts: int
    skipped: int
    answer_tokens: int
    simulated: AcceptanceSummary
    decoded: AcceptanceSummary
    sampled: AcceptanceSummary | None
    equal_paths: int
    lossless: Losslessness
    plain_tokens_per_second: float | None
    drafted_tokens_per_second: float | None
    bf16_agreement: float | None

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def decode_set(
    prompt_set: PromptSet,
    *,
    session: TargetSession,
    drafter: DFlashDrafter,
    limits: AnswerLimits,
    on_answer: Progress | None = None,
) -> DecodedSet:
    """Answer every prompt: by the target alone, with the drafter's help, and sampled if asked for."""
    shape, sampling = drafter.shape, limits.sampling
    plain, drafted, sampled = [], [], []
    for number, prompt in enumerate(prompt_set.prompts):
        common: dict[str, Any] = {
            "prompt_ids": prompt,
            "max_new_tokens": limits.max_new_tokens,
            "stop_token_ids": limits.stop_token_ids,
        }
        block: dict[str, Any] = {"drafter": drafter, "block_size": shape.block_size, "mask_token_id": shape.mask_token_id}
        plain.append(greedy_plain(session, **common))
        drafted.append(speculative_decode(session, **common, **block))
        if sampling is not None:
            generator = torch.Generator(session.device).manual_seed(limits.seed + number)
            chooser = Sampled(sampling, generator=generator)
            sampled.append(speculative_decode(session, **common, **block, chooser=chooser))
        if on_answer is not None:
            on_answer()
    lossless = compare_answers(
        prompts=prompt_set.prompts,
        expected=[answer.token_ids for answer in plain],
        found=[answer.token_ids for answer in drafted],
        top_gap=top_gap_of(session.target),
    )
    return DecodedSet(plain=tuple(plain), drafted=tuple(drafted), sampled=tuple(sampled), lossless=lossless)


def simulate_set(
    prompt_set: PromptSet,
    *,
    answers: Sequence[Sequence[int]],
    max_new_tokens: int,
    capture: Callable[[Pack], Tensor],
    drafter: DFlashDrafter,
    ends: FrozenEnds,
    shape: DrafterShape,
    on_answer: Progress | None = None,
) -> list[AcceptancePath]:
    """The path of each answer without decoding; `capture(pack)` gives hidden states `[T, K, D]` where the drafter is."""
    documents = [
        answered_document(document_id=number, prompt_ids=prompt, answer_ids=answer)
        for number, (prompt, answer) in enumerate(zip(prompt_set.prompts, answers, strict=True))
    ]
    longest = max(len(document.token_ids) for document in documents)
    planned = plan_validation(
        documents=documents,
        pack_tokens=max(PACK_TOKENS, -(-longest // TILE) * TILE),
        pack_anchors=TILE,
        block_size=shape.block_size,
    )
    paths: dict[int, AcceptancePath] = {}
    for pack, uses in planned:
        found = simulate_pack(
            drafter=drafter,
            ends=ends,
            shape=shape,
            hidden_TKD=capture(pack),
            pack=pack,
            uses=uses,
            max_lengths={number: len(prompt) + max_new_tokens for number, prompt in enumerate(prompt_set.prompts)},
        )
        paths |= {item.document_id: item.path for item in found}
        if on_answer is not None:
            for _ in found:
                on_answer()
    return [paths[number] for number in range(len(documents))]


def agreement(
    prompt_set: PromptSet,
    *,
    answers: Sequence[Sequence[int]],
    target: PreTrainedModel,
    on_answer: Progress | None = None,
) -> float:
    """Share of all answer tokens that are `target`'s argmax, teacher-forced."""
    agreed = 0
    for prompt, answer in zip(prompt_set.prompts, answers, strict=True):
        agreed += teacher_forced_agreement(target, prompt=prompt, answer=answer)
        if on_answer is not None:
            on_answer()
    return agreed / sum(len(answer) for answer in answers)


def report_set(
    prompt_set: PromptSet,
    *,
    decoded: DecodedSet,
    simulated: Sequence[AcceptancePath],
    block_size: int,
    bf16_agreement: float | None,
) -> SetReport:
    """Put the figures of a set together."""
    paths = [answer.path for answer in decoded.drafted]
    return SetReport(
        name=prompt_set.name,
        prompts=len(prompt_set.prompts),
        skipped=prompt_set.skipped,
        answer_tokens=sum(len(answer.token_ids) for answer in decoded.plain),
        simulated=summarise(simulated, block_size=block_size),
        decoded=summarise(paths, block_size=block_size),
        sampled=summarise([a.path for a in decoded.sampled], block_size=block_size) if decoded.sampled else None,
        equal_paths=sum(left == right for left, right in zip(simulated, paths, strict=True)),
        lossless=decoded.lossless,
        plain_tokens_per_second=_rate(decoded.plain),
        drafted_tokens_per_second=_rate(decoded.drafted),
        bf16_agreement=bf16_agreement,
    )


def _rate(answers: Sequence[DecodedAnswer]) -> float | None:
    tokens, seconds = sum(a.decode_tokens for a in answers), sum(a.decode_seconds for a in answers)
    return tokens / seconds if tokens else None
