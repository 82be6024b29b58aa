"""What a queue of some depth makes of uneven production: a run in small, pack by pack. Pure; no torch.

`throughput` holds for packs that take equally long. Where some take much longer than others, how far targets run ahead
decides whether the drafters notice; that is simulated here, from the seconds that packs took.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace

from slipstream.plan.throughput import Workload

RAMP = 0.1
"""Share of the steps, at the start, that a figure of the steady state leaves out."""


@dataclass(frozen=True, slots=True)
class Flow:
    """A steady state: seconds a step; the share of it that a drafter rank waits, for packs or for the ranks that wait for
    theirs; and the share that a target process waits for a slot."""

    step_seconds: float
    drafter_wait: float
    target_wait: float


def simulate(
    *,
    pack_seconds: Sequence[float],
    use_seconds: float,
    once_seconds: float,
    work: Workload,
    targets: int,
    ranks: int,
    ahead_packs: int,
) -> Flow:
    """A split run of `work.num_steps`; the packs, in the order in which they are made, take `pack_seconds`, round and round.

    Rules of the plan: packs are issued by first step, then column; column c has a new pack in steps s = c (mod R); a pack's
    slot is its own from the first step of the pack `ahead_packs` before it in its column (`slots.hold_from`). A rank takes its
    columns in order, `use_seconds` each; a step ends when its last rank has, and `once_seconds` later the next begins.
    """
    assert len(pack_seconds) > 0, "no pack has a duration"
    assert ahead_packs >= 1, ahead_packs
    columns, replays = work.packs_per_step, work.replays
    workers = [0.0] * targets
    heapify(workers)
    ends: list[float] = []
    target_waits: list[float] = []
    made = 0
    for step in range(work.num_steps):
        before = ends[-1] if ends else 0.0
        freed = step - ahead_packs * replays - 1
        slot_free = ends[freed] if freed >= 0 else 0.0
        ready: dict[int, float] = {}
        blocked = 0.0
        for column in range(step % replays, columns, replays):
            begin = max(workers[0], slot_free)
            blocked += begin - workers[0]
            ready[column] = begin + pack_seconds[made % len(pack_seconds)]
            heapreplace(workers, ready[column])
            made += 1
        latest = before
        for rank in range(ranks):
            now = before
            for column in range(rank, columns, ranks):
                now = max(now, ready.get(column, now)) + use_seconds
            latest = max(latest, now)
        ends.append(latest + once_seconds)
        target_waits.append(blocked / targets)
    first = min(int(RAMP * len(ends)), len(ends) - 1)
    began = ends[first - 1] if first else 0.0
    total, steps = ends[-1] - began, len(ends) - first
    return Flow(
        step_seconds=total / steps,
        drafter_wait=1 - (columns / ranks * use_seconds + once_seconds) * steps / total,
        target_wait=sum(target_waits[first:]) / total,
    )
