"""The target's own greedy answers from this process, into a file of answers, one batch a write.

Batches are planned over all prompts, finished or not, so that an interrupted file ends up with the same answers as one written
in one go.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from slipstream.target.answer_file import Answer, AnswerFile, Prompt
from slipstream.target.generate import Progress, answer_batch, check_prompts, plan_batches


@dataclass(frozen=True, slots=True)
class Greedy:
    """How a target answers here: at most so many tokens, in batches of so many prompts, through one of the stop tokens."""

    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    batch_size: int


def answer_resumably(
    *,
    model: PreTrainedModel,
    prompts: Sequence[Prompt],
    file: AnswerFile,
    decode: Callable[[Sequence[int]], str],
    greedy: Greedy,
    on_progress: Progress | None = None,
) -> None:
    """Answer what the file lacks and append it; prompts that come twice are answered once. `decode` gives an answer's text."""
    unique = {file.key(prompt.token_ids): prompt for prompt in prompts}
    keys, kept = list(unique), list(unique.values())
    ids = [prompt.token_ids for prompt in kept]
    check_prompts(model=model, prompts=ids, max_new_tokens=greedy.max_new_tokens)
    done = 0
    for batch in plan_batches(prompts=ids, batch_size=greedy.batch_size):
        if any(keys[index] not in file for index in batch):
            found = answer_batch(
                model=model,
                prompts=[ids[index] for index in batch],
                max_new_tokens=greedy.max_new_tokens,
                stop_token_ids=greedy.stop_token_ids,
            )
            answers = [as_answer(tokens, decode=decode, stop_token_ids=greedy.stop_token_ids) for tokens in found]
            pairs = zip(batch, answers, strict=True)
            file.append([(kept[index], answer) for index, answer in pairs if keys[index] not in file])
        done += len(batch)
        if on_progress is not None:
            on_progress(done, len(kept))


def as_answer(token_ids: Sequence[int], *, decode: Callable[[Sequence[int]], str], stop_token_ids: Sequence[int]) -> Answer:
    """An answer of tokens: its text is what comes before a stop token; without one the limit cut it."""
    stopped = token_ids[-1] in stop_token_ids
    text = decode(token_ids[:-1] if stopped else token_ids)
    return Answer(token_ids=tuple(token_ids), text=text, finish="stop" if stopped else "length")
