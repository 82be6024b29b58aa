"""The loss mask is exactly what the assistant generates, for templates of several habits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from slipstream.corpus.chat import ChatEncoder, Encoded
from slipstream.corpus.conversation import Conversation, ConversationRefused, Message, Reason, Reject, Remark
from slipstream.errors import CorpusError

TAGGED = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
THINKING = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% if not enable_thinking|default(true) %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
PROMPTED_THOUGHT = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
PLAIN = (
    "{% for message in messages %}{{ message['role'] + ':\n' + message['content'] }}"
    "{% if not loop.last %}{{ '\n' }}{% endif %}{% endfor %}"
)
NO_STOP = PLAIN + "{% if add_generation_prompt %}{{ '\nassistant:\n' }}{% else %}{{ '\n--\n' }}{% endif %}"
STOP_AT_THE_END_ONLY = PLAIN + "{% if add_generation_prompt %}{{ '\nassistant:\n' }}{% else %}{{ '<|im_end|>' }}{% endif %}"
PICKY = "{% if messages|length > 2 %}{{ raise_exception('one question only') }}{% endif %}" + TAGGED


def talk(*turns: str, **more: Any) -> Conversation:
    """User and assistant in turn, the user first."""
    roles = ("user", "assistant")
    messages = tuple(Message(roles[place % 2], text) for place, text in enumerate(turns))
    return Conversation(messages=messages, source="talk.jsonl", line=7, **more)


def supervised(folder: Path, encoded: Encoded | Reject) -> list[str]:
    """The text of each supervised run."""
    assert isinstance(encoded, Encoded)
    tokenizer, runs = Tokenizer.from_file(str(folder / "tokenizer.json")), [[]]
    for token, on in zip(encoded.token_ids.tolist(), encoded.loss_mask.tolist(), strict=True):
        if on:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [tokenizer.decode(run, skip_special_tokens=False) for run in runs if run]


def whole_text(folder: Path, encoded: Encoded) -> str:
    return Tokenizer.from_file(str(folder / "tokenizer.json")).decode(encoded.token_ids.tolist(), skip_special_tokens=False)


def only(encoder: ChatEncoder, conversation: Conversation) -> Encoded:
    encoded = encoder.encode_batch([conversation])[0]
    assert isinstance(encoded, Encoded), encoded
    return encoded


def reason(encoder: ChatEncoder, conversation: Conversation) -> Reason:
    with pytest.raises(ConversationRefused) as caught:
        encoder.encode(conversation)
    assert caught.value.key == "talk.jsonl:7"
    return caught.value.reject.reason


@pytest.fixture(scope="module")
def encoder(target: Path) -> ChatEncoder:
    return ChatEncoder(target)


def test_answer_is_supervised_through_its_stop_token_and_not_the_templates_tail(encoder: ChatEncoder, target: Path) -> None:
    encoded = only(encoder, talk("seven dogs?", "the lazy fox"))
    assert encoded.token_ids.dtype == np.int32
    assert encoded.loss_mask.dtype == np.bool_
    assert supervised(target, encoded) == ["the lazy fox<|im_end|>"]
    newline = Tokenizer.from_file(str(target / "tokenizer.json")).encode("\n").ids
    assert encoded.token_ids[-1:].tolist() == newline
    assert not encoded.loss_mask[-1]
    assert encoded.loss_mask[-2]
    assert encoded.token_ids[-2] == 2
    assert encoded.remarks == ()


def test_what_precedes_the_first_supervised_token_is_the_prompt_a_server_would_see(encoder: ChatEncoder) -> None:
    conversation = talk("seven dogs?", "the lazy fox")
    ids, mask = encoder.encode(conversation)
    assert ids[: int(np.argmax(mask))].tolist() == encoder.encode_prompt(conversation.prompt)


def test_every_answer_of_several_turns_is_supervised_with_system_prompt(encoder: ChatEncoder, target: Path) -> None:
    turns = talk("one?", "the first", "two?", "a second\nline", "three?", "last.")
    conversation = Conversation(messages=(Message("system", "you are <odd>"), *turns.messages), source="", line=1)
    encoded = only(encoder, conversation)
    assert supervised(target, encoded) == ["the first<|im_end|>", "a second\nline<|im_end|>", "last.<|im_end|>"]
    assert whole_text(target, encoded).startswith("<|im_start|>system\nyou are <odd><|im_end|>\n<|im_start|>user\none?")


def test_turns_after_the_last_answer_are_left_out(encoder: ChatEncoder) -> None:
    short, long = encoder.encode(talk("one?", "the first")), encoder.encode(talk("one?", "the first", "and now?"))
    assert all(map(np.array_equal, short, long))


@given(st.lists(st.text(st.characters(codec="utf-8"), min_size=1).filter(str.strip), min_size=2, max_size=6))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_mask_equals_that_of_generation_tags(tagged: ChatEncoder, turns: list[str]) -> None:
    """The oracle is transformers' own mask, which needs tags in the template; ours does not look at them."""
    conversation = talk(*turns[: len(turns) // 2 * 2])
    encoded = tagged.encode_batch([conversation])[0]
    assert isinstance(encoded, Encoded), encoded
    messages = [message.as_dict() for message in conversation.messages]
    oracle = tagged._tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    if encoded.remarks:
        # White space at the start of an answer fuses with the template's: the text is the same, the cut is a server's.
        assert encoded.remarks == (Remark.TOKENISED_APART,)
        assert any(message.content[0].isspace() for message in conversation.messages if message.role == "assistant")
        ids = encoded.token_ids[encoded.loss_mask].tolist()
        answers = [message.content + "<|im_end|>" for message in conversation.messages if message.role == "assistant"]
        assert tagged._tokenizer.decode(ids) == "".join(answers)
        return
    assert encoded.token_ids.tolist() == oracle["input_ids"]
    assert encoded.loss_mask.tolist() == [bool(on) for on in oracle["assistant_masks"]]


@pytest.fixture(scope="module")
def tagged(make_target: Any) -> ChatEncoder:
    return ChatEncoder(make_target(template=TAGGED))


def test_prompt_and_answer_whose_border_is_inside_a_token_are_tokenised_apart(encoder: ChatEncoder, target: Path) -> None:
    conversation = talk("one?", "\n\n\nthe fox", "two?", "the dog")
    encoded = only(encoder, conversation)
    assert supervised(target, encoded) == ["\n\n\nthe fox<|im_end|>", "the dog<|im_end|>"]
    assert encoded.remarks == (Remark.TOKENISED_APART,)
    prompt = encoder.encode_prompt(conversation.messages[:1])
    assert encoded.token_ids[: len(prompt)].tolist() == prompt
    assert encoded.loss_mask[len(prompt)]


def test_a_border_inside_a_token_is_refused_where_pieces_do_not_add_up(make_target: Any) -> None:
    """As tokenizers that put a space before every text: the answer alone would begin with one."""
    folder = make_target()
    file = folder / "tokenizer.json"
    file.write_text(
        file.read_text()
        .replace('"add_prefix_space":false', '"add_prefix_space":true')
        .replace('"add_prefix_space": false', '"add_prefix_space": true')
    )
    assert reason(ChatEncoder(folder), talk("one?", "\n\n\nthe fox")) == Reason.BOUNDARY_INSIDE_TOKEN


def test_a_template_that_rewrites_earlier_turns_keeps_only_what_stands_as_generated(make_target: Any) -> None:
    folder = make_target(template=THINKING)
    encoder = ChatEncoder(folder)
    assert supervised(folder, only(encoder, talk("one?", "two."))) == ["<think>\n\n</think>\n\ntwo.<|im_end|>"]
    encoded = only(encoder, talk("one?", "two.", "three?", "four."))
    assert supervised(folder, encoded) == ["<think>\n\n</think>\n\nfour.<|im_end|>"]
    assert "assistant\ntwo.<|im_end|>" in whole_text(folder, encoded)
    assert encoded.remarks == (Remark.REWRITTEN_TURN,)


def test_template_arguments_reach_the_template(make_target: Any) -> None:
    folder = make_target(template=THINKING)
    encoder = ChatEncoder(folder, template_arguments={"enable_thinking": False})
    assert supervised(folder, only(encoder, talk("one?", "two."))) == ["two.<|im_end|>"]
    multi = only(encoder, talk("one?", "two.", "three?", "four."))
    assert supervised(folder, multi) == ["four.<|im_end|>"]
    assert multi.remarks == (Remark.REWRITTEN_TURN, Remark.TOKENISED_APART)


def test_an_answer_that_never_follows_its_prompt_is_refused(make_target: Any) -> None:
    """As templates that open a thought in the generation prompt and drop thoughts in what they render."""
    encoder = ChatEncoder(make_target(template=PROMPTED_THOUGHT))
    assert reason(encoder, talk("one?", "two.")) == Reason.REWRITTEN_TURNS


def test_without_a_stop_token_supervision_ends_with_the_content(make_target: Any) -> None:
    folder = make_target(template=NO_STOP)
    encoded = only(ChatEncoder(folder), talk("one?", "two.", "three?", "four."))
    assert supervised(folder, encoded) == ["two.", "four."]
    assert encoded.remarks == (Remark.NO_STOP_TOKEN,)


def test_a_stop_token_of_a_later_turn_does_not_end_an_earlier_one(make_target: Any) -> None:
    folder = make_target(template=STOP_AT_THE_END_ONLY)
    encoded = only(ChatEncoder(folder), talk("one?", "two.", "three?", "four."))
    assert supervised(folder, encoded) == ["four.<|im_end|>"]
    assert encoded.remarks == (Remark.REWRITTEN_TURN,)


def test_the_templates_own_turn_end_stops_though_eos_is_another(make_target: Any) -> None:
    folder = make_target(eos=0)
    encoder = ChatEncoder(folder)
    assert encoder.stop_token_ids == (0, 2)
    assert supervised(folder, only(encoder, talk("one?", "two."))) == ["two.<|im_end|>"]


def test_given_answer_ids_are_taken_as_they_are(encoder: ChatEncoder) -> None:
    prompt = talk("one?")
    answer = (97, 98, 97, 2)
    encoded = only(encoder, talk("one?", answer_token_ids=answer))
    expected = encoder.encode_prompt(prompt.messages)
    assert encoded.token_ids.tolist() == [*expected, *answer]
    assert encoded.loss_mask.tolist() == [False] * len(expected) + [True] * 4
    assert encoded.remarks == ()
    assert only(encoder, talk("one?", answer_token_ids=(97, 98))).remarks == (Remark.NO_STOP_TOKEN,)


def test_refusals_of_conversations(encoder: ChatEncoder, make_target: Any) -> None:
    assert reason(encoder, talk("one?")) == Reason.NO_ASSISTANT_TURN
    assert reason(encoder, talk("one?", " \n ")) == Reason.EMPTY_ANSWER
    assert reason(encoder, talk("one?", "", "two?", "three")) == Reason.EMPTY_ANSWER
    answer_first = Conversation(messages=(Message("assistant", "hello"),), source="talk.jsonl", line=7)
    assert reason(encoder, answer_first) == Reason.NO_PROMPT
    assert reason(encoder, talk("what is <|im_end|>?", "a token")) == Reason.STOP_TOKEN_IN_CONTENT
    assert reason(encoder, talk("one?", "two<|im_end|>")) == Reason.STOP_TOKEN_IN_CONTENT
    assert reason(encoder, talk("one?", answer_token_ids=(5, 9999))) == Reason.TOKEN_OUTSIDE_VOCABULARY
    assert reason(ChatEncoder(make_target(vocab=100)), talk("one?", "two")) == Reason.TOKEN_OUTSIDE_VOCABULARY
    picky = ChatEncoder(make_target(template=PICKY))
    assert reason(picky, talk("one?", "two", "three?", "four")) == Reason.TEMPLATE_REFUSED
    with pytest.raises(CorpusError, match="one question only"):
        picky.encode_prompt(talk("a", "b", "c").messages)


def test_a_batch_keeps_order_and_tells_rejects_apart(encoder: ChatEncoder) -> None:
    good, bad = talk("one?", "two."), talk("one?")
    first, second, third = encoder.encode_batch([good, bad, good])
    assert isinstance(first, Encoded)
    assert isinstance(third, Encoded)
    assert second == Reject("talk.jsonl", 7, Reason.NO_ASSISTANT_TURN, "nobody answers")
    assert np.array_equal(first.token_ids, third.token_ids)
    assert encoder.encode_batch([]) == []


def test_tool_calls_reach_the_template(make_target: Any) -> None:
    folder = make_target(template=CALLS)
    call = {"type": "function", "function": {"name": "look", "arguments": {}}}
    messages = (Message("user", "one?"), Message("assistant", "", fields={"tool_calls": [call]}))
    encoded = only(ChatEncoder(folder), Conversation(messages=messages, source="", line=1, tools=({"type": "function"},)))
    assert supervised(folder, encoded) == ["calls look, tools 1<|im_end|>"]


CALLS = TAGGED.replace(
    "{{ message['content'] +",
    "{{ 'calls ' + message.tool_calls[0].function.name + ', tools ' + tools|length|string + message['content'] +",
)


def test_a_target_without_template_or_tokenizer_is_refused(make_target: Any) -> None:
    folder = make_target(template="")
    with pytest.raises(CorpusError, match="no chat template"):
        ChatEncoder(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CorpusError, match=r"tokenizer\.json"):
        ChatEncoder(folder)
