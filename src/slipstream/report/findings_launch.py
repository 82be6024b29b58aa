"""Launch-bound: a GPU that waits for the thread that launches its kernels. What of that is whose, and what would help.

A stage that is timed by events covers the gaps between its kernels, so a GPU may look busy while it waits: how much of the time
kernels ran is what NVML says. Shares are of the window, pauses for validation and checkpoints among it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.report.findings import GAIN, Finding, percent
from slipstream.report.measured import ONCE, TARGET, USE, Measured, Worker
from slipstream.report.reading import RunData

LAUNCHED, DEVICE_BUSY, DEVICE_WAIT = 0.80, 0.80, 0.15
"""Of the time outside pauses, the thread launches for the first share at least and waits for its device for less than the
third, and the device works for less than the second."""
LARGER = 2
"""So many times as much in a pack is advised: a kernel is launched as quickly on more."""

WARM_UPS = {"target": "target_warm_up", "drafter": "warm_up"}
"""Kinds of lines of metrics that tell whether a stage is replayed."""

_Option = tuple[str, dict[str, Any], float]
"""Advice in words, the keys to change, and the gain."""


@dataclass(frozen=True, slots=True)
class _Launching:
    """Shares of the window of one worker: launching for the target and for the drafter, waiting for the device, the device's
    own work, pauses, and the rest."""

    target: float
    drafter: float
    waiting: float
    device: float
    paused: float

    @classmethod
    def of(cls, worker: Worker) -> _Launching:
        return cls(
            target=worker.share(*TARGET),
            drafter=worker.share(*USE, *ONCE),
            waiting=worker.share("wait_gpu"),
            device=worker.device or 0.0,
            paused=worker.paused,
        )

    @property
    def whole(self) -> float:
        return self.target + self.drafter

    @property
    def rest(self) -> float:
        return max(0.0, 1 - self.whole - self.waiting - self.paused)

    @property
    def lost(self) -> float:
        """In which the device waited for launches: it idles for 1 - device, and not for what the thread did not launch in."""
        return max(0.0, self.whole + self.waiting - self.device)

    def step(self, *, launched: float) -> float:
        """What a step would take, as a share of what it takes now, if launching took so much."""
        return self.paused + max(launched + self.rest, self.device)


def launch_finding(measured: Measured, *, run: RunData) -> Finding | None:
    """The worker whose GPU waits longest for launches, if any is launch-bound."""
    found = [worker for worker in measured.workers if _is_launch_bound(worker)]
    if not found:
        return None
    worst = max(found, key=lambda worker: _Launching.of(worker).lost)
    shares, step = _Launching.of(worst), measured.step_seconds
    options = [*_recordings(measured, worst, run=run), _larger_packs(measured, worst, plan=run.recipe.get("plan", {}))]
    _, change, gain = options[0]
    advice = [*(words for words, _, _ in options), *_two_processes(worst), *_not_recorded(worst, run=run)]
    whose = f" ({shares.target * step * 1e3:.0f} ms of it the target's)" if worst.role == "colocated" else ""
    return Finding(
        kind="launch_bound",
        sentence=f"{worst.name} launches kernels for {shares.whole * step * 1e3:.0f} ms{whose} of the "
        f"{(1 - shares.paused) * step * 1e3:.0f} ms that a step takes, its GPU works for {shares.device * step * 1e3:.0f} ms: "
        "the GPU waits for the CPU",
        share_lost=shares.lost / len(measured.workers),
        advice="; ".join(advice),
        predicted_gain=gain,
        numbers={
            "launch_seconds": shares.whole * step,
            "target_launch_seconds": shares.target * step,
            "device_seconds": shares.device * step,
            "step_seconds": (1 - shares.paused) * step,
        },
        change=change,
    )


def _is_launch_bound(worker: Worker) -> bool:
    if worker.device is None:
        return False
    shares, at_steps = _Launching.of(worker), 1 - worker.paused
    busy = shares.whole >= LAUNCHED * at_steps and shares.waiting < DEVICE_WAIT * at_steps
    return busy and shares.device < DEVICE_BUSY * at_steps


def _larger_packs(measured: Measured, worker: Worker, *, plan: Mapping[str, Any]) -> _Option:
    """Fewer launches a token. A step has as many tokens as before where it has packs enough, else twice as many."""
    shares = _Launching.of(worker)
    gain = 1 / max(shares.step(launched=shares.whole / LARGER), _others(measured, worker)) - 1
    change = {f"plan.{key}": LARGER * plan[key] for key in ("pack_tokens", "pack_anchors") if isinstance(plan.get(key), int)}
    raised = " and ".join(f"{key} {value // LARGER} -> {value}" for key, value in change.items())
    per_step, also = plan.get("packs_per_step"), ""
    if isinstance(per_step, int) and per_step % (LARGER * len(measured.trainers)) == 0:
        change["plan.packs_per_step"] = per_step // LARGER
        also = f", plan.packs_per_step {per_step} -> {per_step // LARGER},"
    elif raised:
        also = " (half as many steps)"
    more = f": {raised}{also}" if raised else f", packs {LARGER} times as large,"
    return f"give the GPU more at once{more} is predicted to give up to {percent(gain, sign=True)}", change, gain


def _others(measured: Measured, worker: Worker) -> float:
    """The share of a step that the other side of a split run needs at least, whatever this worker does."""
    if worker.role == "colocated":
        return 0.0
    if worker.role == "target":
        return max(other.busy + other.paused for other in measured.trainers)
    return min(1.0, measured.target_floor / measured.step_seconds)


def _recordings(measured: Measured, worker: Worker, *, run: RunData) -> list[_Option]:
    """Replaying what is launched, where the recipe forbids it: launching then takes next to nothing."""
    if run.recipe.get("placement", {}).get("cuda_graphs") != "off":
        return []
    gain = 1 / max(_Launching.of(worker).step(launched=0.0), _others(measured, worker)) - 1
    words = (
        f'replay what is launched, placement.cuda_graphs "off" -> "auto", is predicted to give up to {percent(gain, sign=True)}'
    )
    return [(words, {"placement.cuda_graphs": "auto"}, gain)]


def _not_recorded(worker: Worker, *, run: RunData) -> list[str]:
    """Why the stage that is launched for longest was not replayed, as its warm-up told; nothing where it was."""
    if run.recipe.get("placement", {}).get("cuda_graphs") == "off":
        return []
    shares = _Launching.of(worker)
    stage = "target" if worker.role == "target" or shares.target >= shares.drafter else "drafter"
    told = [line["cuda_graphs"] for line in run.events if line.get("kind") == WARM_UPS[stage] and line.get("cuda_graphs")]
    if not told:
        return [f"placement.cuda_graphs did not cover the {stage} in this run"]
    return [] if told[-1].get("used") else [f"placement.cuda_graphs did not cover the {stage}: {told[-1].get('why')}"]


def _two_processes(worker: Worker) -> list[str]:
    """Target and drafter launched from a process each, at once; they may share a GPU, which then has the work of both."""
    if worker.role != "colocated":
        return []
    shares = _Launching.of(worker)
    longer = max(worker.cost(*TARGET), worker.cost(*USE, *ONCE) + shares.rest, shares.device)
    gain = 1 / (shares.paused + longer) - 1
    if gain < GAIN:
        return []
    return [f'target and drafter launched from a process each, placement.mode = "split", up to {percent(gain, sign=True)}']
