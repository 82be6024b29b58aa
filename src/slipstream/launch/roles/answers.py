"""The target answers the validation prompts, before step 1."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

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
from slipstream.launch.roles.opening import Opening, open_job
from slipstream.observe import Account
from slipstream.target.fingerprint import fingerprint_target
from slipstream.target.generate import greedy_answers
from slipstream.target.loading import load_full


class _AskedToStop(Exception):
    """Leaves the generation between two batches."""


def play_answers(job: Job, control: Control, account: Account) -> dict[str, Any]:
    """Answer the validation prompts greedily, unless this run, or an earlier one of the same target, has the very answers."""
    opened = open_job(job)
    recipe, info = opened.recipe, opened.info
    control.report("ready", {})
    encoder = chat_encoder(recipe=recipe, info=info)
    prompts = read_prompts(recipe=recipe, info=info, encoder=encoder)
    key = answers_key(
        prompts=prompts,
        recipe=recipe,
        target_fingerprint=fingerprint_target(info),
        stop_token_ids=encoder.stop_token_ids,
    )
    own, own_key = opened.folder.validation / ANSWERS_FILE, opened.folder.validation / KEY_FILE
    if own.is_file() and own_key.is_file() and own_key.read_text() == key:
        return {"answers": len(read_answers(own)), "reused": True}
    kept = Path(recipe.runs) / CACHE_FOLDER / key
    reused = kept.is_file()
    if reused:
        answers = read_answers(kept)
    else:
        try:
            with account.state("target"):
                answers = _answer(opened, job=job, control=control, prompts=prompts, stops=encoder.stop_token_ids)
        except _AskedToStop:
            return {"answers": 0, "reused": False}
        write_answers(path=kept, answers=answers)
    own_key.unlink(missing_ok=True)  # between the two writes, what is there must not pass for either
    write_answers(path=own, answers=answers)
    temporary = own_key.with_suffix(".part")
    temporary.write_text(key)
    os.replace(temporary, own_key)
    return {"answers": len(answers), "reused": reused}


def _answer(opened: Opening, *, job: Job, control: Control, prompts: list[list[int]], stops: tuple[int, ...]) -> list[Answer]:
    def progress(done: int, of: int) -> None:
        control.report("progress", {"stage": "answers", "done": done, "of": of})
        if control.stopping() and done < of:
            raise _AskedToStop

    section = opened.recipe.validation
    generated = greedy_answers(
        model=load_full(info=opened.info, dtype=opened.recipe.target.hidden_dtype, device=job["device"]),
        prompts=prompts,
        max_new_tokens=section.max_new_tokens,
        stop_token_ids=stops,
        batch_size=section.batch_size,
        on_progress=progress,
    )
    return [
        Answer(prompt_ids=tuple(prompt), answer_ids=tuple(answer)) for prompt, answer in zip(prompts, generated, strict=True)
    ]
