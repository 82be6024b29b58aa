"""What a stretch of a run's steady state measured: shares of time by worker, seconds of each stage, rates. Warm-up left out.

On a GPU a stage takes as long as its device or its launching, whichever is longer; on a CPU the account's own lane tells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from slipstream.observe.states import IDLE
from slipstream.plan.throughput import Layout, StageCosts, Workload
from slipstream.report.reading import RunData, column
from slipstream.report.spans import Floats, Spans

RAMP_SHARE, RAMP_STEPS = 0.05, 20
"""Steps at the start of a process that are no steady state: this share of them, at least two, at most so many."""
LEAST_STEPS = 3

TARGET = ("target", "publish")
USE = ("forward", "backward", "forward_backward")
ONCE = ("optimizer", "hooks")
PAUSES = ("validate", "checkpoint", "wait_disk")
STARTING = ("load", "warm_up")


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker in the window. `shares` of its own thread's time and `gpu` of its device's, by state; `loader` the share in
    which its thread of arrays built some. `gpu` is empty where no device was timed; a stage's time on it includes the gaps
    between its kernels. `active` is the share of the time outside pauses in which any kernel ran on its GPU, by NVML; none
    where that is not known. `restarted` if it died, in any start of the run, and was started again."""

    name: str
    role: str
    rank: int
    shares: Mapping[str, float]
    gpu: Mapping[str, float]
    loader: float
    active: float | None = None
    restarted: bool = False

    def share(self, *states: str) -> float:
        """Of the window, in any of the states."""
        return sum(self.shares.get(state, 0.0) for state in states)

    @property
    def gpu_busy(self) -> float | None:
        """Share of the window in which its stages ran on the device; none without a device."""
        return sum(share for state, share in self.gpu.items() if state != "wait_peer") if self.gpu else None

    @property
    def starting(self) -> float:
        """Share that it took to be there again; nothing where it never died."""
        return self.share(*STARTING) if self.restarted else 0.0

    @property
    def paused(self) -> float:
        """Share in which validation, checkpoints or the disk kept it from its steps."""
        return self.share(*PAUSES)

    @property
    def device(self) -> float | None:
        """Share in which its device worked on its steps: by NVML, which leaves gaps out, else by timed stages."""
        return self.gpu_busy if self.active is None else self.active * (1 - self.paused)

    def lost(self, *waits: str) -> float:
        """Share lost to waits: a thread that waits while its device still works loses nothing."""
        busy = self.gpu_busy
        waited = self.share(*waits)
        return waited if busy is None else min(waited, max(0.0, 1 - busy))

    def cost(self, *states: str) -> float:
        """Share that a stage took: on its device, or launching it, whichever is longer."""
        return max(self.share(*states), sum(self.gpu.get(state, 0.0) for state in states))

    @property
    def busy(self) -> float:
        """Share in which it, or its device, did what its role is for: make packs, or train on them."""
        own = (*TARGET, "wait_gpu") if self.role == "target" else (*TARGET, *USE, *ONCE, "wait_gpu")
        return max(self.share(*own), self.gpu_busy or 0.0)


@dataclass(frozen=True, slots=True)
class Measured:
    """A window between two ends of steps, in Unix seconds, and what was measured in it.

    `rate` is trained context tokens a second, `unique_rate` those seen for the first time; `pack_seconds` what each pack took
    its target process, in order; `devices` how many processes the machine has room for, one a GPU or a share of the cores.
    """

    begin: float
    end: float
    steps: int
    rate: float
    unique_rate: float
    workers: Sequence[Worker]
    costs: StageCosts
    layout: Layout
    work: Workload
    pack_seconds: Sequence[float]
    devices: int
    ahead_packs: int

    @property
    def step_seconds(self) -> float:
        """Mean wall time of a step."""
        return (self.end - self.begin) / self.steps

    @property
    def paused(self) -> float:
        """Share of the window in which no steps were made, for validation, checkpoints or the disk."""
        return max(worker.paused for worker in self.trainers)

    @property
    def steady_rate(self) -> float:
        """Trained context tokens a second over what pauses leave of the window."""
        return self.rate / max(1 - self.paused, 1e-9)

    @property
    def targets(self) -> list[Worker]:
        """Target processes of a split run."""
        return [worker for worker in self.workers if worker.role == "target"]

    @property
    def trainers(self) -> list[Worker]:
        """Processes that train: drafter ranks, or colocated ones."""
        return [worker for worker in self.workers if worker.role != "target"]

    @property
    def target_floor(self) -> float:
        """Seconds that the targets of a split run need for the new packs of a step, without any wait."""
        if not self.targets:
            return 0.0
        return self.work.packs_per_step / self.work.replays * self.costs.target_seconds_per_pack / len(self.targets)


def measure(run: RunData, *, window: float | None = None) -> Measured | None:
    """The steady state of the newest start of a run, or its last `window` seconds.

    None while there are too few steps, and where no recipe or no metrics say what they trained on.
    """
    spans = {
        name: found
        if found.role == "target"
        else _newest_start(found)  # a target may have been started again within the window
        for name, found in run.spans.items()
        if found.role in ("target", "drafter", "colocated")
    }
    ranks = [found for found in spans.values() if found.role != "target" and len(found)]
    if not ranks or not run.train or "packs_per_step" not in run.recipe.get("plan", {}):
        return None
    main = min(ranks, key=lambda found: found.rank)
    steps, ends = step_ends(main)
    ahead = int(run.recipe.get("plan", {}).get("ahead_packs", 1))
    steps, ends = _steady(steps, ends, tail=ahead + 1 if run.ended else 0)
    if window is not None and len(ends):
        recent = ends >= ends[-1] - window
        steps, ends = steps[recent], ends[recent]
    if len(ends) < LEAST_STEPS + 1:
        return None
    begin, end, count = float(ends[0]), float(ends[-1]), len(ends) - 1
    restarted = {line.get("worker") for line in run.events if line.get("kind") == "restart"}
    workers = [
        replace(
            worker_in(found, begin=begin, end=end),
            active=_active(run, spans=found, begin=begin, end=end),
            restarted=name in restarted,
        )
        for name, found in sorted(spans.items())
    ]
    if not any(worker.cost(*USE) for worker in workers):
        return None  # its spans were dropped: nothing can be said
    tokens, unique = _tokens_per_step(run, first=int(steps[1]), last=int(steps[-1]))
    plan = run.recipe.get("plan", {})
    work = Workload(
        packs_per_step=int(plan.get("packs_per_step", 1)),
        replays=int(plan.get("replays", 1)),
        num_steps=int(_steps(run, steps)),
    )
    layout = _layout(workers)
    packs = pack_seconds(spans.values(), begin=begin, end=end)
    return Measured(
        begin=begin,
        end=end,
        steps=count,
        rate=tokens * count / (end - begin),
        unique_rate=unique * count / (end - begin),
        workers=workers,
        costs=_costs(workers, layout=layout, work=work, packs=packs, step=(end - begin) / count, tokens=tokens, name=run.name),
        layout=layout,
        work=work,
        pack_seconds=packs,
        devices=max(layout.devices, _devices(run, layout=layout)),
        ahead_packs=ahead,
    )


def _steady(steps: Any, ends: Floats, *, tail: int) -> tuple[Any, Floats]:
    """Without the first steps, and without the last ones, whose packs were all made before: a tenth of the steps at most."""
    ramp = max(2, min(RAMP_STEPS, int(RAMP_SHARE * len(ends))))
    last = len(ends) - min(tail, len(ends) // 10)
    return steps[ramp:last], ends[ramp:last]


def step_ends(spans: Spans) -> tuple[np.ndarray[Any, np.dtype[np.int64]], Floats]:
    """Steps that a rank has ended, ascending, and when each update was over, in Unix seconds."""
    cpu = spans.of_lane("cpu")
    code = cpu.state_names.index("optimizer") if "optimizer" in cpu.state_names else -1
    updates = cpu.pick((cpu.state == code) & (cpu.step >= 0))
    updates = updates.pick(np.argsort(updates.step, kind="stable"))
    steps, first = np.unique(updates.step, return_index=True)
    ends = np.maximum.reduceat(updates.end, first) if len(steps) else updates.end
    return steps, ends


def pack_seconds(workers: Any, *, begin: float, end: float) -> list[float]:
    """Seconds of each pack that was made wholly within the window, in the order in which they were begun."""
    found: list[tuple[float, float]] = []
    for spans in workers:
        for lane in ("gpu", "cpu"):
            made = spans.of_lane(lane)
            codes = [made.state_names.index(state) for state in TARGET if state in made.state_names]
            made = made.pick(np.isin(made.state, codes) & (made.pack >= 0))
            if len(made):
                found += _by_pack(made, begin=begin, end=end)
                break
    return [seconds for _, seconds in sorted(found)]


def _by_pack(made: Spans, *, begin: float, end: float) -> list[tuple[float, float]]:
    order = np.argsort(made.pack, kind="stable")
    made = made.pick(order)
    _, first = np.unique(made.pack, return_index=True)
    starts, ends = np.minimum.reduceat(made.start, first), np.maximum.reduceat(made.end, first)
    totals = np.add.reduceat(made.seconds, first)
    whole = (starts >= begin) & (ends <= end)
    return list(zip(starts[whole].tolist(), totals[whole].tolist(), strict=True))


def _newest_start(spans: Spans) -> Spans:
    return spans.pick(spans.start >= spans.starts[-1]) if spans.starts else spans


def worker_in(spans: Spans, *, begin: float, end: float) -> Worker:
    """What a worker did in a window, in Unix seconds."""
    inside, seconds = spans.between(begin, end), end - begin

    def shares(lane: str) -> dict[str, float]:
        return {state: spent / seconds for state, spent in inside.of_lane(lane).seconds_by_state().items()}

    cpu = shares("cpu")
    cpu[IDLE] = cpu.get(IDLE, 0.0) + max(0.0, 1 - sum(cpu.values()))
    return Worker(
        name=spans.worker,
        role=spans.role,
        rank=spans.rank,
        shares=cpu,
        gpu=shares("gpu"),
        loader=sum(shares("loader").values()),
    )


def _active(run: RunData, *, spans: Spans, begin: float, end: float) -> float | None:
    """Mean share of time in which a kernel ran on a worker's GPU, of NVML's samples that no pause of the worker touches.

    A sample tells of the time since the one before it.
    """
    if spans.gpu is None or not len(run.gpus):
        return None
    found = run.gpus.where("gpu", spans.gpu).between(begin, end)
    times = found["time"]
    pauses = spans.of_lane("cpu").between(begin, end)
    pauses = pauses.pick(np.isin(pauses.state, [code for code, name in enumerate(pauses.state_names) if name in PAUSES]))
    since = np.concatenate(([begin], times[:-1]))
    touched = np.searchsorted(pauses.start, times) > np.searchsorted(pauses.end, since, side="right")
    used = found["utilisation"][~touched]
    used = used[np.isfinite(used)]
    return float(used.mean()) if len(used) else None


def _layout(workers: Sequence[Worker]) -> Layout:
    targets = sum(worker.role == "target" for worker in workers)
    return Layout("split" if targets else "colocated", targets, len(workers) - targets)


def _tokens_per_step(run: RunData, *, first: int, last: int) -> tuple[float, float]:
    """Mean trained and unique tokens of the steps in the window, or of all that are known when none of these is yet."""
    lines = [line for line in run.train if first <= line["step"] <= last] or run.train
    if not lines:
        return 0.0, 0.0
    return float(np.nanmean(column(lines, "context_tokens"))), float(np.nanmean(column(lines, "unique_tokens")))


def _steps(run: RunData, steps: Any) -> int:
    return int(run.state.get("steps") or steps[-1] + 1)


def _costs(
    workers: Sequence[Worker],
    *,
    layout: Layout,
    work: Workload,
    packs: Sequence[float],
    step: float,
    tokens: float,
    name: str,
) -> StageCosts:
    """Stage costs as measured: those of the drafter in the mean over its ranks, of pauses and of the reduction as they bind.

    A process that does both launches one stage while its device works on the other: together they take less than alone.
    """
    trainers = [worker for worker in workers if worker.role != "target"]
    makers = [worker for worker in workers if worker.role == "target"] or trainers
    uses = work.packs_per_step / len(trainers)
    alone = [worker.cost(*TARGET) + worker.cost(*USE) for worker in trainers]
    together = [worker.cost(*TARGET, *USE) for worker in trainers]
    made = sum(worker.cost(*TARGET) for worker in makers) * step / (work.packs_per_step / work.replays)
    peers = min(max(worker.share("wait_peer"), worker.gpu.get("wait_peer", 0.0)) for worker in trainers) * step
    ranks = len(trainers)
    return StageCosts(
        target_seconds_per_pack=max(float(np.mean(packs)), made if layout.mode == "colocated" else 0.0) if packs else made,
        drafter_seconds_per_use=float(np.mean([worker.cost(*USE) for worker in trainers])) * step / uses,
        tokens_per_pack=tokens / work.packs_per_step,
        step_seconds=float(np.mean([worker.cost(*ONCE) for worker in trainers])) * step,
        pause_seconds_per_step=max(worker.paused for worker in trainers) * step,
        reduce_seconds=peers / (2 * (ranks - 1) / ranks) if ranks > 1 else 0.0,
        colocated_ratio=sum(alone) / sum(together) if layout.mode == "colocated" else 1.0,
        source=f"measured in {name}",
    )


def _devices(run: RunData, *, layout: Layout) -> int:
    """GPUs that the newest start saw; on a CPU its cores over the threads of a process, where those are set."""
    start = run.starts[-1] if run.starts else {}
    gpus = start.get("gpus")
    if gpus:
        return len(gpus)
    if any(spans.gpu is not None for spans in run.spans.values()):
        return layout.devices
    placement = run.recipe.get("placement", {})
    threads = [placement[key] for key in ("target_threads", "drafter_threads") if placement.get(key)]
    return int(start.get("cores") or 0) // max(threads) if threads else layout.devices
