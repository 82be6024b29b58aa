"""The figures of speculative decoding: paths of acceptance lengths, and what is said of many of them.

Two means are in use and both are given: over all steps (what a server's counters show) and over requests of each one's
mean (what the `dflash` package's benchmark prints). They differ whenever long answers are easier than short ones.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class AcceptancePath:
    """One answer's steps. `lengths[i]`: tokens that step i produced, 1 to B, its own (bonus) token included, cut at the
    answer's end; `accepted[i]`: drafted tokens among them. The token that the prompt's own pass gives belongs to no step.
    """

    lengths: tuple[int, ...]
    accepted: tuple[int, ...]

    def remaining(self) -> list[int]:
        """Tokens of the answer that were still to come before each step."""
        left = sum(self.lengths)
        out = []
        for length in self.lengths:
            out.append(left)
            left -= length
        return out


@dataclass(frozen=True, slots=True)
class AcceptanceSummary:
    """Acceptance over a set of answers. `tau_steps` and `tau_requests` are `None` where no answer took a step.

    `slot_acceptance[k - 1]`: share of the steps whose answer went on for k tokens or more in which the drafts 1 to k all
    stood; `None` where there was no such step. `histogram[n]`: steps that produced n tokens, n from 0 (never) to B.
    """

    requests: int
    steps: int
    tokens: int
    tau_steps: float | None
    tau_requests: float | None
    slot_acceptance: tuple[float | None, ...]
    histogram: tuple[int, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def summarise(paths: Sequence[AcceptancePath], *, block_size: int) -> AcceptanceSummary:
    """Reduce paths to their figures; answers that took no step count as requests but are in neither mean, as in `dflash`."""
    lengths = [length for path in paths for length in path.lengths]
    reached, possible = [0] * (block_size - 1), [0] * (block_size - 1)
    for path in paths:
        for accepted, remaining in zip(path.accepted, path.remaining(), strict=True):
            for slot in range(min(remaining, block_size - 1)):
                possible[slot] += 1
                reached[slot] += accepted > slot
    return AcceptanceSummary(
        requests=len(paths),
        steps=len(lengths),
        tokens=sum(lengths),
        tau_steps=statistics.fmean(lengths) if lengths else None,
        tau_requests=statistics.fmean(statistics.fmean(p.lengths) for p in paths if p.lengths) if lengths else None,
        slot_acceptance=tuple(r / p if p else None for r, p in zip(reached, possible, strict=True)),
        histogram=tuple(lengths.count(n) for n in range(block_size + 1)),
    )
