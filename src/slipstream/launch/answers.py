"""Validation prompts answered by the target itself, once, before step 1; kept by the target's fingerprint for later runs."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from slipstream.config import Recipe, TargetInfo
from slipstream.corpus.chat import ChatEncoder
from slipstream.corpus.meta import read_meta
from slipstream.corpus.sources import read_conversations
from slipstream.errors import PlanError, PreflightError, UsageError
from slipstream.evaluate.prompts import make_prompt_set

CACHE_FOLDER = ".answers"
ANSWERS_FILE, KEY_FILE = "answers.jsonl", "answers.key"
"""In a run's validation folder: the answers, and the key that they belong to."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Answer:
    """A prompt and the target's greedy answer as token ids; the answer ends with a stop token or at the length limit."""

    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]


def read_prompts(*, recipe: Recipe, info: TargetInfo, encoder: ChatEncoder) -> list[list[int]]:
    """Token ids of the validation prompts, each through the last user turn, in the order of the file.

    Taken as `evaluate` takes them: conversations without a user turn, and prompts whose longest answer would not fit the
    target's positions, are left out, with a warning. Raises `PreflightError` when none is left.
    """
    path, section = recipe.validation.prompts, recipe.validation
    assert path is not None, "asked for only where the recipe validates"
    try:
        found = make_prompt_set(
            name=path,
            conversations=(conversation.messages for conversation in read_conversations([Path(path)])),
            encode=encoder.encode_prompt,
            limit=section.max_prompts,
            max_prompt_tokens=info.max_position_embeddings - section.max_new_tokens,
        )
    except UsageError as error:
        raise PreflightError(key="validation.prompts", value=path, rule=f"{error.key}: {error.rule}") from error
    if found.skipped:
        log.warning("%d conversations of %s are no usable prompts and are left out", found.skipped, path)
    return [list(prompt) for prompt in found.prompts]


def chat_encoder(*, recipe: Recipe, info: TargetInfo) -> ChatEncoder:
    """The target's chat template, with the arguments that the corpus was prepared with."""
    return ChatEncoder(info.folder, template_arguments=read_meta(recipe.corpus.path).options.get("template_arguments"))


def answers_key(
    *,
    prompts: Sequence[Sequence[int]],
    recipe: Recipe,
    target_fingerprint: str,
    stop_token_ids: Sequence[int],
) -> str:
    """Name under which answers are kept: a digest of the target, its dtype, the prompts and how they are answered."""
    section = recipe.validation
    content = [
        target_fingerprint,
        recipe.target.hidden_dtype,
        section.max_new_tokens,
        section.batch_size,
        list(stop_token_ids),
        [list(prompt) for prompt in prompts],
    ]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]


def write_answers(*, path: Path, answers: Sequence[Answer]) -> None:
    """Write answers as JSON lines, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    temporary.write_text("".join(json.dumps(asdict(answer)) + "\n" for answer in answers))
    os.replace(temporary, path)


def read_answers(path: Path) -> list[Answer]:
    """Read answers back. Raises `PlanError` when the file is missing, torn or holds something else."""
    hint = "remove it; the target answers again"
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        answers = [Answer(prompt_ids=tuple(row["prompt_ids"]), answer_ids=tuple(row["answer_ids"])) for row in rows]
    except FileNotFoundError as error:
        raise PlanError(key=str(path), value="missing", rule="holds the answers to the validation prompts") from error
    except (ValueError, KeyError, TypeError) as error:
        raise PlanError(key=str(path), value="damaged", rule=f"cannot be read: {error!r}", hint=hint) from error
    if not answers:
        raise PlanError(key=str(path), value="empty", rule="holds no answer", hint=hint)
    return answers
