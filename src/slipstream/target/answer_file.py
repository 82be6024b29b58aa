"""Answers that survive a plug that is pulled: an append-only file of JSON lines, resumed where it ends.

A record is keyed by a digest of its prompt, of how it is answered, and of the target. This process and a server write the same
records. Imports neither torch nor transformers.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from slipstream.errors import TargetError


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as token ids, and the messages that it renders: plain dicts of role, content and what else templates read."""

    token_ids: tuple[int, ...]
    messages: tuple[dict[str, object], ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer as token ids, stop token included, and as text without it; "length" if the limit cut it.

    `message` is what stands for it in the prompts of later turns, where that is not just its text.
    """

    token_ids: tuple[int, ...]
    text: str
    finish: Literal["stop", "length"]
    message: Mapping[str, object] | None = None


class AnswerFile:
    """The file of answers. A last line that was torn by a kill is cut off when the file is opened."""

    def __init__(self, path: Path, *, target_fingerprint: str, options: Mapping[str, Any]) -> None:
        """Open or create; `options` are whatever decides about an answer's tokens besides prompt and target, as JSON.

        Raises `TargetError` if the file holds anything but answers made in the same way.
        """
        self.path, self.target_fingerprint = path, target_fingerprint
        self._options = json.loads(json.dumps(options))
        self._places: dict[str, tuple[int, int]] = {}
        self._end = 0
        if path.exists():
            self._read()
        self.found = frozenset(self._places)
        """Keys of the answers that were there when the file was opened."""

    def __contains__(self, key: str) -> bool:
        return key in self._places

    def key(self, token_ids: Sequence[int]) -> str:
        """Digest of a prompt, the options and the target."""
        how = {**self._options, "target_fingerprint": self.target_fingerprint}
        content = json.dumps([list(token_ids), how], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:32]

    def record(self, key: str) -> dict[str, Any]:
        """The record of an answer that is there."""
        start, length = self._places[key]
        with self.path.open("rb") as stream:
            stream.seek(start)
            record: dict[str, Any] = json.loads(stream.read(length))
        return record

    def append(self, answers: Sequence[tuple[Prompt, Answer]]) -> None:
        """Add answers and wait until they are on disk.

        A record holds `messages` (the prompt's), `answer_token_ids` (text would not give them back token by token), `answer`
        (the same as text, without the stop token), `finish` ("stop", or "length" where the limit cut it),
        `target_fingerprint`, `options`, `key`, and `message` where it differs from the text.
        """
        records = [self._record(prompt, answer) for prompt, answer in answers]
        lines = [json.dumps(record, ensure_ascii=False).encode() + b"\n" for record in records]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as stream:
            stream.write(b"".join(lines))
            stream.flush()
            os.fsync(stream.fileno())
        for record, line in zip(records, lines, strict=True):
            self._place(record["key"], len(line))

    def arrange(self, keys: Iterable[str]) -> None:
        """Put the lines of these keys first, in this order, whenever they were answered; the others follow as they were."""
        first = dict.fromkeys(key for key in keys if key in self._places)
        order = [*first, *(key for key in self._places if key not in first)]
        if order == list(self._places):
            return
        places, self._places, self._end = self._places, {}, 0
        sorted_file = self.path.with_name(self.path.name + ".partial")
        with self.path.open("rb") as stream, sorted_file.open("wb") as target:
            for key in order:
                start, length = places[key]
                stream.seek(start)
                target.write(stream.read(length))
                self._place(key, length)
            target.flush()
            os.fsync(target.fileno())
        sorted_file.replace(self.path)

    def _record(self, prompt: Prompt, answer: Answer) -> dict[str, Any]:
        return {
            "messages": list(prompt.messages),
            "answer": answer.text,
            "answer_token_ids": list(answer.token_ids),
            "finish": answer.finish,
            **({} if answer.message is None else {"message": dict(answer.message)}),
            "target_fingerprint": self.target_fingerprint,
            "options": self._options,
            "key": self.key(prompt.token_ids),
        }

    def _place(self, key: str, length: int) -> None:
        self._places[key] = (self._end, length)
        self._end += length

    def _read(self) -> None:
        with self.path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.endswith(b"\n"):
                    break
                self._place(self._checked(line, number=number), len(line))
        if self._end < self.path.stat().st_size:
            with self.path.open("r+b") as stream:
                stream.truncate(self._end)

    def _checked(self, line: bytes, *, number: int) -> str:
        place = f"{self.path}:{number}"
        try:
            record = json.loads(line)
            key, options = record["key"], record["options"]
        except (ValueError, KeyError, TypeError) as error:
            hint = "give another --out"
            raise TargetError(
                key=place, value=line[:60].decode(errors="replace"), rule="is not an answer", hint=hint
            ) from error
        if record.get("target_fingerprint") != self.target_fingerprint or options != self._options:
            raise TargetError(
                key=place,
                value={"target_fingerprint": record.get("target_fingerprint"), **options},
                rule=f"was answered in another way than now: {self.target_fingerprint}, {self._options}",
                hint="give another --out",
            )
        return str(key)
