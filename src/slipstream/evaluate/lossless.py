"""Whether speculative answers are the target's own: token by token, or apart only where the target itself wavers.

Verifying B tokens at once sums in another order than one at a time, so the two best logits may change places where they are
nearly equal. Such a first difference is counted as a near tie and everything after it is another text; any other first
difference is a fault. Meant for fp32: in bf16 the order changes far more often.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NEAR_TIE = 1e-3
"""Largest gap between the target's two best logits that may explain a difference."""

TopGap = Callable[[Sequence[int]], float]


@dataclass(frozen=True, slots=True)
class Difference:
    """Where an answer first left the target's own: index of the request, of the token in the answer, and the target's gap
    between its two best logits there; `None` when one answer merely went on longer."""

    request: int
    position: int
    gap: float | None

    @property
    def is_near_tie(self) -> bool:
        """Whether rounding may explain it."""
        return self.gap is not None and self.gap <= NEAR_TIE


@dataclass(frozen=True, slots=True)
class Losslessness:
    """Counts over a set of answers; `different` must be 0."""

    equal: int
    near_ties: int
    different: int
    differences: tuple[Difference, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def first_difference(*, expected: Sequence[int], found: Sequence[int]) -> int | None:
    """Index of the first token that differs, or at which only one goes on; `None` when equal."""
    for place, (left, right) in enumerate(zip(expected, found, strict=False)):
        if left != right:
            return place
    return None if len(expected) == len(found) else min(len(expected), len(found))


def compare_answers(
    *,
    prompts: Sequence[Sequence[int]],
    expected: Sequence[Sequence[int]],
    found: Sequence[Sequence[int]],
    top_gap: TopGap,
) -> Losslessness:
    """Compare answers with the target's own. `top_gap(token_ids)` gives the gap between the two best next logits."""
    differences = []
    for request, (prompt, own, other) in enumerate(zip(prompts, expected, found, strict=True)):
        place = first_difference(expected=own, found=other)
        if place is None:
            continue
        both_go_on = place < min(len(own), len(other))
        gap = top_gap([*prompt, *own[:place]]) if both_go_on else None
        differences.append(Difference(request=request, position=place, gap=gap))
    ties = sum(difference.is_near_tie for difference in differences)
    return Losslessness(
        equal=len(prompts) - len(differences),
        near_ties=ties,
        different=len(differences) - ties,
        differences=tuple(differences),
    )


def top_gap_of(target: PreTrainedModel) -> TopGap:
    """The gap function of a target: one pass over the tokens, without a cache."""

    @torch.no_grad()
    def gap(token_ids: Sequence[int]) -> float:
        tokens = torch.tensor([list(token_ids)], device=target.device)
        best = target(input_ids=tokens, use_cache=False, logits_to_keep=1).logits[0, -1].float().topk(2).values
        return float(best[0] - best[1])

    return gap


@torch.no_grad()
def teacher_forced_agreement(target: PreTrainedModel, *, prompt: Sequence[int], answer: Sequence[int]) -> int:
    """How many tokens of an answer are the target's argmax given all before them, in one pass without a cache.

    With a bf16 target and an fp32 answer this is the bf16 agreement: how far equality claims carry over to serving.
    """
    tokens = torch.tensor([[*prompt, *answer]], device=target.device)
    logits = target(input_ids=tokens, use_cache=False, logits_to_keep=len(answer) + 1).logits[0, :-1]
    return int((logits.argmax(dim=-1) == tokens[0, len(prompt) :]).sum())
