"""Where the time of a run went: seconds by worker and state, whole and while it trained, and how long each stage takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from slipstream.observe.states import IDLE, STATES, is_wait
from slipstream.report.reading import RunData
from slipstream.report.spans import Spans, join_pieces

PERCENTILES = (50, 90, 99)
BEFORE_STEPS = ("hooks", "validate", "wait_gpu")
"""States that a worker may be in on behalf of step 0 before it makes that step: the first validation, above all."""
BY_STEP = ("validate", "checkpoint")
"""Stages that other states interrupt: all of it that belongs to a step counts as one."""


def worker_order(worker: str) -> tuple[int, str, int]:
    """Sorts names of workers: targets before drafters, as hidden states flow, then by rank."""
    role, _, rank = worker.rpartition("-")
    order = ("target", "worker", "drafter", "answers", "supervisor")
    return (order.index(role) if role in order else len(order), role, int(rank) if rank.isdigit() else 0)


def account_totals(lines: Sequence[dict[str, Any]]) -> tuple[float, dict[str, float]]:
    """Wall seconds and seconds by state of one worker, over all of its processes: a line holds running totals of its own."""
    wall, states = 0.0, dict[str, float]()
    for number, line in enumerate(lines):
        following = lines[number + 1] if number + 1 < len(lines) else None
        same = following is not None and following["pid"] == line["pid"] and following["wall_seconds"] >= line["wall_seconds"]
        if same:
            continue
        wall += line["wall_seconds"]
        for state, seconds in line["states"].items():
            states[state] = states.get(state, 0.0) + seconds
    return wall, states


def training_window(run: RunData) -> tuple[float, float] | None:
    """Unix seconds from the first span of the first step to the last span of a step; none when no step was made."""
    begins, ends = [], []
    for spans in run.spans.values():
        tagged = spans.pick(spans.step >= 0)
        before = [code for code, state in enumerate(spans.state_names) if state in BEFORE_STEPS]
        made = tagged.pick(~np.isin(tagged.state, before))
        if len(made):
            begins.append(float(made.start.min()))
            ends.append(float(tagged.end.max()))
    return (min(begins), max(ends)) if begins else None


def worker_times(run: RunData) -> list[dict[str, Any]]:
    """One entry a worker: who it is, its wall seconds, and seconds by state whole, while the run trained, and on its GPU.

    The first comes from the accounts and sums to wall time, or from the spans of a worker that keeps no account; the others
    from spans, with what no span covers as idle.
    """
    window = training_window(run)
    found = []
    for worker in sorted(set(run.accounts) | set(run.spans), key=worker_order):
        wall, states = account_totals(run.accounts.get(worker, []))
        spans = run.spans.get(worker)
        if worker not in run.accounts and spans is not None:
            states = spans.of_lane("cpu").seconds_by_state()
            wall = sum(states.values())
        entry: dict[str, Any] = {
            "worker": worker,
            "role": spans.role if spans else worker.rsplit("-", 1)[0],
            "rank": spans.rank if spans else None,
            "gpu": spans.gpu if spans else None,
            "wall_seconds": wall,
            "whole": states,
            "training": _in_window(spans, lane="cpu", window=window),
            "gpu_training": _in_window(spans, lane="gpu", window=window),
            "dropped_spans": spans.dropped if spans else 0,
        }
        found.append(entry)
    return found


def _in_window(spans: Spans | None, *, lane: str, window: tuple[float, float] | None) -> dict[str, float]:
    """Seconds by state within the window; empty when the worker has nothing on this lane in it."""
    if spans is None or window is None:
        return {}
    inside = spans.of_lane(lane).between(*window)
    if not len(inside):
        return {}
    states = inside.seconds_by_state()
    rest = window[1] - window[0] - sum(states.values())
    return states | {IDLE: states.get(IDLE, 0.0) + max(0.0, rest)}


def split_by_kind(states: dict[str, float]) -> dict[str, float]:
    """Shares of work, waits and idle time; names that no table knows count as work."""
    total = sum(states.values())
    kinds = {"work": 0.0, "wait": 0.0, "idle": 0.0}
    for state, seconds in states.items():
        known = STATES.get(state)
        kinds["wait" if is_wait(state) else known.kind if known else "work"] += seconds
    return {kind: seconds / total if total else 0.0 for kind, seconds in kinds.items()}


def stage_rows(run: RunData) -> list[dict[str, Any]]:
    """How long each stage takes: one row a worker, lane and state, with count, total, mean and percentiles in seconds.

    Only while the run trained. A span that was cut as it was written counts as one, and so does all of a validation.
    `seconds_per_step` is the total over the steps that this worker's lane has spans of.
    """
    window = training_window(run)
    rows: list[dict[str, Any]] = []
    for worker, spans in run.spans.items():
        for lane in spans.lane_names:
            inside = spans.of_lane(lane)
            inside = join_pieces(inside.between(*window) if window else inside)
            steps = len(np.unique(inside.step[inside.step >= 0]))
            order = np.argsort(inside.state, kind="stable")
            borders = np.searchsorted(inside.state[order], np.arange(len(spans.state_names) + 1))
            for code, state in enumerate(spans.state_names):
                found = order[borders[code] : borders[code + 1]]
                seconds = inside.seconds[found]
                if state in BY_STEP:
                    _, which = np.unique(inside.step[found], return_inverse=True)
                    seconds = np.bincount(which, weights=seconds).astype(np.float64)
                if len(seconds):
                    total = float(seconds.sum())
                    levels = np.percentile(seconds, PERCENTILES)
                    row = {"worker": worker, "lane": lane, "state": state, "count": len(seconds), "seconds": total}
                    row |= {"mean": total / len(seconds), "longest": float(seconds.max())}
                    row |= {f"p{percent}": float(level) for percent, level in zip(PERCENTILES, levels, strict=True)}
                    rows.append(row | {"seconds_per_step": total / steps if steps else None})
    return sorted(rows, key=lambda row: (worker_order(row["worker"]), row["lane"] != "gpu", row["lane"], -row["seconds"]))
