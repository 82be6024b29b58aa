"""The target's own greedy answers, in batches. Only the argmax decides: no sampling, penalty or default of the model's files.

Batches are padded on the left and masked. In bfloat16 the shapes of a batch move rounding, hence now and then a token; equal to
batch size 1 only in float32. Shape letters: R rows of a batch · L tokens of a row · V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import cast

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from slipstream.errors import TargetError

CHECK_EVERY_CUDA = 16
"""Tokens between two looks at who has finished on a GPU: a look makes the CPU wait, a token too many is only cut off."""

Progress = Callable[[int, int], None]
"""Called with the number of finished prompts and of all."""


def greedy_answers(
    *,
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    stop_token_ids: Sequence[int],
    batch_size: int,
    on_progress: Progress | None = None,
) -> list[list[int]]:
    """Answers as token ids, in the order of the prompts; each ends with a stop token, or after `max_new_tokens`.

    Batch size 1 takes no padding and no mask: the exact path. Raises `TargetError` for an empty prompt, or one that the target
    is too short for.
    """
    answers: list[list[int]] = [[] for _ in prompts]
    done = 0
    check_prompts(model=model, prompts=prompts, max_new_tokens=max_new_tokens)
    for batch in plan_batches(prompts=prompts, batch_size=batch_size):
        found = answer_batch(
            model=model,
            prompts=[prompts[index] for index in batch],
            max_new_tokens=max_new_tokens,
            stop_token_ids=stop_token_ids,
        )
        for index, answer in zip(batch, found, strict=True):
            answers[index] = answer
        done += len(batch)
        if on_progress is not None:
            on_progress(done, len(prompts))
    return answers


def plan_batches(*, prompts: Sequence[Sequence[int]], batch_size: int) -> list[list[int]]:
    """Prompt indices by falling length, cut into batches: little padding, and what memory allows shows in the first batch."""
    order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


def check_prompts(*, model: PreTrainedModel, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    """Raises `TargetError` for an empty prompt, and for a prompt whose longest answer would not fit the target's positions."""
    room = getattr(model.config, "max_position_embeddings", None)
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise TargetError(key=f"prompts[{index}]", value=[], rule="is empty", hint="a prompt needs one token or more")
        if room is not None and len(prompt) + max_new_tokens > room:
            raise TargetError(
                key=f"prompts[{index}]",
                value=f"{len(prompt)} tokens",
                rule=f"with {max_new_tokens} new tokens it exceeds the {room} positions of the target",
                hint="shorten the prompt or lower max_new_tokens",
            )


@torch.inference_mode()
def answer_batch(
    *, model: PreTrainedModel, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop_token_ids: Sequence[int]
) -> list[list[int]]:
    """Answer one batch at once. Rows that have finished leave it as soon as they are half of it."""
    input_RL, mask_RL = _pad_left(prompts, device=model.device)
    stops = torch.tensor(sorted(stop_token_ids), dtype=torch.int64, device=model.device)
    answers = torch.zeros((len(prompts), max_new_tokens), dtype=torch.int64, device=model.device)
    rows = torch.arange(len(prompts), device=model.device)
    finished = torch.zeros(len(prompts), dtype=torch.bool, device=model.device)
    every = CHECK_EVERY_CUDA if model.device.type == "cuda" else 1
    cache = DynamicCache(config=model.config)
    position_RL = (mask_RL.cumsum(dim=1) - 1).clamp(min=0)
    padded = len({len(prompt) for prompt in prompts}) > 1
    for step in range(max_new_tokens):
        output = model(
            input_ids=input_RL,
            attention_mask=mask_RL if padded else None,
            position_ids=position_RL,
            cache=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        token_R = output.logits[:, -1].argmax(dim=-1)
        answers[rows, step] = token_R
        finished |= torch.isin(token_R, stops)
        if (step + 1) % every == 0:
            alive = (~finished).nonzero().flatten()
            if len(alive) == 0:
                break
            if 2 * len(alive) <= len(finished):
                # Not batch_select_indices: recurrent layers lack it; this one selects rows in every kind of layer.
                cache.reorder_cache(cast(torch.LongTensor, alive))
                token_R, rows, finished = token_R[alive], rows[alive], finished[alive]
                mask_RL, position_RL = mask_RL[alive], position_RL[alive]
        input_RL, position_RL = token_R[:, None], position_RL[:, -1:] + 1
        mask_RL = torch.cat((mask_RL, mask_RL.new_ones(len(mask_RL), 1)), dim=1)
    return list(_cut(answers, stop_token_ids=stop_token_ids))


def _pad_left(prompts: Sequence[Sequence[int]], *, device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids int64 and mask int64 `[R, L]`, prompts at the right edge."""
    longest = max(len(prompt) for prompt in prompts)
    token_ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts], dtype=torch.int64)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], dtype=torch.int64)
    return token_ids.to(device), mask.to(device)


def _cut(answers: Tensor, *, stop_token_ids: Sequence[int]) -> Iterator[list[int]]:
    """Answers through their first stop token; what was decoded after it, or never, is left out."""
    stops = set(stop_token_ids)
    for row in answers.tolist():
        length = next((at + 1 for at, token in enumerate(row) if token in stops), len(row))
        yield row[:length]
