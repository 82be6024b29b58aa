"""Answers that survive a plug that is pulled: an append-only file of JSON lines, one batch a write, resumed where it ends.

A record is keyed by a digest of its prompt, of how it is answered, and of the target. Batches are planned over all prompts,
finished or not, so that an interrupted file ends up with the same answers as one written in one go.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from slipstream.errors import TargetError
from slipstream.target.generate import Progress, answer_batch, check_prompts, plan_batches


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """How prompts are answered: whatever decides about an answer's tokens besides the prompt."""

    target_fingerprint: str
    dtype: str
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as token ids, and the messages that it renders: plain dicts of role, content and what else templates read."""

    token_ids: tuple[int, ...]
    messages: tuple[dict[str, object], ...]


@dataclass(frozen=True, slots=True)
class AnswerCounts:
    """What one call did: prompts answered now, found answered, given twice; answers of now that the length limit cut."""

    answered: int
    already_answered: int
    duplicates: int
    cut: int


class AnswerFile:
    """The file of answers. A last line that was torn by a kill is cut off when the file is opened."""

    def __init__(self, path: Path, *, options: AnswerOptions) -> None:
        """Open or create. Raises `TargetError` if the file holds anything but answers made in the same way."""
        self.path, self.options = path, options
        self._keys: set[str] = set()
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            self._read()

    def __contains__(self, key: str) -> bool:
        return key in self._keys

    def key(self, token_ids: Sequence[int]) -> str:
        """Digest of a prompt and the options."""
        content = json.dumps([list(token_ids), asdict(self.options)], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:32]

    def append(self, records: Sequence[dict[str, Any]]) -> None:
        """Add records and wait until they are on disk."""
        lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        with self.path.open("ab") as stream:
            stream.write(lines.encode())
            stream.flush()
            os.fsync(stream.fileno())
        self._keys.update(record["key"] for record in records)

    def _read(self) -> None:
        content = self.path.read_bytes()
        whole = content.rfind(b"\n") + 1
        for number, line in enumerate(content[:whole].splitlines(), start=1):
            self._keys.add(self._checked(line, number=number))
        if whole < len(content):
            with self.path.open("r+b") as stream:
                stream.truncate(whole)

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
        asked = json.loads(json.dumps(_options_record(self.options)))
        if record.get("target_fingerprint") != self.options.target_fingerprint or options != asked:
            raise TargetError(
                key=place,
                value={"target_fingerprint": record.get("target_fingerprint"), **options},
                rule=f"was answered in another way than now: {self.options.target_fingerprint}, {asked}",
                hint="give another --out",
            )
        return str(key)


def answer_resumably(
    *,
    model: PreTrainedModel,
    prompts: Sequence[Prompt],
    file: AnswerFile,
    decode: Callable[[Sequence[int]], str],
    batch_size: int,
    on_progress: Progress | None = None,
) -> AnswerCounts:
    """Answer what the file lacks, greedily, and append it.

    A record holds `messages` (the prompt's), `answer_token_ids` (stop token included: text would not give them back token by
    token), `answer` (the same as text, without the stop token, by `decode`), `finish` ("stop", or "length" where the limit
    cut the answer), `target_fingerprint`, `options` and `key`.
    """
    unique = {file.key(prompt.token_ids): prompt for prompt in prompts}
    keys, kept = list(unique), list(unique.values())
    ids = [prompt.token_ids for prompt in kept]
    check_prompts(model=model, prompts=ids, max_new_tokens=file.options.max_new_tokens)
    already = sum(key in file for key in keys)
    done, cut = 0, 0
    for batch in plan_batches(prompts=ids, batch_size=batch_size):
        if any(keys[index] not in file for index in batch):
            answers = answer_batch(
                model=model,
                prompts=[ids[index] for index in batch],
                max_new_tokens=file.options.max_new_tokens,
                stop_token_ids=file.options.stop_token_ids,
            )
            records = [
                _record(prompt=kept[index], answer=answer, key=keys[index], options=file.options, decode=decode)
                for index, answer in zip(batch, answers, strict=True)
                if keys[index] not in file
            ]
            cut += sum(record["finish"] == "length" for record in records)
            file.append(records)
        done += len(batch)
        if on_progress is not None:
            on_progress(done, len(kept))
    return AnswerCounts(answered=len(kept) - already, already_answered=already, duplicates=len(prompts) - len(kept), cut=cut)


def _record(
    *, prompt: Prompt, answer: list[int], key: str, options: AnswerOptions, decode: Callable[[Sequence[int]], str]
) -> dict[str, Any]:
    stopped = answer[-1] in options.stop_token_ids
    text = decode(answer[:-1] if stopped else answer)
    return {
        "messages": list(prompt.messages),
        "answer": text,
        "answer_token_ids": answer,
        "finish": "stop" if stopped else "length",
        "target_fingerprint": options.target_fingerprint,
        "options": _options_record(options),
        "key": key,
    }


def _options_record(options: AnswerOptions) -> dict[str, Any]:
    return {name: value for name, value in asdict(options).items() if name != "target_fingerprint"}
