"""The target answers the validation prompts, once, before step 1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slipstream.launch.answers import CACHE_FOLDER, Answer, answers_key, read_answers, read_prompts, write_answers
from slipstream.launch.child import Control
from slipstream.launch.planning import ANSWERS_FILE
from slipstream.launch.roles import Job
from slipstream.launch.roles.opening import open_job
from slipstream.target.fingerprint import fingerprint_target
from slipstream.target.generate import greedy_answers
from slipstream.target.loading import load_full


def play_answers(job: Job, control: Control) -> dict[str, Any]:
    """Answer the validation prompts greedily, or take the answers kept from an earlier run of the same target."""
    opened = open_job(job)
    recipe, info, folder = opened.recipe, opened.info, opened.folder
    control.report("ready", {})
    prompts = read_prompts(recipe=recipe, info=info)
    fingerprint = fingerprint_target(info)
    kept = Path(recipe.runs) / CACHE_FOLDER / answers_key(prompts=prompts, recipe=recipe, target_fingerprint=fingerprint)
    answers = read_answers(kept)
    reused = bool(answers)
    if not reused:
        model = load_full(info=info, dtype=recipe.target.dtype, device=job["device"])
        generated = greedy_answers(
            model=model,
            prompts=prompts,
            max_new_tokens=recipe.validation.max_new_tokens,
            stop_token_ids=info.eos_token_ids,
            batch_size=recipe.validation.batch_size,
            on_progress=lambda done, of: control.report("progress", {"stage": "answers", "done": done, "of": of}),
        )
        answers = [
            Answer(prompt_ids=tuple(prompt), answer_ids=tuple(answer))
            for prompt, answer in zip(prompts, generated, strict=True)
        ]
        write_answers(path=kept, answers=answers)
    write_answers(path=folder.validation / ANSWERS_FILE, answers=answers)
    return {"answers": len(answers), "reused": reused}
