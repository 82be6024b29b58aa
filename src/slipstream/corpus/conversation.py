"""The records of this stage: a conversation, and a row that is refused with its reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from slipstream.errors import CorpusError


class Reason(StrEnum):
    """Why a row does not become a document. The values are the keys of `CorpusMeta.rejects`."""

    NOT_UTF8 = "not_utf8"
    MALFORMED_JSON = "malformed_json"
    NOT_AN_OBJECT = "not_an_object"
    UNKNOWN_FORM = "unknown_form"
    UNKNOWN_ROLE = "unknown_role"
    NOT_TEXT = "not_text"
    BAD_UNICODE = "bad_unicode"
    BAD_ANSWER_IDS = "bad_answer_ids"
    NO_ASSISTANT_TURN = "no_assistant_turn"
    NO_PROMPT = "no_prompt"
    EMPTY_ANSWER = "empty_answer"
    STOP_TOKEN_IN_CONTENT = "stop_token_in_content"
    TEMPLATE_REFUSED = "template_refused"
    REWRITTEN_TURNS = "rewritten_turns"
    BOUNDARY_INSIDE_TOKEN = "boundary_inside_token"
    TOKEN_OUTSIDE_VOCABULARY = "token_outside_vocabulary"
    CONTAINS_MASK_TOKEN = "contains_mask_token"
    PROMPT_TOO_LONG = "prompt_too_long"
    TOO_FEW_SUPERVISED = "too_few_supervised"


class Remark(StrEnum):
    """What is worth knowing of a document that was kept. The values are the keys of `CorpusMeta.warnings`."""

    TRUNCATED = "truncated"
    NO_STOP_TOKEN = "no_stop_token"
    REWRITTEN_TURN = "rewritten_turn"
    TOKENISED_APART = "tokenised_apart"


@dataclass(frozen=True, slots=True)
class RawRow:
    """A row of a source, unread. `line` counts from 1; `parse` gives its keys or raises `RowRefused`, none if it is blank."""

    line: int
    num_bytes: int
    parse: Callable[[], Mapping[str, Any]] | None


@dataclass(frozen=True, slots=True)
class Source:
    """Where rows come from. `num_bytes` is what the rows' bytes add up to; `rows` begins anew with every call."""

    name: str
    num_bytes: int
    rows: Callable[[], Iterator[RawRow]]


@dataclass(frozen=True, slots=True)
class Message:
    """One turn. `role` is system, user, assistant or tool; `fields` are further keys that templates read (`tool_calls` …)."""

    role: str
    content: str
    fields: Mapping[str, object] = field(default_factory=dict)

    def as_dict(self) -> dict[str, object]:
        """The form that chat templates take."""
        return {"role": self.role, "content": self.content, **self.fields}


@dataclass(frozen=True, slots=True)
class Conversation:
    """One row of a source. `line` counts from 1.

    With `answer_token_ids`, `messages` end with the prompt and the ids are the answer, exactly as the target gave it.
    """

    messages: tuple[Message, ...]
    source: str
    line: int
    answer_token_ids: tuple[int, ...] | None = None
    tools: tuple[Mapping[str, object], ...] = ()

    @property
    def prompt(self) -> tuple[Message, ...]:
        """The messages up to the last answer, which is left out; all of them if the last one is no answer."""
        end = len(self.messages)
        while end and self.messages[end - 1].role == "assistant":
            end -= 1
        return self.messages[:end]


@dataclass(frozen=True, slots=True)
class Reject:
    """A row that does not become a document: where it is, why, and what was found."""

    source: str
    line: int
    reason: Reason
    detail: str


class ConversationRefused(CorpusError):
    """A row cannot become a document. `reject` tells where and why."""

    def __init__(self, reject: Reject) -> None:
        self.reject = reject
        super().__init__(key=f"{reject.source}:{reject.line}", value=str(reject.reason), rule=reject.detail)
