"""Conversations from JSON lines files, one at a time. Nothing is skipped in silence: what cannot be read is a `Reject`.

A row may be a prompt without an answer; whether that will do is for the reader of the conversations to say.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from slipstream.corpus.conversation import Conversation, ConversationRefused, Message, Reason, Reject
from slipstream.corpus.forms import RowRefused, read_row
from slipstream.errors import CorpusError

__all__ = ["Conversation", "Message", "Reason", "Reject", "check_sources", "read_conversations"]


def read_conversations(
    paths: Iterable[str | Path],
    *,
    on_reject: Callable[[Reject], None] | None = None,
    on_read: Callable[[int], None] | None = None,
) -> Iterator[Conversation]:
    """Yield the conversations of JSON lines files in order; blank lines are no rows.

    A row that cannot be read goes to `on_reject`; without it, it raises `ConversationRefused` with file and line.
    `on_read` is told the bytes of each line. Raises `CorpusError` when a file cannot be read at all.
    """
    for path in check_sources([Path(path) for path in paths]):
        with path.open("rb") as lines:
            for number, raw in enumerate(lines, start=1):
                if on_read is not None:
                    on_read(len(raw))
                if not raw.strip():
                    continue
                try:
                    yield _conversation(raw, source=str(path), line=number)
                except RowRefused as refused:
                    reject = Reject(source=str(path), line=number, reason=refused.reason, detail=refused.detail)
                    if on_reject is None:
                        raise ConversationRefused(reject) from refused
                    on_reject(reject)


def check_sources(paths: Sequence[Path]) -> list[Path]:
    """The paths, all readable files of JSON lines by their first byte. Raises `CorpusError` for the first that is not."""
    if not paths:
        raise CorpusError(key="SRC", value="", rule="at least one file is needed", hint="JSON lines of conversations")
    for path in paths:
        try:
            with path.open("rb") as file:
                first = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
        except OSError as error:
            raise CorpusError(key="SRC", value=str(path), rule=f"cannot be read: {error.strerror}") from error
        if first == b"[":
            raise CorpusError(
                key="SRC",
                value=str(path),
                rule="is one JSON array, not JSON lines",
                hint=f"jq -c '.[]' {path.name} > lines.jsonl",
            )
    return list(paths)


def _conversation(raw: bytes, *, source: str, line: int) -> Conversation:
    row = read_row(_json_object(raw))
    return Conversation(messages=row.messages, source=source, line=line, answer_token_ids=row.answer_token_ids, tools=row.tools)


def _json_object(raw: bytes) -> dict[str, Any]:
    try:
        row = json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise RowRefused(Reason.NOT_UTF8, f"byte {error.start} of the line is not UTF-8") from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise RowRefused(Reason.MALFORMED_JSON, str(error)) from error
    if not isinstance(row, dict):
        raise RowRefused(Reason.NOT_AN_OBJECT, f"is a JSON {type(row).__name__}, not an object")
    if b"\\ud" in raw.lower():
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise RowRefused(Reason.BAD_UNICODE, "holds half of a surrogate pair, which is no character") from error
    return row
