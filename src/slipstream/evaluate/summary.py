"""The figures of speculative decoding: paths of acceptance lengths, and what is said of many of them.

Two means are in use and both are given: over all steps (what a server's counters show) and over requests of each one's
mean (what the `dflash` package's benchmark prints). They differ whenever long answers are easier than short ones.

All of them follow from whole numbers by answer, so that answers counted in several processes give, put together, the very
figures of one.

Shape letters: A answers · B block size · C = 3B - 1 counts of an answer.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from slipstream.records import Int64Array


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
    counts_AC = np.zeros((len(paths), num_counts(block_size)), dtype=np.int64)
    for row, path in zip(counts_AC, paths, strict=True):
        row[:] = count_path(path, block_size=block_size)
    return summarise_counts(counts_AC, block_size=block_size)


def num_counts(block_size: int) -> int:
    """C, the length of `count_path`."""
    return 3 * block_size - 1


def count_path(path: AcceptancePath, *, block_size: int) -> Int64Array:
    """All that the figures need of an answer, int64 `[C]`.

    Steps that produced n tokens, n from 0 to B; then, for k from 1 to B - 1, steps in which the drafts 1 to k all stood; then
    steps whose answer went on for k tokens or more.
    """
    histogram = np.bincount(np.asarray(path.lengths, dtype=np.int64), minlength=block_size + 1)
    assert len(histogram) == block_size + 1, f"a step of {len(histogram) - 1} tokens in blocks of {block_size}"
    slots = np.arange(block_size - 1)
    possible = slots < np.asarray(path.remaining(), dtype=np.int64)[:, None]
    reached = possible & (slots < np.asarray(path.accepted, dtype=np.int64)[:, None])
    return np.concatenate([histogram, reached.sum(axis=0), possible.sum(axis=0)])


def summarise_counts(counts_AC: Int64Array, *, block_size: int) -> AcceptanceSummary:
    """The figures of answers, a row of `count_path` each; the same whatever their order."""
    histograms_AL = counts_AC[:, : block_size + 1]
    steps_A, tokens_A = histograms_AL.sum(axis=1).tolist(), (histograms_AL @ np.arange(block_size + 1)).tolist()
    means = [tokens / steps for tokens, steps in zip(tokens_A, steps_A, strict=True) if steps]
    reached, possible = counts_AC[:, block_size + 1 :].sum(axis=0).reshape(2, block_size - 1).tolist()
    return AcceptanceSummary(
        requests=len(counts_AC),
        steps=sum(steps_A),
        tokens=sum(tokens_A),
        tau_steps=sum(tokens_A) / sum(steps_A) if means else None,
        tau_requests=statistics.fmean(means) if means else None,
        slot_acceptance=tuple(r / p if p else None for r, p in zip(reached, possible, strict=True)),
        histogram=tuple(histograms_AL.sum(axis=0).tolist()),
    )
