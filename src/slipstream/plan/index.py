"""What the plan knows of a corpus: a length and a count for each document, never a token."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.errors import PlanError
from slipstream.records import Int32Array


@dataclass(frozen=True, slots=True, eq=False)
class CorpusIndex:
    """Figures of a corpus by document id.

    `num_tokens` int32 `[n]`; `num_anchors` int32 `[n]`: valid anchors, positions `a` with `mask[a] and mask[a + 1]`;
    `fingerprint` of the corpus' content, which the schedule's digest covers.
    """

    num_tokens: Int32Array
    num_anchors: Int32Array
    fingerprint: str

    def __post_init__(self) -> None:
        if self.num_tokens.shape != self.num_anchors.shape or self.num_tokens.ndim != 1:
            raise PlanError(
                key="corpus.path",
                value=f"{self.num_tokens.shape} lengths, {self.num_anchors.shape} anchor counts",
                rule="a corpus index has one length and one anchor count for each document",
            )
        if len(self.num_tokens) and (self.num_tokens.min() < 1 or (self.num_anchors >= self.num_tokens).any()):
            raise PlanError(
                key="corpus.path",
                value=self.fingerprint,
                rule="every document has at least one token and fewer valid anchors than tokens",
                hint="prepare the corpus again",
            )

    @property
    def num_documents(self) -> int:
        """n."""
        return len(self.num_tokens)
