"""Validation prompts answered by the target itself, once, before step 1; kept by the target's fingerprint for later runs."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

from slipstream.config import Recipe, TargetInfo
from slipstream.corpus.chat import ChatEncoder
from slipstream.corpus.meta import read_meta
from slipstream.corpus.sources import read_conversations
from slipstream.errors import PreflightError

CACHE_FOLDER = ".answers"


@dataclass(frozen=True, slots=True)
class Answer:
    """A prompt and the target's greedy answer as token ids; the answer ends with a stop token or at the length limit."""

    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]


def read_prompts(*, recipe: Recipe, info: TargetInfo) -> list[list[int]]:
    """Token ids of the validation prompts, each through the last user turn, in the order of the file.

    They are rendered with the template arguments that the corpus was prepared with.
    """
    path = recipe.validation.prompts
    if path is None:
        return []
    arguments = read_meta(recipe.corpus.path).options.get("template_arguments")
    encoder = ChatEncoder(info.folder, template_arguments=arguments)
    prompts: list[list[int]] = []
    for conversation in islice(read_conversations([Path(path)]), recipe.validation.max_prompts):
        prompts.append(encoder.encode_prompt(conversation.prompt))
    if not prompts:
        raise PreflightError(key="validation.prompts", value=path, rule="holds no conversation with a user turn")
    return prompts


def answers_key(*, prompts: Sequence[Sequence[int]], recipe: Recipe, target_fingerprint: str) -> str:
    """Name under which answers are kept: a digest of the target, its dtype, the prompts and how they are answered."""
    section = recipe.validation
    content = [target_fingerprint, recipe.target.dtype, section.max_new_tokens, section.batch_size, [list(p) for p in prompts]]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]


def write_answers(*, path: Path, answers: Sequence[Answer]) -> None:
    """Write answers as JSON lines, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    temporary.write_text("".join(json.dumps(asdict(answer)) + "\n" for answer in answers))
    os.replace(temporary, path)


def read_answers(path: Path) -> list[Answer]:
    """Read answers back; no file means that there is no validation."""
    if not path.is_file():
        return []
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [Answer(prompt_ids=tuple(row["prompt_ids"]), answer_ids=tuple(row["answer_ids"])) for row in rows]
