"""What a corpus says of itself in `meta.json`. Standard library only: the preflight reads it in milliseconds."""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from slipstream.errors import CorpusError

META_FILE = "meta.json"
FORMAT = 1
"""Rises when the layout of a store changes; another number is refused, not converted."""

_SPECIAL_TOKENS = ("bos_token", "eos_token")
"""Those that chat templates read by name."""


@dataclass(frozen=True, slots=True)
class FileStamp:
    """Size and SHA-256 of one file of a store."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class CorpusMeta:
    """Identity and counts of a corpus.

    `fingerprint` covers content, tokenizer, template and options. `num_anchors` counts positions where a block can be
    anchored (the token and the next one supervised); `num_joined` rows that became part of the document of a row that
    continues them; `max_tokens` is the length of the longest document; `rejects` and
    `warnings` count rows by reason; `files` stamps every other file of the store; `token_present` is a bit set of the
    token ids that occur, least significant bit first. A draft handed to `write_store` leaves the counts at 0.
    """

    target: str
    tokenizer_fingerprint: str
    template_fingerprint: str
    options: Mapping[str, Any] = field(default_factory=dict)
    fingerprint: str = ""
    num_documents: int = 0
    num_joined: int = 0
    num_tokens: int = 0
    num_supervised: int = 0
    num_anchors: int = 0
    max_tokens: int = 0
    rejects: Mapping[str, int] = field(default_factory=dict)
    warnings: Mapping[str, int] = field(default_factory=dict)
    files: Mapping[str, FileStamp] = field(default_factory=dict)
    token_present: bytes = b""

    def contains_token(self, token_id: int) -> bool:
        """Whether any document holds this token."""
        byte = token_id >> 3
        return byte < len(self.token_present) and bool(self.token_present[byte] >> (token_id & 7) & 1)

    @property
    def num_rows(self) -> int:
        """Rows that were read, kept or not."""
        return self.num_documents + self.num_joined + sum(self.rejects.values())


def write_meta(*, folder: Path, meta: CorpusMeta) -> None:
    """Write `meta.json` with a checksum over itself."""
    body = asdict(meta) | {"format": FORMAT, "token_present": base64.b64encode(zlib.compress(meta.token_present)).decode()}
    (folder / META_FILE).write_text(json.dumps(body | {"checksum": _checksum(body)}, indent=1) + "\n")


def read_meta(folder: str | Path) -> CorpusMeta:
    """Read `meta.json` of a store. Raises `CorpusError` when there is none, or it is damaged or of another format."""
    file = Path(folder) / META_FILE
    try:
        body = json.loads(file.read_text())
    except FileNotFoundError as error:
        raise CorpusError(
            key="corpus.path", value=str(folder), rule=f"has no {META_FILE}", hint="make it with `slipstream prepare`"
        ) from error
    except (OSError, ValueError) as error:
        raise _damaged(file, f"cannot be read: {error}") from error
    if not isinstance(body, dict) or body.pop("checksum", None) != _checksum(body):
        raise _damaged(file, "is damaged: its checksum does not fit")
    if body.pop("format", None) != FORMAT:
        raise CorpusError(
            key="corpus.path", value=str(folder), rule=f"is not a store of format {FORMAT}", hint="prepare it again"
        )
    files = {name: FileStamp(**stamp) for name, stamp in body["files"].items()}
    present = zlib.decompress(base64.b64decode(body["token_present"]))
    return CorpusMeta(**{**body, "files": files, "token_present": present})


def check_sizes(*, folder: str | Path, meta: CorpusMeta) -> None:
    """Quick look: every file of the store is there at its size. Raises `CorpusError` naming the first that is not."""
    for name, stamp in meta.files.items():
        file = Path(folder) / name
        if not file.is_file():
            raise _damaged(file, "is missing from the corpus")
        size = file.stat().st_size
        if size != stamp.bytes:
            what = "truncated" if size < stamp.bytes else "too long"
            raise _damaged(file, f"is {what}: {size} bytes, written were {stamp.bytes}")


def check_contents(*, folder: str | Path, meta: CorpusMeta) -> None:
    """Full look: sizes and SHA-256 of every file. Raises `CorpusError` naming the first that is missing or damaged."""
    check_sizes(folder=folder, meta=meta)
    for name, stamp in meta.files.items():
        file = Path(folder) / name
        if stamp_file(file).sha256 != stamp.sha256:
            raise _damaged(file, "is damaged: its SHA-256 is not the one that was written")


def stamp_file(file: Path) -> FileStamp:
    """Size and SHA-256 of a file as it is now."""
    with file.open("rb") as stream:
        return FileStamp(bytes=file.stat().st_size, sha256=hashlib.file_digest(stream, "sha256").hexdigest())


def corpus_fingerprint(*, content: str, meta: CorpusMeta) -> str:
    """Identity of a corpus: its content's digest, tokenizer, chat template and options, whatever paths they came from."""
    parts = [FORMAT, content, meta.tokenizer_fingerprint, meta.template_fingerprint, meta.options]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def tokenizer_fingerprint(folder: str | Path) -> str:
    """Digest of a target's `tokenizer.json` and special tokens. Raises `CorpusError` when it has no `tokenizer.json`."""
    file = Path(folder) / "tokenizer.json"
    try:
        content = stamp_file(file).sha256
    except OSError as error:
        raise CorpusError(
            key="target", value=str(folder), rule="has no tokenizer.json", hint="a fast tokenizer is needed"
        ) from error
    config = _json(Path(folder) / "tokenizer_config.json")
    special = {key: _token_text(config.get(key)) for key in _SPECIAL_TOKENS}
    return hashlib.sha256(json.dumps([content, special], sort_keys=True).encode()).hexdigest()


def template_fingerprint(folder: str | Path) -> str:
    """Digest of a target's chat template, wherever its folder keeps it; templates kept apart all count."""
    root = Path(folder)
    files = [root / "chat_template.jinja", *sorted((root / "additional_chat_templates").glob("*.jinja"))]
    found: object = {file.name: file.read_text() for file in files if file.is_file()}
    if not found:
        inside = (_json(root / name).get("chat_template") for name in ("chat_template.json", "tokenizer_config.json"))
        found = next((template for template in inside if template is not None), None)
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text())
    except ValueError as error:
        raise CorpusError(key="target", value=str(file), rule=f"cannot be read as JSON: {error}") from error
    return content if isinstance(content, dict) else {}


def _token_text(token: object) -> object:
    """A special token is written as its text or as an object with flags, by version; its text is what counts."""
    return token.get("content") if isinstance(token, dict) else token


def _checksum(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _damaged(file: Path, rule: str) -> CorpusError:
    return CorpusError(key="corpus.path", value=str(file), rule=rule, hint="prepare the corpus again, or restore this file")
