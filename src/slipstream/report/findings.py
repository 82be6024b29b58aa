"""What limits a run between target and drafter: who waits for whom, why, and what that costs.

A finding is made of measured shares of a steady state; its gain comes from the measured stage costs through the plan's own
prediction (`plan.throughput`, `plan.flow`). Shares are of the window, unless said otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from slipstream.observe.states import IDLE, STATES
from slipstream.plan.flow import simulate
from slipstream.plan.throughput import Prediction, StageCosts, best, layouts, predict, predict_all
from slipstream.report.measured import ONCE, PAUSES, USE, Measured, Worker
from slipstream.report.spans import Samples

Kind = Literal[
    "target_bound", "drafter_bound", "balanced", "starvation", "back_pressure", "sawtooth", "rank_imbalance", "launch_bound",
    "slow_loader", "checkpoint_stalls", "slow_validation", "recompiles", "rejected_seals", "restarts",
]  # fmt: skip

WAITS = 0.10
"""Waiting for the other side counts from this share on."""
BUSY = 0.85
"""A target that works for this share of the time is what the drafters wait for; one that does less is itself held up."""
GAIN = 0.03
"""Another layout is worth a word from this gain on."""
DEEPEST = 64
"""Slots ahead, a column, that are looked through for one that bridges a burst."""
DEEP_ENOUGH = 0.02
"""A queue is deep enough when an endless one would be faster by no more than this."""
SIMULATED_STEPS = 600


@dataclass(frozen=True, slots=True)
class Finding:
    """One cause of lost time. `share_lost` is of all processes' time; `predicted_gain` of the trained tokens a second.

    `advice` says in words what to do; `change` are the recipe keys that do it, where keys can. `numbers` are those behind it.
    """

    kind: Kind
    sentence: str
    share_lost: float
    advice: str
    predicted_gain: float | None
    numbers: dict[str, Any] = field(default_factory=dict)
    change: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Alternatives:
    """Every layout of the machine's devices as predicted, the run's own, and what the best would gain on what was measured."""

    current: Prediction
    others: Sequence[Prediction]
    best: Prediction
    gain: float

    def rate(self, prediction: Prediction, *, measured: float) -> float:
        """Trained tokens a second of a layout: what was measured, times the ratio of both predictions."""
        return measured * prediction.trained_tokens_per_second / self.current.trained_tokens_per_second


def alternatives(measured: Measured) -> Alternatives:
    """Predict all layouts of the machine's devices from the stage costs that were measured."""
    candidates, _ = layouts(devices=measured.devices, packs_per_step=measured.work.packs_per_step)
    predictions = predict_all(costs=measured.costs, candidates=candidates, work=measured.work)
    current = predict(costs=measured.costs, layout=measured.layout, work=measured.work)
    others = [found for found in predictions if found.layout != measured.layout]
    top = best([current, *others])
    return Alternatives(
        current=current,
        others=others,
        best=top,
        gain=top.trained_tokens_per_second / current.trained_tokens_per_second - 1,
    )


def flow_findings(measured: Measured, *, queues: Samples) -> list[Finding]:
    """At most two: what limits the flow between target and drafter. A colocated run has no such flow, only its stages."""
    if measured.layout.mode == "colocated":
        return [_colocated(measured)]
    starved = _mean(measured.trainers, "wait_input")
    blocked = _mean(measured.targets, "wait_slot")
    # a target that was started again is judged by the time that it was there
    at_work = float(np.mean([worker.busy / max(1 - worker.starting, 1e-9) for worker in measured.targets]))
    depth = _depth(queues.between(measured.begin, measured.end))
    if starved >= WAITS and blocked >= WAITS:
        return [_uneven(measured, starved=starved, blocked=blocked, depth=depth)]
    if starved >= WAITS and at_work >= BUSY:
        return [_target_bound(measured, starved=starved, at_work=at_work)]
    if starved >= WAITS:
        return [_starvation(measured, starved=starved, at_work=at_work, depth=depth)]
    if blocked < WAITS:
        return [_balanced(measured, starved=starved, blocked=blocked)]
    if max(held_up(worker) for worker in measured.trainers) >= WAITS or _skew(measured) >= WAITS:
        return [_back_pressure(measured, blocked=blocked)]
    return [_drafter_bound(measured, blocked=blocked)]


def held_up(worker: Worker) -> float:
    """Share in which a rank does not train for reasons of its own: neither hidden states nor other ranks keep it."""
    return worker.lost("wait_loader") + worker.share(*PAUSES)


def _skew(measured: Measured) -> float:
    """How much longer the rank that waits most for its peers does so than the one that waits least."""
    waits = [worker.lost("wait_peer") for worker in measured.trainers]
    return max(waits) - min(waits)


def _mean(workers: Sequence[Worker], *waits: str) -> float:
    return float(np.mean([worker.lost(*waits) for worker in workers]))


def _depth(queues: Samples) -> dict[str, float]:
    """Shares of samples with nothing ready and with no slot free; empty without samples."""
    if not len(queues):
        return {}
    ready, free = queues["ready"], queues["free"]
    return {"queue_empty": float(np.mean(ready == 0)), "queue_full": float(np.mean(free == 0))}


def _of_all(measured: Measured, workers: Sequence[Worker], share: float) -> float:
    return share * len(workers) / len(measured.workers)


def _layout_advice(measured: Measured) -> tuple[str, float | None, dict[str, Any], dict[str, Any]]:
    """What another layout would give, in words; its gain and keys where it is worth it; the rates of all, by name."""
    found = alternatives(measured)
    rates = {str(item.layout): found.rate(item, measured=measured.rate) for item in (found.current, *found.others)}
    if found.gain < GAIN:
        few = "" if measured.devices > 1 else " of one device"
        return f"no other layout{few} is predicted to be faster", None, {}, rates
    layout = found.best.layout
    words = f"{layout} is predicted to give {thousands(rates[str(layout)])} tokens/s, {percent(found.gain, sign=True)}"
    second = [item for item in found.others if item.layout.mode != layout.mode]
    if second:
        other = best(second)
        words += f"; {other.layout} {thousands(rates[str(other.layout)])}"
    if "colocated" in words:
        words += " (whether it fits: slipstream plan)"
    change: dict[str, Any] = {"placement.mode": layout.mode, "placement.drafter_ranks": layout.drafters}
    if layout.mode == "split":
        change["placement.target_workers"] = layout.targets
    return words, found.gain, change, rates


def _target_bound(measured: Measured, *, starved: float, at_work: float) -> Finding:
    advice, gain, change, rates = _layout_advice(measured)
    if gain is None:
        advice += ", but plan.replays trains more often on what the target makes once"
    return Finding(
        kind="target_bound",
        sentence=f"drafters wait {percent(starved)} for hidden states; targets are at {percent(at_work)}",
        share_lost=_of_all(measured, measured.trainers, starved),
        advice=advice,
        predicted_gain=gain,
        numbers={"wait_input": starved, "targets_busy": at_work, "tokens_per_second": rates},
        change=change,
    )


def _drafter_bound(measured: Measured, *, blocked: float) -> Finding:
    advice, gain, change, rates = _layout_advice(measured)
    at_work = float(np.mean([worker.busy for worker in measured.trainers]))
    return Finding(
        kind="drafter_bound",
        sentence=f"targets wait {percent(blocked)} for a free slot; drafters are at {percent(at_work)}",
        share_lost=_of_all(measured, measured.targets, blocked),
        advice=advice,
        predicted_gain=gain,
        numbers={"wait_slot": blocked, "drafters_busy": at_work, "tokens_per_second": rates},
        change=change,
    )


def _balanced(measured: Measured, *, starved: float, blocked: float) -> Finding:
    advice, gain, change, rates = _layout_advice(measured)
    return Finding(
        kind="balanced",
        sentence=f"target and drafter keep pace: drafters wait {percent(starved)} for hidden states, "
        f"targets {percent(blocked)} for a free slot",
        share_lost=_of_all(measured, measured.trainers, starved) + _of_all(measured, measured.targets, blocked),
        advice=advice,
        predicted_gain=gain,
        numbers={"wait_input": starved, "wait_slot": blocked, "tokens_per_second": rates},
        change=change,
    )


def _colocated(measured: Measured) -> Finding:
    advice, gain, change, rates = _layout_advice(measured)
    target = float(np.mean([worker.cost("target", "publish") for worker in measured.trainers]))
    drafter = float(np.mean([worker.cost(*USE, *ONCE) for worker in measured.trainers]))
    return Finding(
        kind="balanced",
        sentence=f"colocated: each process spends {percent(target)} in the target and {percent(drafter)} in the drafter",
        share_lost=0.0,
        advice=advice,
        predicted_gain=gain,
        numbers={"target": target, "drafter": drafter, "tokens_per_second": rates},
        change=change,
    )


def _starvation(measured: Measured, *, starved: float, at_work: float, depth: dict[str, float]) -> Finding:
    """Drafters wait, and the targets neither work nor wait for slots: something else keeps them."""
    states: dict[str, float] = {}
    for worker in measured.targets:
        for state, share in worker.shares.items():
            if state not in ("target", "publish", "wait_slot", "wait_gpu"):
                states[state] = states.get(state, 0.0) + share / len(measured.targets)
    worst = max(states, key=lambda state: states[state], default=IDLE)
    known = STATES.get(worst, STATES[IDLE])
    return Finding(
        kind="starvation",
        sentence=f"drafters wait {percent(starved)} for hidden states while targets are at {percent(at_work)} only: they spend "
        f"{percent(states.get(worst, 0.0))} in {worst}",
        share_lost=_of_all(measured, measured.trainers, starved),
        advice=f"look into the logs of the targets ({worst}: {known.sentence.rstrip('.').lower()})",
        predicted_gain=_without(measured, starved),
        numbers={"wait_input": starved, "targets_busy": at_work, "targets": states, **depth},
    )


def _without(measured: Measured, share: float) -> float:
    """Gain if a share of the step were not spent any more and the targets had to make their packs still."""
    step = measured.step_seconds
    return step / max(step * (1 - share), min(measured.target_floor, step)) - 1


def _back_pressure(measured: Measured, *, blocked: float) -> Finding:
    worst = max(measured.trainers, key=lambda worker: held_up(worker) + worker.lost("wait_peer"))
    states = {state: worst.share(state) for state in ("wait_loader", "wait_peer", *PAUSES) if worst.share(state)}
    named = ", ".join(f"{percent(share)} in {state}" for state, share in sorted(states.items(), key=lambda pair: -pair[1]))
    return Finding(
        kind="back_pressure",
        sentence=f"targets wait {percent(blocked)} for a free slot, since {worst.name} is kept from training: {named}",
        share_lost=0.0,
        advice="what keeps the drafter is the cause; more drafter ranks would wait for it as well",
        predicted_gain=None,
        numbers={"wait_slot": blocked, "drafter": states},
    )


def _uneven(measured: Measured, *, starved: float, blocked: float, depth: dict[str, float]) -> Finding:
    """Each side waits for the other in turn: a deeper queue would bridge it, if the targets are fast enough in the mean."""
    now = _simulated(measured, ahead=measured.ahead_packs)
    deep = _simulated(measured, ahead=DEEPEST)
    ahead = measured.ahead_packs
    while ahead < DEEPEST and _simulated(measured, ahead=ahead) > deep * (1 + DEEP_ENOUGH):
        ahead += max(1, ahead // 4)
    gain = now / _simulated(measured, ahead=ahead) - 1
    longest, usual = _longest(measured.pack_seconds)
    numbers = {"wait_input": starved, "wait_slot": blocked, "longest_pack": longest, "median_pack": usual, **depth}
    sentence = f"drafters wait {percent(starved)} for hidden states and targets {percent(blocked)} for a free slot, in turn"
    if gain < GAIN:
        return Finding(
            kind="starvation",
            sentence=sentence + ", though packs are made evenly",
            share_lost=_of_all(measured, measured.trainers, starved),
            advice="packs reach the drafters late: look at copies between host and device, and at the cores that targets have",
            predicted_gain=_without(measured, starved),
            numbers=numbers,
        )
    slots = measured.work.packs_per_step * (ahead - measured.ahead_packs)
    return Finding(
        kind="sawtooth",
        sentence=f"{sentence}: packs come in bursts, the longest takes {took(longest)}, the median {took(usual)}",
        share_lost=_of_all(measured, measured.trainers, starved),
        advice=f"let targets run further ahead: plan.ahead_packs {measured.ahead_packs} -> {ahead} ({slots} more slots; a new "
        f"run) is predicted to give {thousands(measured.rate * (1 + gain))} tokens/s, {percent(gain, sign=True)}",
        predicted_gain=gain,
        numbers=numbers,
        change={"plan.ahead_packs": ahead},
    )


def _simulated(measured: Measured, *, ahead: int) -> float:
    costs: StageCosts = measured.costs
    work = measured.work
    steps = max(SIMULATED_STEPS // work.packs_per_step, 3 * ahead * work.replays + 50)
    return simulate(
        pack_seconds=measured.pack_seconds or [costs.target_seconds_per_pack],
        use_seconds=costs.drafter_seconds_per_use,
        once_seconds=costs.step_seconds + costs.pause_seconds_per_step,
        work=type(work)(work.packs_per_step, work.replays, steps),
        targets=measured.layout.targets,
        ranks=measured.layout.drafters,
        ahead_packs=ahead,
    ).step_seconds


def _longest(seconds: Sequence[float]) -> tuple[float, float]:
    return (max(seconds), float(np.median(seconds))) if seconds else (0.0, 0.0)


def took(seconds: float) -> str:
    """Seconds of a stage: in milliseconds below a tenth."""
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{seconds * 1e3:.3g} ms"


def percent(share: float, *, sign: bool = False) -> str:
    """As people read it: 31 %, +22 %; below ten with one digit where that says something."""
    value = share * 100
    digits = 1 if 0 < abs(value) < 10 and abs(value - round(value)) >= 0.05 else 0
    return f"{value:{'+' if sign else ''}.{digits}f} %"


def thousands(rate: float) -> str:
    """Tokens a second as people read them: 870, 15.9K."""
    return f"{rate / 1000:.1f}K" if rate >= 1000 else f"{rate:.0f}"
