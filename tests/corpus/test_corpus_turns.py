"""A conversation is answered turn by turn, and its turns become one document exactly where the tokens allow it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.corpus.chat import ChatEncoder
from slipstream.corpus.conversation import Message
from slipstream.corpus.prepare import PrepareOptions, prepare
from slipstream.corpus.store import CorpusStore
from slipstream.corpus.turns import split_turns, uses_tools

WriteLines = Callable[..., Path]
FORGETFUL = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{{ message['content'] if message['role'] != 'assistant' or loop.last else message['content'].split('|')[-1] }}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Drops what comes before a bar in earlier answers, as templates of thinking models drop thoughts."""


def spoken(roles: str) -> list[Message]:
    """One message for each letter (system, user, assistant, tool), its place its text."""
    names = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return [Message(names[letter], str(place)) for place, letter in enumerate(roles)]


@pytest.mark.parametrize(
    ("roles", "pieces"),
    [
        ("ua", ["0"]),
        ("sua", ["01"]),
        ("suaua", ["01", "3"]),
        ("uau", ["0", "2"]),
        ("uu", ["01"]),
        ("aua", ["01"]),
        ("uaas", ["0"]),
        ("usaua", ["01", "3"]),
        ("uasua", ["0", "23"]),
        ("uaau", ["0", "3"]),
        ("a", []),
        ("s", []),
        ("", []),
    ],
)
def test_pieces_between_answers(roles: str, pieces: list[str]) -> None:
    assert ["".join(message.content for message in piece) for piece in split_turns(spoken(roles))] == pieces


def test_tools_are_seen() -> None:
    assert uses_tools(spoken("uata"))
    assert uses_tools([Message("assistant", "", fields={"tool_calls": [{"id": 1}]})])
    assert not uses_tools(spoken("suaua"))


def rows_of(folder: Path, questions: list[str], answers: list[str]) -> list[dict[str, Any]]:
    """A row for each turn, as `slipstream regenerate` writes them."""
    encoder, messages, rows = ChatEncoder(folder), [], []
    for question, answer in zip(questions, answers, strict=True):
        messages = [*messages, {"role": "user", "content": question}]
        ids = encoder._tokenize([answer + "<|im_end|>"])[0]
        rows.append({"messages": messages, "answer": answer, "answer_token_ids": ids})
        messages = [*messages, {"role": "assistant", "content": answer}]
    return rows


QUESTIONS, ANSWERS = ["one?", "two?", "seven dogs?"], ["the first", "a thought|the second", "the lazy fox"]


def test_turns_that_continue_each_other_are_one_document(write_lines: WriteLines, target: Path, tmp_path: Path) -> None:
    rows, other = rows_of(target, QUESTIONS, ANSWERS), rows_of(target, ["one?"], ["the first"])
    meta = prepare([write_lines(*other, *rows, *other)], target, tmp_path / "corpus")
    assert (meta.num_documents, meta.num_joined, meta.num_rows) == (3, 2, 5), "the same turn twice is two documents"
    document = CorpusStore.open(tmp_path / "corpus").document(1)
    whole = {"messages": [*rows[-1]["messages"], {"role": "assistant", "content": ANSWERS[-1]}]}
    prepare([write_lines(whole, name="whole.jsonl")], target, tmp_path / "whole")
    expected = CorpusStore.open(tmp_path / "whole").document(0)
    length = len(document.token_ids)
    assert np.array_equal(document.token_ids, expected.token_ids[:length])
    assert np.array_equal(document.loss_mask, expected.loss_mask[:length])
    assert document.loss_mask.sum() == sum(len(row["answer_token_ids"]) for row in rows)
    assert CorpusStore.open(tmp_path / "corpus").origin(1)[1] == 4


def test_an_answer_that_the_template_rewrites_stays_a_document_of_its_own(
    write_lines: WriteLines, make_target: Callable[..., Path], tmp_path: Path
) -> None:
    folder = make_target(template=FORGETFUL)
    rows = rows_of(folder, QUESTIONS, ANSWERS)
    meta = prepare([write_lines(*rows)], folder, tmp_path / "corpus")
    assert (meta.num_documents, meta.num_joined) == (2, 1)
    assert meta.num_supervised == sum(len(row["answer_token_ids"]) for row in rows)


def test_only_turns_of_answers_in_ids_are_joined(write_lines: WriteLines, target: Path, tmp_path: Path) -> None:
    first, second, third = rows_of(target, QUESTIONS, ANSWERS)
    odd = {**second, "messages": [{"role": "user", "content": "another?"}, *second["messages"][1:]]}
    letters = [token for ids in ChatEncoder(target)._tokenize(list("the first")) for token in ids]
    noncanonical = {**first, "answer_token_ids": [*letters, 2]}
    assert len(letters) >= len(first["answer_token_ids"]), "the same text in other tokens"
    for rows, documents in (([first, first], 2), ([first, odd], 2), ([third, first], 2), ([noncanonical, second], 2)):
        out = tmp_path / f"corpus{len(list(tmp_path.iterdir()))}"
        assert prepare([write_lines(*rows)], target, out).num_documents == documents
    length = len(ChatEncoder(target).encode_prompt([Message("user", "one?")])) + len(first["answer_token_ids"])
    cut = prepare([write_lines(first, second)], target, tmp_path / "cut", PrepareOptions(max_tokens=length))
    assert (cut.num_documents, cut.num_joined, cut.num_supervised) == (1, 1, len(first["answer_token_ids"]))
