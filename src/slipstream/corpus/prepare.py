"""Conversations in, corpus out: every row becomes a document or a counted reject, none is held longer than a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.config import TargetInfo, read_target_info
from slipstream.corpus.chat import ChatEncoder, Encoded
from slipstream.corpus.conversation import Conversation, ConversationRefused, Reason, Reject, Remark
from slipstream.corpus.joining import Turn, joined
from slipstream.corpus.meta import CorpusMeta, template_fingerprint, tokenizer_fingerprint
from slipstream.corpus.sources import Source, open_sources, read_conversations
from slipstream.corpus.store import StoreWriter, count_anchors
from slipstream.errors import CorpusError

DEFAULT_MAX_TOKENS = 4096
BATCH_CONVERSATIONS = 128
"""Conversations that the tokenizer gets at once: enough to keep its threads busy."""


@dataclass(frozen=True, slots=True)
class PrepareOptions:
    """How conversations become documents.

    `max_tokens` cuts a document's end off; none takes 4,096, or the target's longest sequence if that is shorter.
    `mask_token_id` refuses rows that hold this token. `template_arguments` go to the chat template. `strict` makes the
    first reject an error. `overwrite` replaces a corpus that is already there.
    """

    max_tokens: int | None = None
    mask_token_id: int | None = None
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False
    overwrite: bool = False


@dataclass(frozen=True, slots=True)
class PrepareProgress:
    """How far it is. `bytes_read` of `bytes_total` over all sources; documents kept and rows refused so far."""

    bytes_read: int
    bytes_total: int
    num_documents: int
    num_rejects: int


def prepare(
    sources: Sequence[str | Path],
    target: str | Path,
    out: str | Path,
    options: PrepareOptions | None = None,
    on_progress: Callable[[PrepareProgress], None] | None = None,
) -> CorpusMeta:
    """Write the conversations of sources (the kinds are in `sources`) as a corpus for a target and return its meta.

    Raises `CorpusError` for sources that cannot be read, an `out` that is taken, a row that is refused under `strict`, and
    when no document is left; then nothing is written.
    """
    options = options or PrepareOptions()
    opened = open_sources(sources)
    info = read_target_info(str(target))
    max_tokens = _max_tokens(options=options, info=info)
    identity = {
        "max_tokens": max_tokens,
        "mask_token_id": options.mask_token_id,
        "template_arguments": dict(options.template_arguments),
    }
    draft = CorpusMeta(
        target=str(target),
        tokenizer_fingerprint=tokenizer_fingerprint(info.folder),
        template_fingerprint=template_fingerprint(info.folder),
        options=identity,
    )
    with StoreWriter(out, overwrite=options.overwrite) as writer:
        encoder = ChatEncoder(info.folder, template_arguments=options.template_arguments)
        run = _Run(writer=writer, encoder=encoder, options=options, max_tokens=max_tokens)
        run.read(sources=opened, on_progress=on_progress)
        if not writer.num_documents:
            counts = ", ".join(f"{count} {reason}" for reason, count in sorted(writer.rejects.items())) or "no rows at all"
            raise CorpusError(key="SRC", value=" ".join(source.name for source in opened), rule=f"gives no document: {counts}")
        return writer.finish(replace(draft, num_joined=run.num_joined))


@dataclass(slots=True)
class _Run:
    """One pass over the sources."""

    writer: StoreWriter
    encoder: ChatEncoder
    options: PrepareOptions
    max_tokens: int
    bytes_read: int = 0
    num_joined: int = 0
    held: Turn | None = None
    """A row that the next one may continue."""

    def read(self, *, sources: Sequence[Source], on_progress: Callable[[PrepareProgress], None] | None) -> None:
        bytes_total = sum(source.num_bytes for source in sources)
        conversations = read_conversations(sources, on_reject=self.refuse, on_read=self.count_bytes)
        more = True
        while more:
            batch = list(islice(conversations, BATCH_CONVERSATIONS))
            more = bool(batch)
            for conversation, encoded in zip(batch, self.encoder.encode_batch(batch), strict=True):
                self.take(conversation, encoded)
            if not more:
                self.let_go()
            if on_progress is not None:
                on_progress(self.progress(bytes_total))

    def progress(self, bytes_total: int) -> PrepareProgress:
        return PrepareProgress(
            bytes_read=self.bytes_read,
            bytes_total=bytes_total,
            num_documents=self.writer.num_documents + (self.held is not None),
            num_rejects=sum(self.writer.rejects.values()),
        )

    def count_bytes(self, count: int) -> None:
        self.bytes_read += count

    def refuse(self, reject: Reject) -> None:
        if self.options.strict:
            raise ConversationRefused(reject)
        self.writer.reject(reject)

    def take(self, conversation: Conversation, encoded: Encoded | Reject) -> None:
        if isinstance(encoded, Reject):
            self.refuse(encoded)
            return
        turn = Turn(conversation=conversation, encoded=encoded)
        longer = joined(self.held, turn) if self.held is not None else None
        if longer is not None:
            self.num_joined += 1
            self.held = longer
            return
        self.let_go()
        if conversation.answer_token_ids is None:
            self.keep(conversation, encoded)
        else:
            self.held = turn

    def let_go(self) -> None:
        if self.held is not None:
            turn, self.held = self.held, None
            self.keep(turn.conversation, turn.encoded)

    def keep(self, conversation: Conversation, encoded: Encoded) -> None:
        ids, mask = encoded.token_ids[: self.max_tokens], encoded.loss_mask[: self.max_tokens]
        truncated = len(ids) < len(encoded.token_ids)
        problem = self.problem(ids=ids, mask=mask, was_trainable=count_anchors(encoded.loss_mask) > 0)
        if problem is not None:
            reason, detail = problem
            self.refuse(Reject(source=conversation.source, line=conversation.line, reason=reason, detail=detail))
            return
        self.writer.add(
            token_ids=ids,
            loss_mask=mask,
            source=conversation.source,
            line=conversation.line,
            remarks=(*encoded.remarks, Remark.TRUNCATED) if truncated else encoded.remarks,
        )

    def problem(self, *, ids: np.ndarray, mask: np.ndarray, was_trainable: bool) -> tuple[Reason, str] | None:
        """Why a document cannot be trained on, if so: `ids` and `mask` are cut already."""
        if not count_anchors(mask):
            if was_trainable:
                return Reason.PROMPT_TOO_LONG, f"the first {self.max_tokens} tokens hold no two supervised in a row"
            return Reason.TOO_FEW_SUPERVISED, "no two supervised tokens in a row, so that nothing can be drafted"
        token = self.options.mask_token_id
        if token is not None and (ids == token).any():
            return Reason.CONTAINS_MASK_TOKEN, f"holds the mask token {token}"
        return None


def _max_tokens(*, options: PrepareOptions, info: TargetInfo) -> int:
    longest = info.max_position_embeddings
    if options.max_tokens is None:
        return min(DEFAULT_MAX_TOKENS, longest)
    if options.max_tokens < 2 or options.max_tokens > longest:
        raise CorpusError(
            key="--max-tokens", value=options.max_tokens, rule=f"must be from 2 to the target's longest sequence, {longest}"
        )
    return options.max_tokens
