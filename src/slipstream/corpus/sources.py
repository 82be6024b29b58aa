"""Conversations from JSON lines and tables, one at a time. Nothing is skipped in silence: what cannot be read is a `Reject`.

A source is a file of JSON lines, a Parquet file, a folder that `datasets` saved, or `hub:NAME[:CONFIG][:SPLIT]`; of the last
three `tables` knows more. A row may be a prompt without an answer; whether that will do is for the reader to say.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from slipstream.corpus.conversation import Conversation, ConversationRefused, Message, RawRow, Reason, Reject, Source
from slipstream.corpus.forms import RowRefused, read_row
from slipstream.corpus.tables import is_table, open_table
from slipstream.errors import CorpusError

__all__ = ["Conversation", "Message", "Reason", "Reject", "Source", "open_sources", "read_conversations"]


def read_conversations(
    sources: Iterable[str | Path | Source],
    *,
    on_reject: Callable[[Reject], None] | None = None,
    on_read: Callable[[int], None] | None = None,
) -> Iterator[Conversation]:
    """Yield the conversations of sources in order; blank lines are no rows.

    A row that cannot be read goes to `on_reject`; without it, it raises `ConversationRefused` with file and line.
    `on_read` is told the bytes of each row. Raises `CorpusError` when a source cannot be read at all.
    """
    for source in open_sources(list(sources)):
        for raw in source.rows():
            if on_read is not None:
                on_read(raw.num_bytes)
            if raw.parse is None:
                continue
            try:
                yield _conversation(raw.parse(), source=source.name, line=raw.line)
            except RowRefused as refused:
                reject = Reject(source=source.name, line=raw.line, reason=refused.reason, detail=refused.detail)
                if on_reject is None:
                    raise ConversationRefused(reject) from refused
                on_reject(reject)


def open_sources(sources: Sequence[str | Path | Source]) -> list[Source]:
    """The sources, all readable by their first byte or their table's schema. Raises `CorpusError` for the first that is not."""
    if not sources:
        raise CorpusError(key="SRC", value="", rule="at least one source is needed", hint="JSON lines of conversations")
    return [source if isinstance(source, Source) else _open(str(source)) for source in sources]


def _open(name: str) -> Source:
    if is_table(name):
        return open_table(name)
    path = Path(name)
    try:
        with path.open("rb") as file:
            first = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    except OSError as error:
        raise CorpusError(key="SRC", value=name, rule=f"cannot be read: {error.strerror}") from error
    if first == b"[":
        raise CorpusError(
            key="SRC", value=name, rule="is one JSON array, not JSON lines", hint=f"jq -c '.[]' {path.name} > lines.jsonl"
        )
    return Source(name=name, num_bytes=path.stat().st_size, rows=lambda: _lines(path))


def _lines(path: Path) -> Iterator[RawRow]:
    with path.open("rb") as lines:
        for number, raw in enumerate(lines, start=1):
            yield RawRow(line=number, num_bytes=len(raw), parse=partial(_json_object, raw) if raw.strip() else None)


def _conversation(keys: Any, *, source: str, line: int) -> Conversation:
    row = read_row(keys)
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
