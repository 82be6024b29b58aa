"""Spans for the page: exact as long as they fit, else exact in chosen windows of time and merged by state in between."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from slipstream.observe.states import STATES
from slipstream.report.codec import encode_bytes, encode_differences, encode_integers
from slipstream.report.reading import RunData
from slipstream.report.spans import Spans

MOST_SPANS = 900_000
"""Spans that one page holds. One takes about 4 bytes of the page, so that lanes stay under 5 MB."""
EXACT_WINDOWS = 10
SLOWEST_STEPS = 4
MERGED_BINS = 4000
MANY_STATES = 256
LANE_ORDER = ("gpu", "cpu", "loader", "writer")

Window = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Thinning:
    """Where spans are exact (Unix seconds, ascending, apart) and the width of a bin elsewhere, in seconds."""

    exact: tuple[Window, ...]
    bin_seconds: float


def choose_thinning(run: RunData, *, most_spans: int = MOST_SPANS) -> Thinning | None:
    """None when all spans fit. Else windows at the start, at the end, spread between, and around the slowest steps."""
    count = sum(map(len, run.spans.values()))
    begin, end = run.begin, run.end
    if count <= most_spans or end <= begin:
        return None
    lanes = sum(len(spans.lane_names) for spans in run.spans.values())
    states = 5
    bins = max(1, min(MERGED_BINS, most_spans // (2 * lanes * states)))
    exact_share = most_spans / 2 / count
    width = (end - begin) * exact_share / (EXACT_WINDOWS + SLOWEST_STEPS)
    centres = [begin + width / 2 + (end - begin - width) * part / (EXACT_WINDOWS - 1) for part in range(EXACT_WINDOWS)]
    windows = sorted((centre - width / 2, centre + width / 2) for centre in [*centres, *_slowest_steps(run)])
    joined: list[Window] = []
    for low, high in windows:
        if joined and low <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(high, joined[-1][1]))
        else:
            joined.append((low, high))
    return Thinning(exact=tuple(joined), bin_seconds=(end - begin) / bins)


def _slowest_steps(run: RunData) -> list[float]:
    """Unix seconds of the middles of the slowest steps, by the spans of the first worker that makes steps."""
    for spans in run.spans.values():
        cpu = spans.of_lane("cpu")
        stepping = cpu.pick(cpu.step >= 0)
        if not len(stepping):
            continue
        steps, first = np.unique(stepping.step, return_index=True)
        starts = stepping.start[first]
        longest = np.argsort(np.diff(starts))[::-1][:SLOWEST_STEPS] if len(steps) > 1 else np.zeros(0, np.int64)
        return [float(starts[index] + starts[index + 1]) / 2 for index in longest]
    return []


def thin(lane: Spans, *, thinning: Thinning, begin: float) -> Spans:
    """One lane with the spans outside exact windows merged: per bin and state one span, laid end to end within the bin.

    Seconds by state and bin are kept; packs of merged spans are lost (-1), of their steps the first stays. A span longer
    than a bin is kept as it is.
    """
    middle = lane.start + lane.seconds / 2
    exact = lane.seconds >= thinning.bin_seconds
    for low, high in thinning.exact:
        exact |= (middle >= low) & (middle < high)
    order = np.argsort(middle, kind="stable")
    loose = lane.pick(order[~exact[order]])
    if not len(loose):
        return lane
    middle = loose.start + loose.seconds / 2
    borders = np.array([border for window in thinning.exact for border in window])
    place = np.stack((np.floor((middle - begin) / thinning.bin_seconds), np.searchsorted(borders, middle)))
    opens = np.concatenate(([True], (np.diff(place) != 0).any(axis=0)))
    group = np.cumsum(opens) - 1
    keys, first, inverse = np.unique(group * MANY_STATES + loose.state, return_index=True, return_inverse=True)
    seconds = np.bincount(inverse, weights=loose.seconds).astype(np.float64)
    group_of_key = keys // MANY_STATES
    before = np.cumsum(seconds) - seconds
    start = loose.start[opens][group_of_key] + before - before[np.searchsorted(group_of_key, group_of_key)]
    merged = replace(
        loose, lane=loose.lane[first], state=(keys % MANY_STATES).astype(np.int16), start=start, seconds=seconds,
        pack=np.full(len(keys), -1, np.int64), step=loose.step[first],
    )  # fmt: skip
    return _joined(lane.pick(exact), merged)


def _joined(one: Spans, other: Spans) -> Spans:
    names = ("lane", "state", "start", "seconds", "pack", "step")
    whole: dict[str, Any] = {name: np.concatenate((getattr(one, name), getattr(other, name))) for name in names}
    joined = replace(one, **whole)
    return joined.pick(np.argsort(joined.start, kind="stable"))


def encode_lanes(spans: Spans, *, begin: float, thinning: Thinning | None) -> list[dict[str, Any]]:
    """The lanes of one worker; times in microseconds since `begin` (Unix seconds)."""
    names = sorted(spans.lane_names, key=lambda name: LANE_ORDER.index(name) if name in LANE_ORDER else len(LANE_ORDER))
    found = []
    for name in names:
        lane = spans.of_lane(name)
        lane = lane.pick(np.argsort(lane.start, kind="stable"))
        lane = thin(lane, thinning=thinning, begin=begin) if thinning else lane
        if len(lane):
            about = {"worker": spans.worker, "lane": name, "role": spans.role, "rank": spans.rank, "gpu": spans.gpu}
            found.append(about | _encode(lane, begin=begin))
    return found


def _encode(lane: Spans, *, begin: float) -> dict[str, Any]:
    start = np.rint((lane.start - begin) * 1e6).astype(np.int64)
    micros = np.maximum(1, np.rint(lane.seconds * 1e6).astype(np.int64))
    gap = start - np.concatenate(([0], (start + micros)[:-1])) if len(start) else start
    return {
        "n": len(lane),
        "states": list(lane.state_names),
        "state": encode_bytes(lane.state),
        "gap": encode_integers(gap),
        "micros": encode_integers(micros),
        "pack": encode_differences(lane.pack),
        "step": encode_differences(lane.step),
    }


def state_table() -> dict[str, dict[str, str]]:
    """The states as the page shows them: kind, sentence, colours."""
    return {
        name: {"kind": state.kind, "sentence": state.sentence, "light": state.light, "dark": state.dark}
        for name, state in STATES.items()
    }
