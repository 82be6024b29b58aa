"""What costs time inside the workers, whoever waits for whom: ranks, launching, arrays, checkpoints, validation, compiling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from slipstream.report.findings import Finding, percent
from slipstream.report.measured import ONCE, PAUSES, USE, Measured, Worker
from slipstream.report.reading import RunData, number

LOADER = 0.05
"""Waiting for the next step's arrays counts from this share on."""
IMBALANCE = 0.05
"""A rank that is later than the others by this share of a step holds them up."""
PAUSE, VALIDATION = 0.03, 0.10
"""Checkpoints and validation count from these shares on; advice aims at a third of them."""
LAUNCHED, DEVICE_BUSY, DEVICE_WAIT = 0.80, 0.80, 0.10
"""Launch-bound: the thread launches for the first share at least and waits for its device for less than the third, which
works for less than the second."""
RECOMPILES = 0.01
"""Compiling after warm-up counts from this share on."""


def worker_findings(measured: Measured, *, run: RunData) -> list[Finding]:
    """Whatever of it is there."""
    recipe = run.recipe
    found = [
        _loader(measured),
        _imbalance(measured),
        _checkpoints(measured, every=recipe.get("checkpoint", {}).get("every_steps")),
        _validation(measured, every=recipe.get("validation", {}).get("every_steps")),
        _launch(measured, plan=recipe.get("plan", {})),
        _recompiles(measured, run=run),
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
        f"{built:.2f} s for one, the rest of a step {step * (1 - share):.2f} s",
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
        sentence=f"{ranks[slow].name} works {own[slow]:.2f} s a step, the other ranks {others:.2f} s: they wait "
        f"{percent(late / step)} of each step for it",
        share_lost=_lost(measured, late * (len(ranks) - 1) / len(ranks)),
        advice=f"give {ranks[slow].name} what the others have: its GPU or cores are slower, or shared with something else",
        predicted_gain=_gain(measured, late),
        numbers={"seconds_by_rank": {worker.name: float(spent) for worker, spent in zip(ranks, own, strict=True)}},
    )


def _checkpoints(measured: Measured, *, every: Any) -> Finding | None:
    return _pause(
        measured,
        kind="checkpoint_stalls",
        states=("checkpoint", "wait_disk"),
        least=PAUSE,
        sentence=lambda name, share, worker: (
            f"{name} spends {percent(share)} on checkpoints, {percent(worker.share('wait_disk'))} waiting for the disk"
        ),
        key="checkpoint.every_steps",
        every=every,
    )


def _validation(measured: Measured, *, every: Any) -> Finding | None:
    return _pause(
        measured,
        kind="slow_validation",
        states=("validate",),
        least=VALIDATION,
        sentence=lambda name, share, worker: f"{name} spends {percent(share)} on validation, while nothing is trained",
        key="validation.every_steps",
        every=every,
    )


def _pause(
    measured: Measured,
    *,
    kind: Any,
    states: Sequence[str],
    least: float,
    sentence: Callable[[str, float, Worker], str],
    key: str,
    every: Any,
) -> Finding | None:
    """Side jobs that training waits for, so many times a run; doing them less often is the advice."""
    assert set(states) <= set(PAUSES)
    worst = max(measured.trainers, key=lambda worker: worker.share(*states))
    share, step = worst.share(*states), measured.step_seconds
    if share < least:
        return None
    change: dict[str, Any] = {}
    advice, saved = f"raise {key}", share * step
    if isinstance(every, int):
        times = int(np.ceil(share / (least / 3)))
        change = {key: every * times}
        advice, saved = f"{key} {every} -> {every * times}", share * step * (1 - 1 / times)
    gain = _gain(measured, saved)
    return Finding(
        kind=kind,
        sentence=sentence(worst.name, share, worst),
        share_lost=_lost(measured, share * step),
        advice=f"{advice} is predicted to give {percent(gain, sign=True)}",
        predicted_gain=gain,
        numbers={state: worst.share(state) for state in states},
        change=change,
    )


def _launch(measured: Measured, *, plan: dict[str, Any]) -> Finding | None:
    """A device that idles while its thread is busy launching: what it is given is too small."""
    found = [worker for worker in measured.workers if _is_launch_bound(worker)]
    if not found:
        return None
    worst = max(found, key=lambda worker: _launching(worker) - (_device(worker) or 0.0))
    step, launching, device = measured.step_seconds, _launching(worst), _device(worst) or 0.0
    gain = launching / max(launching / 2, device) - 1
    change = {f"plan.{key}": 2 * plan[key] for key in ("pack_tokens", "pack_anchors") if isinstance(plan.get(key), int)}
    per_step = plan.get("packs_per_step")
    if isinstance(per_step, int) and per_step % (2 * len(measured.trainers)) == 0:
        change["plan.packs_per_step"] = per_step // 2
    return Finding(
        kind="launch_bound",
        sentence=f"{worst.name} launches for {launching * step * 1e3:.0f} ms of a step, its GPU works for "
        f"{device * step * 1e3:.0f} ms: the GPU waits for the CPU",
        share_lost=(launching - device) / len(measured.workers),
        advice=f"give the GPU more at once: packs twice as large are predicted to give {percent(gain, sign=True)}",
        predicted_gain=gain,
        numbers={"launch_seconds": launching * step, "device_seconds": device * step},
        change=change,
    )


def _launching(worker: Worker) -> float:
    return worker.share("target", "publish", *USE, *ONCE)


def _device(worker: Worker) -> float | None:
    """Share in which its device worked: by NVML, which leaves gaps between kernels out, else by its timed stages."""
    return worker.gpu_busy if worker.active is None else worker.active


def _is_launch_bound(worker: Worker) -> bool:
    device = _device(worker)
    busy = _launching(worker) >= LAUNCHED and worker.share("wait_gpu") < DEVICE_WAIT
    return device is not None and device < DEVICE_BUSY and busy


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
