"""Prompts end with the last user turn; documents carry the mask on the answer."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from slipstream.errors import UsageError
from slipstream.evaluate.prompts import answered_document, make_prompt_set, prompt_messages


@dataclass(frozen=True)
class Turn:
    role: str
    content: str = "ab"


def talk(*roles):
    return tuple(Turn(role) for role in roles)


def encode(messages):
    return [ord(message.role[0]) for message in messages]


def test_a_prompt_runs_through_the_last_user_turn():
    talked = talk("system", "user", "assistant", "user", "assistant")
    assert prompt_messages(talked) == talked[:4]
    assert prompt_messages(talk("system", "assistant")) == ()


def test_set_is_limited_and_counts_what_it_skips():
    talks = [
        talk("assistant"),
        talk("user"),
        talk("system", "user", "assistant"),
        talk("system", "user", "assistant", "user"),
        talk("user"),
    ]
    found = make_prompt_set(name="mine", conversations=talks, encode=encode, limit=2, max_prompt_tokens=3)
    assert found.prompts == ((ord("u"),), (ord("s"), ord("u")))
    assert found.skipped == 1
    found = make_prompt_set(name="mine", conversations=talks, encode=encode, limit=None, max_prompt_tokens=3)
    assert (len(found.prompts), found.skipped) == (3, 2)


def test_a_set_without_a_usable_prompt_is_refused():
    with pytest.raises(UsageError, match=r"mine.*no usable prompt \(1 "):
        make_prompt_set(name="mine", conversations=[talk("assistant")], encode=encode, limit=None, max_prompt_tokens=3)


def test_document_of_prompt_and_answer():
    document = answered_document(document_id=4, prompt_ids=[5, 6], answer_ids=[7, 8, 9])
    assert document.document_id == 4
    assert document.token_ids.tolist() == [5, 6, 7, 8, 9]
    assert document.loss_mask.tolist() == [False, False, True, True, True]
