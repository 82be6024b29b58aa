"""What is in a corpus, as data: the command line draws it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from slipstream.config import find_target
from slipstream.corpus.conversation import Reject
from slipstream.corpus.meta import CorpusMeta, tokenizer_fingerprint
from slipstream.corpus.store import CorpusStore
from slipstream.errors import CorpusError, PreflightError
from slipstream.records import BoolArray, Document, Int32Array

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_REJECTS = 20


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring tokens of a document that are all supervised, or all not."""

    text: str
    num_tokens: int
    supervised: bool


@dataclass(frozen=True, slots=True)
class Sample:
    """A document to look at: where it came from, and its text in runs."""

    document_id: int
    source: str
    line: int
    remarks: tuple[str, ...]
    num_tokens: int
    num_supervised: int
    num_anchors: int
    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class Bin:
    """Documents with `low` ≤ tokens < `high`."""

    low: int
    high: int
    num_documents: int


@dataclass(frozen=True, slots=True)
class CorpusReport:
    """All that `slipstream inspect` shows. `percentiles` are document lengths in tokens by percent of the documents.

    `rejects_shown` are the first refused rows; `text_note` says why samples show ids instead of text, empty if they do not.
    """

    meta: CorpusMeta
    percentiles: Mapping[int, int]
    histogram: tuple[Bin, ...]
    samples: tuple[Sample, ...]
    rejects_shown: tuple[Reject, ...]
    text_note: str

    @property
    def supervised_share(self) -> float:
        """Supervised tokens of all tokens."""
        return self.meta.num_supervised / max(1, self.meta.num_tokens)


def inspect_corpus(folder: str | Path, *, document_ids: Sequence[int], target: str | None = None) -> CorpusReport:
    """Open and verify a corpus and describe it, with the documents asked for.

    `target` is where to find the tokenizer if it moved since. Raises `CorpusError` for a damaged corpus or an unknown id.
    """
    store = CorpusStore.open(folder)
    for document_id in document_ids:
        if not 0 <= document_id < store.num_documents:
            raise CorpusError(key="--document", value=document_id, rule=f"the documents are 0 to {store.num_documents - 1}")
    tokenizer, note = _tokenizer(store.meta, target=target)
    return CorpusReport(
        meta=store.meta,
        percentiles=_percentiles(store.num_tokens),
        histogram=length_histogram(store.num_tokens),
        samples=tuple(_sample(store, document_id=document_id, tokenizer=tokenizer) for document_id in document_ids),
        rejects_shown=tuple(store.rejects()[:MAX_REJECTS]),
        text_note=note,
    )


def length_histogram(num_tokens: Int32Array) -> tuple[Bin, ...]:
    """Documents by length, in bins that double; the first holds the shortest document, the last the longest."""
    if not len(num_tokens):
        return ()
    first, last = int(num_tokens.min()).bit_length() - 1, int(num_tokens.max()).bit_length()
    edges = [2**power for power in range(max(0, first), last + 1)]
    counts = np.histogram(num_tokens, bins=[*edges[:-1], edges[-1] - 0.5])[0]
    return tuple(Bin(low, high, int(count)) for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True))


def mask_runs(document: Document) -> list[tuple[int, int, bool]]:
    """Start, end and supervision of each maximal run of equal loss mask."""
    mask: BoolArray = document.loss_mask
    cuts = [0, *(np.flatnonzero(mask[1:] != mask[:-1]) + 1).tolist(), len(mask)]
    return [(start, end, bool(mask[start])) for start, end in pairwise(cuts)]


def _percentiles(num_tokens: Int32Array) -> dict[int, int]:
    if not len(num_tokens):
        return {}
    return {percent: int(np.percentile(num_tokens, percent, method="nearest")) for percent in (0, 10, 50, 90, 99, 100)}


def _sample(store: CorpusStore, *, document_id: int, tokenizer: Tokenizer | None) -> Sample:
    document = store.document(document_id)
    source, line, remarks = store.origin(document_id)
    runs = []
    for start, end, supervised in mask_runs(document):
        ids = document.token_ids[start:end].tolist()
        text = " ".join(map(str, ids)) + " " if tokenizer is None else tokenizer.decode(ids, skip_special_tokens=False)
        runs.append(Run(text=text, num_tokens=end - start, supervised=supervised))
    return Sample(
        document_id=document_id,
        source=source,
        line=line,
        remarks=remarks,
        num_tokens=len(document.token_ids),
        num_supervised=int(store.num_supervised[document_id]),
        num_anchors=int(store.num_anchors[document_id]),
        runs=tuple(runs),
    )


def _tokenizer(meta: CorpusMeta, *, target: str | None) -> tuple[Tokenizer | None, str]:
    """The tokenizer the corpus was made with, or why its text cannot be shown. A target that was asked for must fit."""
    from tokenizers import Tokenizer

    try:
        folder = find_target(target or meta.target)
        same = tokenizer_fingerprint(folder) == meta.tokenizer_fingerprint
    except (PreflightError, CorpusError) as error:
        if target is not None:
            raise
        return None, f"token ids instead of text: {error}"
    if not same:
        rule = "has another tokenizer than the one this corpus was prepared with"
        if target is not None:
            raise CorpusError(key="--target", value=target, rule=rule)
        return None, f"token ids instead of text: {folder} {rule}"
    return Tokenizer.from_file(str(folder / "tokenizer.json")), ""
