"""Runs with a planted cause: a split or colocated run played through second by second, as data that a reader would return.

It plays the rules of the pipeline more literally than `plan.flow` does: every process has its spans, the thread of arrays its
two places, checkpoints and validation their steps, a GPU its own lane behind the thread that launches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slipstream.report.reading import RunData
from slipstream.report.spans import Samples, SpanColumns

BEGAN = 1_790_000_000.0
TOKENS = 1000
PREPARED = 2


@dataclass(frozen=True)
class Plant:
    """What the played run is like. Seconds; `target(pack)`, `use(rank)`, `build` a step, `once` the update.

    `launch` is how much longer the thread takes to launch than the device to compute, `gpu` whether there is one at all.
    The target that would make pack `died_at` dies before it.
    """

    targets: int = 1
    ranks: int = 1
    columns: int = 2
    ahead: int = 2
    steps: int = 120
    target: Callable[[int], float] = lambda pack: 0.1
    use: Callable[[int], float] = lambda rank: 0.1
    once: float = 0.02
    build: float = 0.01
    checkpoint_every: int = 1000
    checkpoint: float = 0.0
    validate_every: int = 1000
    validate: float = 0.0
    late: tuple[int, ...] = ()
    late_seconds: float = 0.0
    gpu: bool = False
    launch: float = 0.1
    colocated: bool = False
    devices: int | None = None
    odd_target_seconds: float = 0.0
    died_at: int | None = None
    restart_seconds: float = 0.0
    tokens: int = TOKENS
    utilisation: float | None = None


class Player:
    """Plays a plant through; `run` is the data it leaves."""

    def __init__(self, plant: Plant) -> None:
        self.plant = plant
        self.rows: dict[str, list[list[Any]]] = {}
        self.train: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []
        self.queue: list[dict[str, float]] = []
        self.clock: dict[str, float] = {}

    def span(self, worker: str, state: str, until: float, *, pack: int | None = None, step: int | None = None) -> None:
        """The worker is in a state from where it was until then; on a GPU, its device works as long as the plant says."""
        since = self.clock.get(worker, 0.0)
        if until <= since + 1e-9:
            return
        self.rows.setdefault(worker, []).append(["cpu", state, since * 1e6, (until - since) * 1e6, pack, step])
        if self.plant.gpu and state in ("target", "forward", "backward", "optimizer"):
            device = (until - since) * min(1.0, 1 / (1 + self.plant.launch) if self.plant.launch > 0 else 1.0)
            self.rows[worker].append(["gpu", state, since * 1e6, device * 1e6, pack, step])
        self.clock[worker] = until

    def play(self) -> None:
        """All steps, one after the other."""
        plant, ends, built, takes = self.plant, [], [0.0], []
        workers = [0.0] * plant.targets
        names = [f"drafter-{rank}" if not plant.colocated else f"worker-{rank}" for rank in range(plant.ranks)]
        made = 0
        for step in range(plant.steps):
            before = ends[-1] if ends else 0.0
            # the thread that builds arrays is at most two steps ahead of the one that is taken
            place = takes[step - PREPARED] if step >= PREPARED else 0.0
            begins = max(built[-1], place)
            built.append(begins + plant.build)
            ready: dict[int, float] = {}
            freed = step - plant.ahead - 1
            for column in range(plant.columns if not plant.colocated else 0):
                index = min(range(plant.targets), key=workers.__getitem__)
                begin = max(workers[index], ends[freed] if freed >= 0 else 0.0)
                name = f"target-{index}"
                self.span(name, "wait_slot", begin)
                if made == plant.died_at:
                    begin += plant.restart_seconds
                    self.span(name, "load", begin)
                    self.events.append({"kind": "restart", "step": step, "worker": name, "attempt": 1})
                done = begin + plant.target(made)
                self.span(name, "target", done, pack=made)
                if plant.odd_target_seconds:
                    done += plant.odd_target_seconds
                    self.span(name, "load", done, pack=made)
                workers[index] = ready[column] = done
                made += 1
            finished = []
            for rank, name in enumerate(names):
                begin = max(before, built[-1])
                self.rows.setdefault(name, []).append(["loader", "build", begins * 1e6, plant.build * 1e6, None, step])
                self.span(name, "hooks", before, step=step)
                self.span(name, "wait_loader", begin, step=step)
                finished.append(self._train(name, rank, step, ready=ready, now=begin))
            takes.append(max(before, built[-1]))
            latest = max(finished)
            for name in names:
                self.span(name, "wait_peer", latest, step=step)
                self.span(name, "optimizer", latest + plant.once, step=step)
            ends.append(self._after(names[0], step, now=latest + plant.once))
            self._record(step, seconds=ends[-1] - before, now=before, workers=workers)

    def _train(self, name: str, rank: int, step: int, *, ready: dict[int, float], now: float) -> float:
        plant = self.plant
        for column in range(rank, plant.columns, plant.ranks):
            pack = step * plant.columns + column
            if plant.colocated:
                now += plant.target(pack)
                self.span(name, "target", now, pack=pack, step=step)
            else:
                now = max(now, ready[column])
                self.span(name, "wait_input", now, pack=pack, step=step)
            spent = plant.use(rank) + (plant.late_seconds if step in plant.late else 0.0) / plant.columns
            self.span(name, "forward", now + spent * 0.4, pack=pack, step=step)
            self.span(name, "backward", now + spent, pack=pack, step=step)
            now += spent
        return now

    def _after(self, main: str, step: int, *, now: float) -> float:
        plant = self.plant
        if (step + 1) % plant.validate_every == 0:
            now += plant.validate
            self.span(main, "validate", now, step=step + 1)
        if (step + 1) % plant.checkpoint_every == 0:
            now += plant.checkpoint
            self.span(main, "checkpoint", now, step=step + 1)
        return now

    def _record(self, step: int, *, seconds: float, now: float, workers: list[float]) -> None:
        tokens = self.plant.columns * self.plant.tokens
        self.train.append(
            {"kind": "train", "step": step, "seconds": seconds, "context_tokens": tokens, "unique_tokens": tokens}
        )
        if step in self.plant.late:
            self.events.append({"kind": "late_work", "step": step + 1, "recompiles": 1, "names": ["graph 1/0 (dynamo)"]})
        self.queue.append({"time": BEGAN + now, "rank": 0, "ready": float(step % 3), "free": 1.0, "slots": 4.0})

    def _gpus(self, count: int) -> Samples:
        """What NVML would have said, if the plant has it say something."""
        if self.plant.utilisation is None:
            return Samples()
        times = [row["time"] for row in self.queue]
        busy = self.plant.utilisation
        return Samples.of([{"time": time, "gpu": gpu, "utilisation": busy} for time in times for gpu in range(count)])

    @property
    def run(self) -> RunData:
        """What `read_run` would return."""
        plant = self.plant
        spans = {}
        for index, (worker, rows) in enumerate(sorted(self.rows.items())):
            role = {"target": "target", "drafter": "drafter", "worker": "colocated"}[worker.split("-")[0]]
            header = {
                "kind": "start", "worker": worker, "role": role, "rank": int(worker.split("-")[1]), "pid": 1,
                "gpu": index if plant.gpu else None, "unix_ns": int(BEGAN * 1e9), "clock_ns": 0,
            }  # fmt: skip
            columns = SpanColumns(worker)
            columns.add([header, *rows])
            spans[worker] = columns.spans
        return RunData(
            root=Path("planted"),
            recipe={
                "name": "planted",
                "plan": {"packs_per_step": plant.columns, "replays": 1, "ahead_packs": plant.ahead, "pack_tokens": 1024,
                         "pack_anchors": 256},
                "checkpoint": {"every_steps": plant.checkpoint_every},
                "validation": {"every_steps": plant.validate_every},
                "placement": {"target_threads": 1, "drafter_threads": 1},
            },
            state={"status": "finished", "step": plant.steps, "steps": plant.steps},
            starts=[{"cores": plant.devices or plant.targets * (not plant.colocated) + plant.ranks}],
            train=self.train,
            events=self.events,
            spans=spans,
            queues=Samples.of(self.queue),
            gpus=self._gpus(len(spans)),
            now=BEGAN + 1000,
        )  # fmt: skip


def planted(plant: Plant | None = None, **changes: Any) -> RunData:
    """The data of a played run."""
    player = Player(replace(plant or Plant(), **changes))
    player.play()
    return player.run
