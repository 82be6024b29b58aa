"""Prompt sets: named lists of token ids, made from conversations by whoever can read and encode them.

Conversations come from the corpus' readers; this package never imports them, the caller hands over the messages and the
encoder. A conversation gives one prompt: everything up to and including its last user turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from slipstream.errors import UsageError
from slipstream.records import Document


class HasRole(Protocol):
    """A message of a conversation."""

    @property
    def role(self) -> str:
        """Who speaks: `system`, `user`, `assistant`, `tool`."""


Message = TypeVar("Message", bound=HasRole)


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Prompts in token ids, ready for an answer. `skipped`: conversations without a user turn, or too long a prompt."""

    name: str
    prompts: tuple[tuple[int, ...], ...]
    skipped: int


def prompt_messages(messages: Sequence[Message]) -> Sequence[Message]:
    """The messages up to and including the last one of the user; empty when the user never speaks."""
    last = max((place for place, message in enumerate(messages) if message.role == "user"), default=-1)
    return messages[: last + 1]


def make_prompt_set(
    *,
    name: str,
    conversations: Iterable[Sequence[Message]],
    encode: Callable[[Sequence[Message]], Sequence[int]],
    limit: int | None,
    max_prompt_tokens: int,
) -> PromptSet:
    """The first `limit` usable prompts of a set. Raises `UsageError` when there is none."""
    prompts: list[tuple[int, ...]] = []
    skipped = 0
    for messages in conversations:
        if limit is not None and len(prompts) == limit:
            break
        asked = prompt_messages(messages)
        token_ids = tuple(encode(asked)) if asked else ()
        if 0 < len(token_ids) <= max_prompt_tokens:
            prompts.append(token_ids)
        else:
            skipped += 1
    if not prompts:
        raise UsageError(
            key="--prompts",
            value=name,
            rule=f"holds no usable prompt ({skipped} without a user turn or above {max_prompt_tokens} tokens)",
        )
    return PromptSet(name=name, prompts=tuple(prompts), skipped=skipped)


def answered_document(*, document_id: int, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> Document:
    """A prompt and its answer as one document, the loss mask true on the answer."""
    token_ids = np.asarray([*prompt_ids, *answer_ids], dtype=np.int32)
    loss_mask = np.zeros(len(token_ids), dtype=np.bool_)
    loss_mask[len(prompt_ids) :] = True
    return Document(document_id=document_id, token_ids=token_ids, loss_mask=loss_mask)
