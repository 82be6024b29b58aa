"""How tokens are chosen from logits, and which drafted tokens stand: greedily, or by rejection sampling.

Rejection keeps the target's distribution exactly: a token x drawn from the drafter's q stands if u · q(x) < p(x); the
first that falls is replaced by a draw from the normalised positive part of p - q (arXiv 2302.01318).
Shape letters: B block size · V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from slipstream.errors import UsageError


@dataclass(frozen=True, slots=True)
class Sampling:
    """Options of sampling, applied to target and drafter alike; `top_k` 0 and `top_p` 1 keep the whole vocabulary."""

    temperature: float
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise UsageError(key="--temperature", value=self.temperature, rule="must be above 0 to sample")
        if not 0 < self.top_p <= 1:
            raise UsageError(key="--top-p", value=self.top_p, rule="must be above 0 and at most 1")
        if self.top_k < 0:
            raise UsageError(key="--top-k", value=self.top_k, rule="must be 0 (no limit) or more")


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens int64 `[B - 1]` that a drafter proposed; `probs` `[B - 1, V]` is what they were drawn from, if drawn."""

    tokens: Tensor
    probs: Tensor | None


@dataclass(frozen=True, slots=True)
class Verdict:
    """`accepted` leading drafted tokens stand; `next_token` is the target's own, after them."""

    accepted: int
    next_token: int


class Chooser(Protocol):
    """A way to choose tokens."""

    def first(self, logits_V: Tensor) -> int:
        """The token after the prompt."""

    def draft(self, logits_BV: Tensor) -> Draft:
        """The drafter's proposal from its logits `[B - 1, V]`."""

    def verify(self, *, draft: Draft, logits_BV: Tensor) -> Verdict:
        """What stands of the proposal, given the target's logits `[B, V]` at the anchor and at each drafted token."""


class Greedy:
    """Always the likeliest token; the answer is the target's own greedy answer."""

    def first(self, logits_V: Tensor) -> int:
        """The argmax."""
        return int(logits_V.argmax())

    def draft(self, logits_BV: Tensor) -> Draft:
        """The argmax of each slot."""
        return Draft(tokens=logits_BV.argmax(dim=-1), probs=None)

    def verify(self, *, draft: Draft, logits_BV: Tensor) -> Verdict:
        """The leading drafted tokens that equal the target's argmax, then its argmax after them."""
        own = logits_BV.argmax(dim=-1)
        accepted = int((draft.tokens == own[:-1]).int().cumprod(dim=0).sum())
        return Verdict(accepted=accepted, next_token=int(own[accepted]))


class Sampled:
    """Draws that follow the target's distribution under `sampling`, whatever the drafter proposes."""

    def __init__(self, sampling: Sampling, *, generator: torch.Generator) -> None:
        self._sampling, self._generator = sampling, generator

    def first(self, logits_V: Tensor) -> int:
        """A draw from the target."""
        return int(self._draw(probabilities(logits_V[None], sampling=self._sampling)))

    def draft(self, logits_BV: Tensor) -> Draft:
        """A draw from the drafter in each slot."""
        probs = probabilities(logits_BV, sampling=self._sampling)
        return Draft(tokens=self._draw(probs), probs=probs)

    def verify(self, *, draft: Draft, logits_BV: Tensor) -> Verdict:
        """Rejection sampling, slot by slot; all accepted gives one more draw from the target."""
        target = probabilities(logits_BV, sampling=self._sampling)
        if not len(draft.tokens):
            return Verdict(accepted=0, next_token=int(self._draw(target[-1:])))
        assert draft.probs is not None, "sampled drafts carry their distributions"
        column = draft.tokens[:, None]
        p, q = target[:-1].gather(1, column)[:, 0], draft.probs.gather(1, column)[:, 0]
        u = torch.rand(q.shape, generator=self._generator, device=q.device, dtype=q.dtype)
        accepted = int((u * q < p).int().cumprod(dim=0).sum())
        if accepted == len(draft.tokens):
            return Verdict(accepted=accepted, next_token=int(self._draw(target[-1:])))
        rest = (target[accepted] - draft.probs[accepted]).clamp_min(0)
        # p = q up to rounding leaves nothing to draw from; the token that fell then fell by rounding alone.
        rest = torch.where(rest.sum() > 0, rest, target[accepted])
        return Verdict(accepted=accepted, next_token=int(self._draw(rest[None])))

    def _draw(self, probs_BV: Tensor) -> Tensor:
        return torch.multinomial(probs_BV, 1, generator=self._generator)[:, 0]


def probabilities(logits_BV: Tensor, *, sampling: Sampling) -> Tensor:
    """Distributions fp32 `[B, V]`: temperature, then the `top_k` largest, then the smallest set that holds `top_p`.

    The token that crosses `top_p` is kept, so the set is never empty; the order is that of the `dflash` package.
    """
    scores = logits_BV.float() / sampling.temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        values, indices = scores.topk(sampling.top_k, dim=-1)
        scores = torch.full_like(scores, -torch.inf).scatter(-1, indices, values)
    probs = scores.softmax(dim=-1)
    if sampling.top_p < 1:
        ordered, order = probs.sort(dim=-1, descending=True)
        ordered = torch.where(ordered.cumsum(dim=-1) - ordered < sampling.top_p, ordered, 0.0)
        probs = torch.zeros_like(probs).scatter(-1, order, ordered)
        probs = probs / probs.sum(dim=-1, keepdim=True)
    return probs
