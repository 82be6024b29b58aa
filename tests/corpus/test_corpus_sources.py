"""Every form of row is read, and every row that cannot be is refused with file, line and reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.corpus.conversation import ConversationRefused
from slipstream.corpus.sources import Conversation, Message, Reason, Reject, read_conversations
from slipstream.errors import CorpusError

USER, ANSWER, SYSTEM = Message("user", "one?"), Message("assistant", "two."), Message("system", "be odd")
WriteLines = Callable[..., Path]


def chat(*roles: str) -> list[dict[str, Any]]:
    texts = {"user": "one?", "assistant": "two.", "system": "be odd"}
    return [{"role": role, "content": texts[role]} for role in roles]


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"messages": chat("user", "assistant")}, (USER, ANSWER)),
        ({"messages": chat("system", "user", "assistant")}, (SYSTEM, USER, ANSWER)),
        ({"conversations": [{"from": "human", "value": "one?"}, {"from": "gpt", "value": "two."}]}, (USER, ANSWER)),
        ({"conversations": [{"from": "GPT", "value": "two."}], "system": "be odd"}, (SYSTEM, ANSWER)),
        ({"prompt": "one?", "response": "two."}, (USER, ANSWER)),
        ({"prompt": "one?", "completion": "two.", "system": "be odd"}, (SYSTEM, USER, ANSWER)),
        ({"instruction": "one?", "input": "", "output": "two."}, (USER, ANSWER)),
        ({"instruction": "one?", "input": "1 or 2", "output": "two."}, (Message("user", "one?\n\n1 or 2"), ANSWER)),
        ({"instruction": "one?", "instances": [{"input": "1", "output": "two."}]}, (Message("user", "one?\n\n1"), ANSWER)),
        ({"question": "one?", "answer": "two."}, (USER, ANSWER)),
        ({"question": "one?", "difficulty": 3}, (USER,)),
        ({"prompt": "one?", "test": "x"}, (USER,)),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "on"}, {"text": "e?"}]}]}, (USER,)),
        ({"messages": [{"role": "assistant", "content": None}]}, (Message("assistant", ""),)),
    ],
)
def test_forms(write_lines: WriteLines, row: dict[str, Any], messages: tuple[Message, ...]) -> None:
    path = write_lines(row)
    assert list(read_conversations([path])) == [Conversation(messages=messages, source=str(path), line=1)]


def test_an_answer_given_as_ids_and_as_text_counts_as_ids(write_lines: WriteLines) -> None:
    """As `slipstream regenerate` writes it: the text is for people, it does not give the tokens back."""
    row = {"messages": chat("system", "user"), "answer": "two.", "answer_token_ids": [5, 2], "finish": "stop", "key": "k"}
    conversation = next(read_conversations([write_lines(row)]))
    assert (conversation.messages, conversation.answer_token_ids) == ((SYSTEM, USER), (5, 2))


def test_answer_ids_tools_and_template_fields_are_carried(write_lines: WriteLines) -> None:
    turn = {"role": "assistant", "content": "", "tool_calls": [{"id": 1}], "weight": 1}
    path = write_lines(
        {"messages": chat("user"), "answer_token_ids": [5, 2]},
        {"messages": [*chat("user"), turn, {"role": "tool", "content": "4", "name": "sum"}], "tools": [{"name": "sum"}]},
    )
    ids, tools = read_conversations([path])
    assert ids.answer_token_ids == (5, 2)
    assert tools.tools == ({"name": "sum"},)
    assert tools.messages[1].fields == {"tool_calls": [{"id": 1}]}
    assert tools.messages[2].as_dict() == {"role": "tool", "content": "4", "name": "sum"}


@pytest.mark.parametrize(
    ("raw", "reason", "found"),
    [
        (b'{"prompt": "on', Reason.MALFORMED_JSON, "char"),
        (b"[" * 200000, Reason.MALFORMED_JSON, "recursion"),
        (b'{"prompt": "\xff"}', Reason.NOT_UTF8, "byte 12"),
        (b'"one?"', Reason.NOT_AN_OBJECT, "str"),
        (b'{"text": "one?", "id": 4}', Reason.UNKNOWN_FORM, "id, text"),
        (b'{"messages": []}', Reason.UNKNOWN_FORM, "[]"),
        (b'{"messages": ["one?"]}', Reason.UNKNOWN_FORM, "turn 0"),
        (b'{"messages": [{"role": "user", "content": "a"}], "tools": "x"}', Reason.UNKNOWN_FORM, "tools"),
        (b'{"messages": [{"role": "narrator", "content": "a"}]}', Reason.UNKNOWN_ROLE, "narrator"),
        (b'{"messages": [{"content": "a"}]}', Reason.UNKNOWN_ROLE, "null"),
        (b'{"messages": [{"role": "user", "content": [{"image": "a"}]}]}', Reason.NOT_TEXT, "turn 0"),
        (b'{"prompt": "a", "response": 4}', Reason.NOT_TEXT, "response is 4"),
        (b'{"prompt": "\\uD83d"}', Reason.BAD_UNICODE, "surrogate"),
        (b'{"prompt": "a", "answer_token_ids": []}', Reason.BAD_ANSWER_IDS, "[]"),
        (b'{"prompt": "a", "answer_token_ids": [1, true]}', Reason.BAD_ANSWER_IDS, "true"),
        (b'{"prompt": "a", "answer_token_ids": [-1]}', Reason.BAD_ANSWER_IDS, "-1"),
        (b'{"prompt": "a", "answer": "b", "answer_token_ids": [1]}', Reason.BAD_ANSWER_IDS, "already"),
    ],
)
def test_rows_that_cannot_be_read(write_lines: WriteLines, raw: bytes, reason: Reason, found: str) -> None:
    path = write_lines({"prompt": "one?"}, b"  ", raw, {"prompt": "one?"})
    rejects: list[Reject] = []
    kept = list(read_conversations([path], on_reject=rejects.append))
    assert [conversation.line for conversation in kept] == [1, 4]
    assert [(reject.source, reject.line, reject.reason) for reject in rejects] == [(str(path), 3, reason)]
    assert found in rejects[0].detail
    with pytest.raises(ConversationRefused, match=f":3 = '{reason}'"):
        list(read_conversations([path]))


def test_a_surrogate_pair_and_a_byte_order_mark_are_text(write_lines: WriteLines) -> None:
    path = write_lines(b'\xef\xbb\xbf{"prompt": "\\ud83d\\ude00"}')
    assert next(read_conversations([path])).messages == (Message("user", "\U0001f600"),)


def test_bytes_are_counted_over_several_files_in_order(write_lines: WriteLines) -> None:
    paths = [write_lines({"prompt": name}, "", name=name) for name in ("b.jsonl", "a.jsonl")]
    counts: list[int] = []
    sources = [Path(item.source).name for item in read_conversations(paths, on_read=counts.append)]
    assert sources == ["b.jsonl", "a.jsonl"]
    assert sum(counts) == sum(path.stat().st_size for path in paths)


def test_files_that_are_no_json_lines(write_lines: WriteLines, tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="JSON array"):
        list(read_conversations([write_lines("\n [", '{"prompt": "a"}]')]))
    with pytest.raises(CorpusError, match="No such file"):
        list(read_conversations([tmp_path / "absent.jsonl"]))
    with pytest.raises(CorpusError, match="directory"):
        list(read_conversations([tmp_path]))
    with pytest.raises(CorpusError, match="at least one"):
        list(read_conversations([]))


def test_the_prompt_of_a_conversation_ends_before_its_last_answer() -> None:
    def conversation(*messages: Message) -> Conversation:
        return Conversation(messages=messages, source="", line=1)

    assert conversation(SYSTEM, USER, ANSWER).prompt == (SYSTEM, USER)
    assert conversation(USER, ANSWER, USER, ANSWER).prompt == (USER, ANSWER, USER)
    assert conversation(USER, ANSWER, USER).prompt == (USER, ANSWER, USER)
    assert conversation(ANSWER).prompt == ()
