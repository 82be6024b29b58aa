"""What costs time inside the workers, whoever waits for whom: ranks, arrays, checkpoints, validation, compiling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from slipstream.report.findings import Finding, Kind, percent, took
from slipstream.report.measured import ONCE, PAUSES, USE, Measured, Worker
from slipstream.report.reading import RunData, number

LOADER = 0.05
"""Waiting for the next step's arrays counts from this share on."""
IMBALANCE = 0.05
"""A rank that is later than the others by this share of a step holds them up."""
PAUSE, VALIDATION = 0.03, 0.10
"""Checkpoints and validation count from these shares on."""
PAUSE_AIM, VALIDATION_AIM = 0.01, 0.05
"""Shares that the advice aims at."""
LEAST_VALIDATIONS = 3
"""So many validations of a run are left by the advice: without them nobody knows when to stop."""
RECOMPILES = 0.01
"""Compiling after warm-up counts from this share on."""


def worker_findings(measured: Measured, *, run: RunData) -> list[Finding]:
    """Whatever of it is there, launching aside (`findings_launch`)."""
    recipe = run.recipe
    found = [
        _loader(measured),
        _imbalance(measured),
        _checkpoints(measured, every=recipe.get("checkpoint", {}).get("every_steps")),
        _validation(measured, section=recipe.get("validation", {})),
        _recompiles(measured, run=run),
        _seals(measured, run=run),
        _restarts(measured, run=run),
    ]
    return [finding for finding in found if finding is not None]


def _gain(measured: Measured, saved: float) -> float:
    """Gain if a step were shorter by so many seconds, and the targets had to make their packs still."""
    step = measured.step_seconds
    return step / max(step - saved, min(measured.target_floor, step)) - 1


def _lost(measured: Measured, seconds: float) -> float:
    """Share of all processes' time when every process that trains loses so many seconds of a step."""
    return seconds / measured.step_seconds * len(measured.trainers) / len(measured.workers)


def _loader(measured: Measured) -> Finding | None:
    worst = max(measured.trainers, key=lambda worker: worker.lost("wait_loader"))
    share, step = worst.lost("wait_loader"), measured.step_seconds
    if share < LOADER:
        return None
    built = worst.loader * step
    return Finding(
        kind="slow_loader",
        sentence=f"{worst.name} waits {percent(share)} for the arrays of its next step: the thread that builds them takes "
        f"{took(built)} for one, the rest of a step {took(step * (1 - share))}",
        share_lost=_lost(measured, share * step),
        advice="put corpus.path on a faster disk, or leave that thread a core (placement.target_threads, drafter_threads)",
        predicted_gain=_gain(measured, share * step),
        numbers={"wait_loader": share, "build_seconds": built, "step_seconds": step},
    )


def _imbalance(measured: Measured) -> Finding | None:
    """One rank later than the others, who wait for it in every reduction."""
    ranks, step = measured.trainers, measured.step_seconds
    if len(ranks) < 2:
        return None
    own = np.array([worker.cost("target", *USE, *ONCE) * step for worker in ranks])
    slow = int(own.argmax())
    others = float(np.delete(own, slow).mean())
    late = float(own[slow]) - others
    if late < IMBALANCE * step:
        return None
    return Finding(
        kind="rank_imbalance",
        sentence=f"{ranks[slow].name} works {took(float(own[slow]))} a step, the other ranks {took(others)}: they wait "
        f"{percent(late / step)} of each step for it",
        share_lost=_lost(measured, late * (len(ranks) - 1) / len(ranks)),
        advice=f"give {ranks[slow].name} what the others have: its GPU or cores are slower, or shared with something else",
        predicted_gain=_gain(measured, late),
        numbers={"seconds_by_rank": {worker.name: float(spent) for worker, spent in zip(ranks, own, strict=True)}},
    )


def _checkpoints(measured: Measured, *, every: Any) -> Finding | None:
    worker = _most(measured, "checkpoint", "wait_disk")
    share = worker.share("checkpoint", "wait_disk")
    if share < PAUSE:
        return None
    return _rarer(
        measured,
        kind="checkpoint_stalls",
        sentence=f"{worker.name} spends {percent(share)} on checkpoints, {percent(worker.share('wait_disk'))} waiting for the "
        "disk",
        share=share,
        key="checkpoint.every_steps",
        every=every,
        times=_times(share, aim=PAUSE_AIM),
        numbers={state: worker.share(state) for state in ("checkpoint", "wait_disk")},
    )


def _validation(measured: Measured, *, section: Mapping[str, Any]) -> Finding | None:
    """Rarer, so that it costs what is aimed at or as few are left as may be; where that is so already, with fewer prompts."""
    worker = _most(measured, "validate")
    share, every = worker.share("validate"), section.get("every_steps")
    if share < VALIDATION:
        return None
    times = _times(share, aim=VALIDATION_AIM)
    if isinstance(every, int):
        times = min(times, measured.work.num_steps // (every * LEAST_VALIDATIONS))
    sentence = f"{worker.name} spends {percent(share)} on validation, while nothing is trained"
    prompts = section.get("max_prompts")
    if times < 2 and isinstance(prompts, int) and prompts > 1:
        gain = _gain(measured, share * measured.step_seconds / 2)
        return Finding(
            kind="slow_validation",
            sentence=sentence,
            share_lost=_lost(measured, share * measured.step_seconds),
            advice=f"validate with half the prompts, validation.max_prompts {prompts} -> {prompts // 2}, which is predicted to "
            f"give {percent(gain, sign=True)} if a prompt costs what the others do",
            predicted_gain=gain,
            numbers={"validate": share},
            change={"validation.max_prompts": prompts // 2},
        )
    return _rarer(
        measured,
        kind="slow_validation",
        sentence=sentence,
        share=share,
        key="validation.every_steps",
        every=every,
        times=max(2, times),
        numbers={"validate": share},
    )


def _most(measured: Measured, *states: str) -> Worker:
    """The process that trains least for their sake."""
    assert set(states) <= set(PAUSES)
    return max(measured.trainers, key=lambda worker: worker.share(*states))


def _times(share: float, *, aim: float) -> int:
    """How many times as rare something must be that takes a share of the time, to take the share aimed at."""
    return int(np.ceil(share * (1 - aim) / (aim * (1 - share))))


def _rarer(
    measured: Measured, *, kind: Kind, sentence: str, share: float, key: str, every: Any, times: int, numbers: dict[str, float]
) -> Finding:
    """Side jobs that training waits for: to do them less often is the advice."""
    step = measured.step_seconds
    known = isinstance(every, int)
    gain = _gain(measured, share * step * (1 - 1 / times))
    left = share / times / (1 - share + share / times)
    raised = f"raise {key} from {every} to {every * times}" if known else f"do it {times} times as rarely, by {key}"
    return Finding(
        kind=kind,
        sentence=sentence,
        share_lost=_lost(measured, share * step),
        advice=f"{raised}: it then takes {percent(left)}, which is predicted to give {percent(gain, sign=True)}",
        predicted_gain=gain,
        numbers=numbers,
        change={key: every * times} if known else {},
    )


def _recompiles(measured: Measured, *, run: RunData) -> Finding | None:
    """Compilations, autotunings and allocations after warm-up; each costs what its step took longer than the others."""
    late = [line for line in run.events if line.get("kind") in ("late", "late_work")]
    steps = {int(line["step"]) - 1 for line in late if "step" in line}  # counted after the step was launched
    seconds = {line["step"]: number(line, "seconds") for line in run.train}
    if not steps or not seconds:
        return None
    usual = float(np.nanmedian(list(seconds.values())))
    spent = float(np.nansum([max(0.0, seconds[step] - usual) for step in steps if step in seconds]))
    share = spent / max(float(np.nansum(list(seconds.values()))), 1e-9)
    if share < RECOMPILES:
        return None
    names = sorted({str(name) for line in late for name in line.get("names", ())})
    shown = f" ({'; '.join(names[:3])}{', …' if len(names) > 3 else ''})" if names else ""
    return Finding(
        kind="recompiles",
        sentence=f"something was compiled, tuned or allocated after warm-up in {len(steps)} steps, which took "
        f"{spent:.1f} s longer than others{shown}",
        share_lost=share * len(measured.trainers) / len(measured.workers),
        advice="shapes of this run were not met in warm-up: please report it, with this run's log",
        predicted_gain=1 / (1 - share) - 1,
        numbers={"seconds": spent, "steps": sorted(steps), "names": names},
    )


def _seals(measured: Measured, *, run: RunData) -> Finding | None:
    """Packs that came damaged, ever: each was made twice. What it costs is little, what it tells of the machine is not."""
    lines, count = _rejected_seals(run), damaged_packs(run)
    if not count:
        return None
    packs = sorted({int(pack) for line in lines for pack in line.get("packs", ())})
    workers = sorted({str(line.get("worker")) for line in lines})
    shown = ", ".join(map(str, packs[:5])) + (", …" if len(packs) > 5 else "")
    lost = count * measured.costs.target_seconds_per_pack / (measured.end - measured.begin) / len(measured.workers)
    return Finding(
        kind="rejected_seals",
        sentence=f"{' and '.join(workers)} refused packs of hidden states {count} times, whose bytes were not those that were "
        f"sealed (packs {shown}): they were made again, and none was trained on as it came",
        share_lost=min(1.0, lost),
        advice="look for failing memory, PCIe or GPU errors on this machine (nvidia-smi -q, dmesg); if there are none, please "
        "report it",
        predicted_gain=None,
        numbers={"rejected": count, "packs": packs, "steps": sorted({int(line["step"]) for line in lines})},
    )


def _restarts(measured: Measured, *, run: RunData) -> Finding | None:
    """Targets that died and were started again, ever; what is lost is what of it lies in the window."""
    names = [str(line.get("worker")) for line in run.events if line.get("kind") == "restart"]
    if not names:
        return None
    starting = sum(worker.starting for worker in measured.targets)
    seconds = starting * (measured.end - measured.begin)
    times = {1: "once", 2: "twice"}.get(len(names), f"{len(names)} times")
    who = " and ".join(sorted(set(names)))
    return Finding(
        kind="restarts",
        sentence=f"{who} died and was started again, {times} in all" + (f": {took(seconds)} of loading" if seconds else ""),
        share_lost=starting / len(measured.workers),
        advice=f"read why in the log (slipstream logs RUN --worker {sorted(set(names))[0]})",
        predicted_gain=None,
        numbers={"restarts": len(names), "seconds": seconds},
    )


def damaged_packs(run: RunData) -> int:
    """How often a pack's seal was refused, over all starts of a run."""
    return sum(int(line.get("rejected") or 0) for line in _rejected_seals(run))


def _rejected_seals(run: RunData) -> list[dict[str, Any]]:
    return [line for line in run.events if line.get("kind") == "rejected_seals"]
