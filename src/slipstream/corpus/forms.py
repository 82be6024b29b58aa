"""The shapes that rows of chat data come in: OpenAI messages, ShareGPT, Alpaca-like pairs, question and answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.corpus.conversation import Message, Reason

ROLES: Mapping[str, str] = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "tool": "tool",
    "observation": "tool",
}
"""Names of speakers that are understood, in lower case, and the role that chat templates know them by."""

TURN_LISTS = ("messages", "conversations", "conversation")
_PROMPTS = ("instruction", "prompt", "question")
_ANSWERS = ("output", "response", "completion", "answer")
OPENING_COLUMNS = (*TURN_LISTS, *_PROMPTS)
"""Keys that a conversation can begin with; a row has one of them."""

COLUMNS = (*OPENING_COLUMNS, *_ANSWERS, "input", "instances", "system", "tools", "answer_token_ids")
"""All keys of a row that are read."""

_TEMPLATE_FIELDS = ("tool_calls", "tool_call_id", "name", "reasoning_content", "thinking")


class RowRefused(Exception):
    """The row cannot be read as a conversation; who knows file and line makes a `Reject` of it."""

    def __init__(self, reason: Reason, detail: str) -> None:
        self.reason, self.detail = reason, detail
        super().__init__(detail)


@dataclass(frozen=True, slots=True)
class Row:
    """A row read as a conversation, before anybody knows where it stood."""

    messages: tuple[Message, ...]
    answer_token_ids: tuple[int, ...] | None
    tools: tuple[Mapping[str, object], ...]


def read_row(row: Mapping[str, Any]) -> Row:
    """Read one JSON object in whichever form it has. Raises `RowRefused` with a reason and what was found."""
    turns = next((row[key] for key in TURN_LISTS if key in row), None)
    if turns is not None:
        messages = _turns(turns)
        if isinstance(row.get("system"), str) and row["system"] and messages[0].role != "system":
            messages = (Message(role="system", content=row["system"]), *messages)
    else:
        messages = _pair(row)
    return Row(messages=messages, answer_token_ids=_answer_ids(row, messages), tools=_tools(row))


def _turns(turns: object) -> tuple[Message, ...]:
    if not isinstance(turns, list) or not turns:
        raise RowRefused(Reason.UNKNOWN_FORM, f"the list of turns is {_shown(turns)}")
    return tuple(_turn(turn, place=place) for place, turn in enumerate(turns))


def _turn(turn: object, *, place: int) -> Message:
    if not isinstance(turn, dict):
        raise RowRefused(Reason.UNKNOWN_FORM, f"turn {place} is {_shown(turn)}, not an object")
    speaker = turn.get("role", turn.get("from"))
    role = ROLES.get(speaker.lower()) if isinstance(speaker, str) else None
    if role is None:
        raise RowRefused(Reason.UNKNOWN_ROLE, f"turn {place} is spoken by {_shown(speaker)}")
    content = _text(turn.get("content", turn.get("value")), what=f"turn {place}")
    return Message(role=role, content=content, fields={key: turn[key] for key in _TEMPLATE_FIELDS if turn.get(key)})


def _pair(row: Mapping[str, Any]) -> tuple[Message, ...]:
    """Prompt and answer side by side; without an answer the row is a prompt that waits for one."""
    key = next((name for name in _PROMPTS if name in row), None)
    if key is None:
        raise RowRefused(Reason.UNKNOWN_FORM, "has none of the known keys, only: " + (", ".join(sorted(row)[:8]) or "nothing"))
    source = row
    if isinstance(row.get("instances"), list) and row["instances"] and isinstance(row["instances"][0], dict):
        source = row["instances"][0]
    prompt = _text(row[key], what=key)
    extra = _text(source.get("input"), what="input") if key == "instruction" else ""
    messages = [Message(role="user", content=f"{prompt}\n\n{extra}" if extra else prompt)]
    if isinstance(row.get("system"), str) and row["system"]:
        messages.insert(0, Message(role="system", content=row["system"]))
    answer = next((name for name in _ANSWERS if name in source), None)
    if answer is not None:
        messages.append(Message(role="assistant", content=_text(source[answer], what=answer)))
    return tuple(messages)


def _text(content: object, *, what: str) -> str:
    """Text as it is, text parts joined, nothing for null. Raises `RowRefused` for all else, images included."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
        return "".join(part["text"] for part in content)
    raise RowRefused(Reason.NOT_TEXT, f"{what} is {_shown(content)}, not text")


def _answer_ids(row: Mapping[str, Any], messages: tuple[Message, ...]) -> tuple[int, ...] | None:
    ids = row.get("answer_token_ids")
    if ids is None:
        return None
    if not isinstance(ids, list) or not ids or not all(type(token) is int and token >= 0 for token in ids):
        raise RowRefused(Reason.BAD_ANSWER_IDS, f"answer_token_ids is {_shown(ids)}, not a list of token ids")
    if messages[-1].role == "assistant":
        raise RowRefused(Reason.BAD_ANSWER_IDS, "answer_token_ids beside messages that already end with an answer")
    return tuple(ids)


def _tools(row: Mapping[str, Any]) -> tuple[Mapping[str, object], ...]:
    tools = row.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RowRefused(Reason.UNKNOWN_FORM, f"tools is {_shown(tools)}, not a list of objects")
    return tuple(tools)


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=True, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
