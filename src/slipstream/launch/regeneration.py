"""The target's own answers to whole conversations, turn by turn: each prompt holds the answers that the target gave before it.

Who answers is another matter: `answer_here` asks a model in this process, a round of turns at a time; `launch.served_answers` a
server. Both write one record for each answer: a conversation of three turns is three records, each a prompt and an answer.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

from slipstream.config import TargetInfo
from slipstream.corpus.conversation import Conversation, Message, Reject
from slipstream.corpus.meta import template_fingerprint, tokenizer_fingerprint
from slipstream.corpus.sources import read_conversations
from slipstream.corpus.turns import split_turns, uses_tools
from slipstream.errors import CorpusError, UsageError
from slipstream.target.answer_file import AnswerFile, Prompt

if TYPE_CHECKING:
    from slipstream.corpus.chat import ChatEncoder


@dataclass(slots=True)
class Talk:
    """A conversation under way: what is said between the answers, and all that has been said so far."""

    pieces: tuple[tuple[Message, ...], ...]
    said: tuple[Message, ...] = ()
    turn: int = 0
    keys: list[str] = field(default_factory=list)

    @property
    def turns_left(self) -> int:
        """Answers that are still to come."""
        return len(self.pieces) - self.turn


@dataclass(frozen=True, slots=True)
class Counts:
    """What one call did: prompts answered now, found answered, given twice; how many of now the limit cut, or came as text.

    `refused` counts conversations that ended before their last answer, by reason; `unanswered` those that a later call may get
    an answer to.
    """

    answered: int
    already_answered: int
    duplicates: int
    cut: int
    from_text: int
    unanswered: int
    refused: Mapping[str, int]


class Regeneration:
    """What both ways of answering share: prompts, answers heard, and counts. `room` is the longest prompt in tokens."""

    def __init__(self, *, encoder: ChatEncoder, file: AnswerFile, room: int) -> None:
        self.encoder, self.file = encoder, file
        self._room = room
        self._asked: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._cut: set[str] = set()
        self._from_text = 0
        self._unanswered = 0
        self.num_turns = 0
        self.num_done = 0

    def open(self, sources: Sequence[str], *, limit: int | None) -> list[Talk]:
        """The conversations of sources, at most the first `limit`; counts rows that cannot be read or answered."""

        def reject(row: Reject) -> None:
            self._refused[row.reason.value] += 1

        conversations = islice(read_conversations(sources, on_reject=reject), limit)
        talks = [talk for talk in map(self._open, conversations) if talk is not None]
        self.num_turns = sum(talk.turns_left for talk in talks)
        return talks

    def next_prompt(self, talk: Talk) -> Prompt | None:
        """What the target has to answer next in a talk; none when that is over, or its next prompt is refused and counted."""
        if not talk.turns_left:
            return None
        messages = (*talk.said, *talk.pieces[talk.turn])
        try:
            token_ids = self.encoder.encode_prompt(messages)
        except CorpusError:
            self.end(talk, reason="template_refused")
            return None
        if len(token_ids) > self._room:
            self.end(talk, reason="prompt_too_long")
            return None
        return Prompt(token_ids=tuple(token_ids), messages=tuple(message.as_dict() for message in messages))

    def hear(self, talk: Talk, prompt: Prompt) -> None:
        """Go on in a talk with the answer that the file has; one that was cut is the talk's last."""
        key = self.file.key(prompt.token_ids)
        record = self.file.record(key)
        self._asked[key] += 1
        talk.keys.append(key)
        if record["finish"] == "length":
            self._cut.add(key)
            self.end(talk, reason=None)
            return
        message = record.get("message") or {"content": record["answer"]}
        fields = {name: message[name] for name in ("reasoning_content",) if name in message}
        answer = Message("assistant", str(message["content"]), fields=fields)
        talk.said = (*talk.said, *talk.pieces[talk.turn], answer)
        talk.turn += 1
        self.num_done += 1

    def end(self, talk: Talk, *, reason: str | None) -> None:
        """A talk is over before its last answer."""
        self.num_done += talk.turns_left
        talk.pieces = talk.pieces[: talk.turn]
        if reason is not None:
            self._refused[reason] += 1

    def count_from_text(self) -> None:
        """An answer came without token ids; the target's tokenizer made them."""
        self._from_text += 1

    def leave(self, talk: Talk) -> None:
        """A talk stays unanswered from here on, until the command is called again."""
        self._unanswered += 1
        self.end(talk, reason=None)

    def check_answers(self, sources: Sequence[str], *, talks: Iterable[Talk]) -> None:
        """Raises `UsageError` when nothing could be asked, or no answer kept."""
        if not any(talk.keys for talk in talks) and not self._unanswered:
            refused = dict(sorted(self._refused.items()))
            raise UsageError(key="SRC", value=list(sources), rule=f"give no answer (refused: {refused})")

    def finish(self, talks: Iterable[Talk]) -> Counts:
        """Put the file's lines into the order of the sources, and count."""
        self.file.arrange(key for talk in talks for key in talk.keys)
        new = [key for key in self._asked if key not in self.file.found]
        return Counts(
            answered=len(new),
            already_answered=len(self._asked) - len(new),
            duplicates=self._asked.total() - len(self._asked),
            cut=sum(key in self._cut for key in new),
            from_text=self._from_text,
            unanswered=self._unanswered,
            refused=dict(sorted(self._refused.items())),
        )

    def _open(self, conversation: Conversation) -> Talk | None:
        pieces = split_turns(conversation.messages)
        if not pieces:
            self._refused["no_user_turn"] += 1
            return None
        if conversation.tools or uses_tools(conversation.messages):
            self._refused["tools_not_answered"] += 1
            return None
        return Talk(pieces=tuple(pieces))


def answer_here(
    run: Regeneration,
    talks: Sequence[Talk],
    *,
    answer: Callable[[Sequence[Prompt], Callable[[int, int], None]], None],
    on_progress: Callable[[int, int], None],
) -> None:
    """Have all talks' next prompts answered into the file, round by round; `answer` is told where to report how far it is."""
    while True:
        waiting = [(talk, prompt) for talk in talks if (prompt := run.next_prompt(talk)) is not None]
        if not waiting:
            return
        before = run.num_done

        def report(done: int, total: int, before: int = before, asked: int = len(waiting)) -> None:
            on_progress(before + done * asked // total, run.num_turns)

        answer([prompt for _, prompt in waiting], report)
        for talk, prompt in waiting:
            run.hear(talk, prompt)
        on_progress(run.num_done, run.num_turns)


def served_fingerprint(info: TargetInfo) -> str:
    """What is known here of a target whose weights a server holds: config, tokenizer and chat template (32 hex digits)."""
    digest = hashlib.sha256((info.folder / "config.json").read_bytes())
    for part in ("served", tokenizer_fingerprint(info.folder), template_fingerprint(info.folder)):
        digest.update(f"\0{part}".encode())
    return digest.hexdigest()[:32]


def option_record(options: Mapping[str, Any], *, template_arguments: Mapping[str, Any]) -> dict[str, Any]:
    """How prompts are answered, as the file keeps it; arguments of the template only where there are any."""
    return {**options, **({"template_arguments": dict(template_arguments)} if template_arguments else {})}
