"""The target answers the validation prompts, before step 1."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.config import Recipe, TargetInfo
from slipstream.launch.answers import (
    ANSWERS_FILE,
    CACHE_FOLDER,
    KEY_FILE,
    Answer,
    answers_key,
    chat_encoder,
    read_answers,
    read_prompts,
    write_answers,
)
from slipstream.launch.child import Control
from slipstream.launch.roles import Job
from slipstream.launch.roles.opening import open_job
from slipstream.observe import Account
from slipstream.target.fingerprint import fingerprint_target


class _AskedToStop(Exception):
    """Leaves the generation between two batches."""


def play_answers(job: Job, control: Control, account: Account) -> dict[str, Any]:
    """Answer the validation prompts greedily, unless this run, or an earlier one of the same target, has the very answers."""
    opened = open_job(job)
    recipe, info = opened.recipe, opened.info
    control.report("ready", {})
    asked = ask(recipe=recipe, info=info)
    own, own_key = opened.folder.validation / ANSWERS_FILE, opened.folder.validation / KEY_FILE
    if own.is_file() and own_key.is_file() and own_key.read_text() == asked.key:
        return {"answers": len(read_answers(own)), "reused": True}

    def progress(done: int, of: int) -> None:
        control.report("progress", {"stage": "answers", "done": done, "of": of})
        if control.stopping() and done < of:
            raise _AskedToStop

    reused = asked.kept.is_file()
    try:
        with account.state("target"):
            answers = answer(asked, recipe=recipe, info=info, device=job["device"], on_progress=progress)
    except _AskedToStop:
        return {"answers": 0, "reused": False}
    own_key.unlink(missing_ok=True)  # between the two writes, what is there must not pass for either
    write_answers(path=own, answers=answers)
    temporary = own_key.with_suffix(".part")
    temporary.write_text(asked.key)
    os.replace(temporary, own_key)
    return {"answers": len(answers), "reused": reused}


@dataclass(frozen=True, slots=True)
class Asked:
    """The prompts of a recipe as token ids, what ends an answer, and the name and place under which answers are kept."""

    prompts: list[list[int]]
    stop_token_ids: tuple[int, ...]
    key: str
    kept: Path


def ask(*, recipe: Recipe, info: TargetInfo) -> Asked:
    """Read the validation prompts. Raises `PreflightError` when none can be used."""
    encoder = chat_encoder(recipe=recipe, info=info)
    prompts = read_prompts(recipe=recipe, info=info, encoder=encoder)
    key = answers_key(
        prompts=prompts,
        recipe=recipe,
        target_fingerprint=fingerprint_target(info),
        stop_token_ids=encoder.stop_token_ids,
    )
    kept = Path(recipe.runs) / CACHE_FOLDER / key
    return Asked(prompts=prompts, stop_token_ids=encoder.stop_token_ids, key=key, kept=kept)


def answer(
    asked: Asked, *, recipe: Recipe, info: TargetInfo, device: str, on_progress: Callable[[int, int], None]
) -> list[Answer]:
    """The target's greedy answers: those that were kept, or new ones, which are kept from then on."""
    if asked.kept.is_file():
        return read_answers(asked.kept)
    from slipstream.target.generate import greedy_answers  # here, not above: answers that were kept need no model
    from slipstream.target.loading import load_full

    section = recipe.validation
    generated = greedy_answers(
        model=load_full(info=info, dtype=recipe.target.hidden_dtype, device=device),
        prompts=asked.prompts,
        max_new_tokens=section.max_new_tokens,
        stop_token_ids=asked.stop_token_ids,
        batch_size=section.batch_size,
        on_progress=on_progress,
    )
    answers = [
        Answer(prompt_ids=tuple(prompt), answer_ids=tuple(found))
        for prompt, found in zip(asked.prompts, generated, strict=True)
    ]
    write_answers(path=asked.kept, answers=answers)
    return answers
