"""Acceptance lengths of pairs of runs that differ in one thing: how large the difference is, and how sure.

Two intervals, both of 95 %. Student's t over seeds says what another seed would give; with few seeds it is wide. The
percentile bootstrap (Efron 1979) draws prompts, and seeds, again with replacement: it says what other prompts would give. A
prompt answered by both runs is drawn for both, so that what makes a prompt easy cancels.

Letters: S seeds · P prompts · W draws of the bootstrap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

DRAWS = 4000
T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""Student's t at 0.975, by degrees of freedom from 1 on."""
MAX_SEEDS = len(T_975) + 1


@dataclass(frozen=True, slots=True)
class PromptCounts:
    """What decoding with one run's drafter takes for each prompt: tokens produced, and steps of the target, each `[P]`."""

    tokens: tuple[int, ...]
    steps: tuple[int, ...]

    @property
    def acceptance_length(self) -> float:
        """Tokens a step, over all prompts (tau)."""
        return sum(self.tokens) / sum(self.steps)


@dataclass(frozen=True, slots=True)
class Difference:
    """Mean over seeds of one run's acceptance length less its partner's. Intervals as (low, high).

    `over_seeds` is Student's, none of one seed; `over_prompts` the bootstrap's.
    """

    mean: float
    by_seed: tuple[float, ...]
    over_seeds: tuple[float, float] | None
    over_prompts: tuple[float, float]


def paired_difference(runs: Sequence[PromptCounts], *, partners: Sequence[PromptCounts]) -> Difference:
    """`runs[s]` less `partners[s]`, seed by seed, prompt by prompt. The draws are the same whenever it is asked."""
    assert 0 < len(runs) == len(partners) <= MAX_SEEDS, (len(runs), len(partners))
    by_seed = tuple(run.acceptance_length - other.acceptance_length for run, other in zip(runs, partners, strict=True))
    mean = math.fsum(by_seed) / len(by_seed)
    return Difference(
        mean=mean,
        by_seed=by_seed,
        over_seeds=_students(by_seed, mean=mean),
        over_prompts=_bootstrap(runs, partners=partners),
    )


def _students(by_seed: Sequence[float], *, mean: float) -> tuple[float, float] | None:
    count = len(by_seed)
    if count == 1:
        return None
    variance = math.fsum((value - mean) ** 2 for value in by_seed) / (count - 1)
    half = T_975[count - 2] * math.sqrt(variance / count)
    return mean - half, mean + half


def _bootstrap(runs: Sequence[PromptCounts], *, partners: Sequence[PromptCounts]) -> tuple[float, float]:
    num_seeds, num_prompts = len(runs), len(runs[0].tokens)
    draw = np.random.default_rng(0)
    times_WP = draw.multinomial(num_prompts, np.full(num_prompts, 1 / num_prompts), size=DRAWS)
    differences_WS = _drawn(runs, times_WP=times_WP) - _drawn(partners, times_WP=times_WP)
    seeds_WS = draw.integers(num_seeds, size=(DRAWS, num_seeds))
    means_W = np.take_along_axis(differences_WS, seeds_WS, axis=1).mean(axis=1)
    low, high = np.nanquantile(means_W, (0.025, 0.975))
    return float(low), float(high)


def _drawn(runs: Sequence[PromptCounts], *, times_WP: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Acceptance length `[W, S]` of each run over each draw of prompts; a draw without any step has none."""
    tokens_SP, steps_SP = (np.array([getattr(run, name) for run in runs], dtype=np.int64) for name in ("tokens", "steps"))
    tokens_WS, steps_WS = times_WP @ tokens_SP.T, times_WP @ steps_SP.T
    return np.where(steps_WS > 0, tokens_WS / np.maximum(steps_WS, 1), np.nan)
