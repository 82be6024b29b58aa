"""Whether a step, or a target's pack, is replayed from recordings: by what a rehearsed one costs the CPU and takes in all.

A step whose launching takes most of its time waits for the CPU, kernel by kernel; there recordings pay. One that is
launched in a fraction of its time gains nothing, and its activations are too large to be held by a pool of their own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

Wish = Literal["auto", "on", "off"]
Prepared = TypeVar("Prepared")

LAUNCH_SHARE = 0.5
"""Of a step's time: where launching takes more, the step is recorded. What else the thread launches needs the rest."""

TIMED_STEPS = 3
"""Steps that are timed, each alone; the quickest counts."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds to launch a step, and until the device had finished it."""

    launch_seconds: float
    step_seconds: float


@dataclass(frozen=True, slots=True)
class GraphReport:
    """What was decided and why. `plain` steps launch every kernel, `recorded` ones replay; `nbytes` is the recordings' own."""

    used: bool
    why: str
    plain: StepTimes | None = None
    recorded: StepTimes | None = None
    nbytes: int = 0

    def told(self) -> str:
        """In words, with what replaying changed."""
        text = f"{'used' if self.used else 'not used'}: {self.why}"
        if self.recorded is not None:
            launch, step = self.recorded.launch_seconds * 1e3, self.recorded.step_seconds * 1e3
            text += f"; replayed {launch:.1f} of {step:.1f} ms; {self.nbytes / 2**30:.2f} GiB of their own"
        return text


def time_steps(
    step: Callable[[Prepared], object],
    *,
    prepare: Callable[[], Prepared],
    finish: Callable[[], None],
    repeats: int = TIMED_STEPS,
    clock: Callable[[], float] = time.perf_counter,
) -> StepTimes:
    """Run a prepared step a few times, waiting for the device before and after each: for warm-up alone."""
    launches, wholes = [], []
    for _ in range(repeats):
        prepared = prepare()
        finish()
        began = clock()
        step(prepared)
        launches.append(clock() - began)
        finish()
        wholes.append(clock() - began)
    return StepTimes(launch_seconds=min(launches), step_seconds=min(wholes))


def should_record(times: StepTimes, *, wish: Wish, of: str = "a step") -> tuple[bool, str]:
    """Whether to record, and the reason in words; `of` says what was timed."""
    share = times.launch_seconds / times.step_seconds
    told = f"launching takes {times.launch_seconds * 1e3:.1f} of {times.step_seconds * 1e3:.1f} ms of {of}"
    if wish != "auto":
        return wish == "on", f'placement.cuda_graphs = "{wish}"; {told}'
    than = "more" if share > LAUNCH_SHARE else "not more"
    return share > LAUNCH_SHARE, f"{told}, {than} than {LAUNCH_SHARE:.0%}"
