"""Small corpora for the plan's tests: documents with random masks, and their index."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from slipstream.config.recipe import PlanSection
from slipstream.plan import CorpusIndex, Planner, make_schedule
from slipstream.records import Document


@dataclass(frozen=True)
class ToyCorpus:
    """Documents in memory. `document` is what a planner is handed."""

    documents: tuple[Document, ...]

    def document(self, document_id: int) -> Document:
        return self.documents[document_id]

    def index(self) -> CorpusIndex:
        masks = [document.loss_mask for document in self.documents]
        return CorpusIndex(
            num_tokens=np.array([len(mask) for mask in masks], dtype=np.int32),
            num_anchors=np.array([count_valid(mask) for mask in masks], dtype=np.int32),
            fingerprint="toy",
        )

    def planner(self, plan: PlanSection, *, block_size: int = 4) -> Planner:
        schedule = make_schedule(index=self.index(), plan=plan, block_size=block_size)
        return Planner(schedule=schedule, document=self.document)


def count_valid(mask: np.ndarray) -> int:
    """Valid anchors, by the definition and slowly."""
    return sum(bool(mask[a] and mask[a + 1]) for a in range(len(mask) - 1))


def make_corpus(*, lengths: list[int], seed: int = 0, supervised: float = 0.7) -> ToyCorpus:
    """Documents of these lengths, with masks of random runs; some have no valid anchor."""
    rng = np.random.default_rng(seed)
    documents = []
    for number, length in enumerate(lengths):
        mask = np.repeat(rng.random(length) < supervised, rng.integers(1, 9, length))[:length]
        documents.append(
            Document(
                document_id=number,
                token_ids=rng.integers(1, 1000, length).astype(np.int32),
                loss_mask=mask.astype(np.bool_),
            )
        )
    return ToyCorpus(documents=tuple(documents))


@st.composite
def corpora(draw: st.DrawFn, *, min_documents: int = 1, max_documents: int = 60, longest: int = 160) -> ToyCorpus:
    """Any small corpus; some documents are longer than the packs of 128 tokens that the tests use."""
    lengths = draw(st.lists(st.integers(1, longest), min_size=min_documents, max_size=max_documents))
    return make_corpus(lengths=lengths, seed=draw(st.integers(0, 2**16)), supervised=draw(st.sampled_from([0.3, 0.7, 1.0])))
