"""What a schedule amounts to: fills, tokens, anchors, refusals, replays, and how well lengths are mixed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slipstream.records import Int64Array

Float32Array = npt.NDArray[np.float32]

_STEPS_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """Figures of a schedule.

    `refused` counts documents of the corpus by reason (`too_long`: more tokens than a pack; `no_anchor`: nothing to
    train on). `uses_of_documents` are documents in packs over all epochs, `cut_documents` those that `max_steps` cut off.
    `target_tokens` go through the target, `trained_tokens` are that times `replays`. Fills are shares of the room in
    packs that hold documents. Distances are steps from one use to the next: planned, shortest of the regular packs,
    shortest of all; none without replays. `mixing` is explained at `mixing_figure`.
    """

    steps: int
    columns: int
    epochs: int
    packs: int
    empty_packs: int
    documents: int
    refused: dict[str, int]
    uses_of_documents: int
    cut_documents: int
    target_tokens: int
    trained_tokens: int
    anchors: int
    token_fill: float
    anchor_fill: float
    replays: int
    replay_distance: int
    steady_distance: int | None
    smallest_distance: int | None
    ramp_packs: int
    slots_per_column: int
    mixing_mean: float
    mixing_worst: float


def mixing_figure(
    *, lengths: Int64Array, corpus_lengths: Int64Array, pack_starts: Int64Array, pack_of_use: Int64Array
) -> Float32Array:
    """Distance fp32 `[S]` of each step's histogram of document lengths to the corpus', from 0 (alike) to 1 (disjoint).

    Total variation, half the sum of differences, over buckets of doubling length. `lengths` int64 `[E]` by entry of the
    packs, `corpus_lengths` int64 of the documents that were not refused, `pack_of_use` int64 `[S, C]`. A step without
    documents has distance 1. Some distance is chance: it falls with the root of the number of documents in a step.
    """
    buckets = int(max(corpus_lengths.max(initial=1), 1)).bit_length() + 1
    num_packs = len(pack_starts) - 1
    pack = np.repeat(np.arange(num_packs, dtype=np.int64), np.diff(pack_starts))
    histogram = np.bincount(pack * buckets + _bucket(lengths), minlength=num_packs * buckets).reshape(num_packs, buckets)
    corpus = np.bincount(_bucket(corpus_lengths), minlength=buckets) / max(1, len(corpus_lengths))
    figure = np.ones(len(pack_of_use), dtype=np.float32)
    for begin in range(0, len(pack_of_use), _STEPS_AT_ONCE):
        counts = histogram[pack_of_use[begin : begin + _STEPS_AT_ONCE]].sum(axis=1)
        total = counts.sum(axis=1)
        share = counts / np.maximum(total, 1)[:, None]
        distance = np.abs(share - corpus).sum(axis=1) / 2
        figure[begin : begin + _STEPS_AT_ONCE] = np.where(total > 0, distance, 1.0)
    return figure


def _bucket(lengths: Int64Array) -> Int64Array:
    # frexp is exact: the exponent is the bit length.
    return np.frexp(lengths.astype(np.float64))[1].astype(np.int64)
