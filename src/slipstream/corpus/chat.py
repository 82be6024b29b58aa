"""From a conversation to token ids and loss mask, by the target's own chat template.

Templates need no `{% generation %}` tags: the conversation is rendered up to each answer, with the generation prompt, and
what follows that text in the whole rendering is what the assistant itself generates, through its stop token. What the
template puts after the stop token (a newline, mostly) is the template's and is not supervised.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np

from slipstream.config import read_target_info
from slipstream.corpus.conversation import Conversation, ConversationRefused, Message, Reason, Reject, Remark
from slipstream.corpus.forms import RowRefused
from slipstream.errors import CorpusError
from slipstream.records import BoolArray, Int32Array

P = ParamSpec("P")
R = TypeVar("R")

_PROBE = "slipstream"


@dataclass(frozen=True, slots=True)
class Encoded:
    """A conversation in tokens: ids int32 `[L]`, loss mask bool `[L]`, and what is worth counting."""

    token_ids: Int32Array
    loss_mask: BoolArray
    remarks: tuple[Remark, ...]


@dataclass(frozen=True, slots=True)
class _Turn:
    """An answer in the rendered text: what comes before it, and itself through its stop token or the content's end."""

    prompt: str
    answer: str
    has_stop: bool


@dataclass(frozen=True, slots=True)
class _Draft:
    """A rendered conversation. `answer_ids` stands in for turns when the answer came as ids."""

    text: str
    turns: tuple[_Turn, ...]
    answer_ids: tuple[int, ...] | None
    remarks: tuple[Remark, ...]

    def texts(self) -> list[str]:
        """All that must be tokenised: the whole, each prompt, and each answer whose end is not a token."""
        ends = [turn.prompt + turn.answer for turn in self.turns if not turn.has_stop]
        return [self.text, *(turn.prompt for turn in self.turns), *ends]


class ChatEncoder:
    """Applies a target's chat template and tokenizer.

    `template_arguments` go to the template with every rendering (`enable_thinking` …). Loads transformers. Raises
    `CorpusError` when the target has no tokenizer or no chat template.
    """

    def __init__(self, target_folder: str | Path, *, template_arguments: Mapping[str, Any] | None = None) -> None:
        info = read_target_info(str(target_folder))
        self._vocab_size = info.vocab_size
        self._arguments = dict(template_arguments or {})
        self._tokenizer = _load_tokenizer(info.folder)
        added = self._tokenizer.added_tokens_decoder
        special = {token for token, entry in added.items() if entry.special}
        named = {*info.eos_token_ids, self._tokenizer.eos_token_id, self._turn_end(special)}
        self.stop_token_ids: tuple[int, ...] = tuple(sorted(token for token in named if token is not None))
        strings = [added[token].content for token in self.stop_token_ids if token in added]
        self._stops = re.compile("|".join(map(re.escape, sorted(strings, key=len, reverse=True))) or r"(?!)")

    def encode(self, conversation: Conversation) -> tuple[Int32Array, BoolArray]:
        """Token ids int32 `[L]` and loss mask bool `[L]`. Raises `ConversationRefused` with the reason."""
        encoded = self.encode_batch([conversation])[0]
        if isinstance(encoded, Reject):
            raise ConversationRefused(encoded)
        return encoded.token_ids, encoded.loss_mask

    def encode_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a prompt with the template's generation prompt: what a server would answer.

        Raises `CorpusError` when the template refuses the messages.
        """
        try:
            text = self._render(messages, tools=(), generation_prompt=True)
        except RowRefused as refused:
            raise CorpusError(key="messages", value=[m.role for m in messages], rule=refused.detail) from refused
        return self._tokenize([text])[0]

    def encode_batch(self, conversations: Sequence[Conversation]) -> list[Encoded | Reject]:
        """Encode many at once (the tokenizer takes all cores), each to its tokens or its reject, in order."""
        drafts = [_or_reject(self._draft, conversation, conversation) for conversation in conversations]
        texts = [draft.texts() if isinstance(draft, _Draft) else [] for draft in drafts]
        flat = iter(self._tokenize([text for group in texts for text in group]))
        results: list[Encoded | Reject] = []
        for conversation, draft, group in zip(conversations, drafts, texts, strict=True):
            ids = [next(flat) for _ in group]
            results.append(draft if isinstance(draft, Reject) else _or_reject(self._mask, conversation, draft, ids))
        return results

    def _draft(self, conversation: Conversation) -> _Draft:
        messages = conversation.messages
        if any(self._stops.search(message.content) for message in messages):
            raise RowRefused(Reason.STOP_TOKEN_IN_CONTENT, "the text of a turn spells a stop token")
        if conversation.answer_token_ids is not None:
            return self._draft_of_ids(conversation)
        # Turns after the last answer are context that no token of an answer sees.
        last = max((place for place, message in enumerate(messages) if message.role == "assistant"), default=None)
        if last is None:
            raise RowRefused(Reason.NO_ASSISTANT_TURN, "nobody answers")
        messages = messages[: last + 1]
        _check_turns(messages)
        text = self._render(messages, tools=conversation.tools, generation_prompt=False)
        answers = [place for place, message in enumerate(messages) if message.role == "assistant"]
        found = [self._turn(messages, tools=conversation.tools, place=place, text=text) for place in answers]
        turns = tuple(turn for turn in found if turn is not None)
        if not turns:
            raise RowRefused(Reason.REWRITTEN_TURNS, "in the whole rendering no answer follows the prompt it was given to")
        remarks = [Remark.REWRITTEN_TURN] if len(turns) < len(found) else []
        remarks += [] if all(turn.has_stop for turn in turns) else [Remark.NO_STOP_TOKEN]
        return _Draft(text=text, turns=turns, answer_ids=None, remarks=tuple(remarks))

    def _draft_of_ids(self, conversation: Conversation) -> _Draft:
        ids = conversation.answer_token_ids
        assert ids is not None
        text = self._render(conversation.messages, tools=conversation.tools, generation_prompt=True)
        remarks = () if ids[-1] in self.stop_token_ids else (Remark.NO_STOP_TOKEN,)
        return _Draft(text=text, turns=(), answer_ids=ids, remarks=remarks)

    def _turn(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, object]], place: int, text: str
    ) -> _Turn | None:
        """Where an answer stands in `text`; `None` when the template wrote it otherwise there than when it was the last.

        Templates of thinking models drop earlier thoughts, so that an earlier turn of the whole rendering is not what the
        assistant generated after that prompt.
        """
        prompt = self._render(messages[:place], tools=tools, generation_prompt=True)
        whole = place == len(messages) - 1
        through = text if whole else self._render(messages[: place + 1], tools=tools, generation_prompt=False)
        if not text.startswith(prompt) or not through.startswith(prompt):
            return None
        answer = through[len(prompt) :]
        stop = self._stops.search(answer)
        content = messages[place].content.strip()
        end = stop.end() if stop else answer.rfind(content) + len(content) if content in answer else None
        if end is None or not text.startswith(answer[:end], len(prompt)):
            return None
        return _Turn(prompt=prompt, answer=answer[:end], has_stop=stop is not None)

    def _mask(self, draft: _Draft, ids: Sequence[Sequence[int]]) -> Encoded:
        whole = np.asarray([*ids[0], *(draft.answer_ids or ())], dtype=np.int32)
        if len(whole) and int(whole.max()) >= self._vocab_size:
            detail = f"token {int(whole.max())}, the target's vocabulary has {self._vocab_size}"
            raise RowRefused(Reason.TOKEN_OUTSIDE_VOCABULARY, detail)
        mask = np.zeros(len(whole), dtype=np.bool_)
        if draft.answer_ids is not None:
            mask[len(ids[0]) :] = True
            return Encoded(token_ids=whole, loss_mask=mask, remarks=draft.remarks)
        prompts, ends = ids[1 : 1 + len(draft.turns)], iter(ids[1 + len(draft.turns) :])
        if not all(np.array_equal(whole[: len(prompt)], prompt) for prompt in prompts):
            return self._mask_apart(draft, whole)
        for turn, prompt in zip(draft.turns, prompts, strict=True):
            end = self._stop_after(whole, len(prompt)) if turn.has_stop else _common_prefix(whole, next(ends))
            mask[len(prompt) : end] = True
        return Encoded(token_ids=whole, loss_mask=mask, remarks=draft.remarks)

    def _mask_apart(self, draft: _Draft, whole: Int32Array) -> Encoded:
        """Tokenise prompts and answers apart, as a server does that continues a prompt's ids.

        Needed where in the whole text a prompt's last characters and its answer's first become one token, or are cut
        otherwise. Refused where the pieces do not add up to the same text (tokenizers that put a space before a text).
        """
        cuts = [0, *(len(turn.prompt) for turn in draft.turns), len(draft.text)]
        pieces = self._tokenize([draft.text[start:end] for start, end in pairwise(cuts)])
        token_ids = np.asarray([token for piece in pieces for token in piece], dtype=np.int32)
        if self._tokenizer.decode(token_ids.tolist()) != self._tokenizer.decode(whole.tolist()):
            raise RowRefused(Reason.BOUNDARY_INSIDE_TOKEN, "the prompt's last characters and the answer's first are one token")
        mask = np.zeros(len(token_ids), dtype=np.bool_)
        starts = np.cumsum([len(piece) for piece in pieces]).tolist()
        for turn, start in zip(draft.turns, starts, strict=False):
            if turn.has_stop:
                end = self._stop_after(token_ids, start)
            else:
                end = start + _common_prefix(token_ids[start:], self._tokenize([turn.answer])[0])
            mask[start:end] = True
        return Encoded(token_ids=token_ids, loss_mask=mask, remarks=(*draft.remarks, Remark.TOKENISED_APART))

    def _stop_after(self, token_ids: Int32Array, start: int) -> int:
        """One past the first stop token from `start` on; the text holds one, so there is one."""
        return start + int(np.flatnonzero(np.isin(token_ids[start:], self.stop_token_ids))[0]) + 1

    def _turn_end(self, special: set[int]) -> int | None:
        """The special token that the template itself puts after an answer, which `eos` need not name."""
        try:
            text = self._render([Message("user", _PROBE), Message("assistant", _PROBE)], tools=(), generation_prompt=False)
        except RowRefused:
            return None
        tail = text[text.rfind(_PROBE) + len(_PROBE) :]
        return next((token for token in self._tokenize([tail])[0] if token in special), None)

    def _render(self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, object]], generation_prompt: bool) -> str:
        from jinja2.exceptions import TemplateError

        try:
            return str(
                self._tokenizer.apply_chat_template(
                    [message.as_dict() for message in messages],
                    tools=list(tools) or None,
                    tokenize=False,
                    add_generation_prompt=generation_prompt,
                    **self._arguments,
                )
            )
        # Templates check types by using them, so that what they refuse arrives as either.
        except (TemplateError, TypeError) as error:
            raise RowRefused(Reason.TEMPLATE_REFUSED, f"the chat template says: {error}") from error

    def _tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """The template has written all special tokens, so that none is added."""
        if not texts:
            return []
        ids: list[list[int]] = self._tokenizer(
            list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False
        )["input_ids"]
        return ids


def _or_reject(make: Callable[P, R], conversation: Conversation, *args: P.args, **kwargs: P.kwargs) -> R | Reject:
    try:
        return make(*args, **kwargs)
    except RowRefused as refused:
        return Reject(conversation.source, conversation.line, refused.reason, refused.detail)


def _check_turns(messages: Sequence[Message]) -> None:
    if messages[0].role == "assistant":
        raise RowRefused(Reason.NO_PROMPT, "the first turn is an answer to nothing")
    for place, message in enumerate(messages):
        if message.role == "assistant" and not message.content.strip() and not message.fields.get("tool_calls"):
            raise RowRefused(Reason.EMPTY_ANSWER, f"turn {place} is an answer without text")


def _common_prefix(left: Int32Array, right: Iterable[int]) -> int:
    """How many leading tokens two sequences share."""
    other = np.asarray(list(right), dtype=np.int32)
    shared = min(len(left), len(other))
    differ = np.flatnonzero(left[:shared] != other[:shared])
    return int(differ[0]) if len(differ) else shared


def _load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    if not (folder / "tokenizer.json").is_file():
        raise CorpusError(key="target", value=str(folder), rule="has no tokenizer.json", hint="a fast tokenizer is needed")
    tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    if not tokenizer.chat_template:
        raise CorpusError(key="target", value=str(folder), rule="has no chat template", hint="take the instruct model")
    return tokenizer
