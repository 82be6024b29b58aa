"""A colocated run on a GPU whose target is launched kernel by kernel while the drafter's steps are replayed.

By default with the proportions that SmolLM2 had on an H200: a thread that launches for 29 of 32 ms, a device that has 17 ms of
work, validation that takes a fifth of the time. The device takes its stages in order; one ends when its kernels are done and
when all of them were launched, so that stages cover the gaps and look busy throughout.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.report.reading import RunData
from slipstream.report.spans import Samples, SpanColumns

BEGAN = 1_790_000_000.0


@dataclass(frozen=True)
class Launched:
    """Seconds of a step: launching each stage, the device's work on it, and what else the thread does or waits for at least."""

    steps: int = 640
    all_steps: int = 1456
    tokens: int = 4060
    target_launch: float = 0.0255
    target_device: float = 0.0030
    use_launch: float = 0.0026
    use_device: float = 0.0135
    once_launch: float = 0.0006
    once_device: float = 0.0002
    wait: float = 0.0024
    rest: float = 0.0009
    validate_every: int = 208
    validate: float = 1.9
    validate_utilisation: float = 0.15

    def larger(self, times: int) -> Launched:
        """The same run with packs so many times as large."""
        return replace(
            self,
            steps=self.steps // times,
            all_steps=self.all_steps // times,
            tokens=self.tokens * times,
            target_device=self.target_device * times,
            use_device=self.use_device * times,
            validate_every=self.validate_every // times,
        )


class Thread:
    """The worker's thread and its device, in microsecond rows of a span file."""

    def __init__(self) -> None:
        self.rows: list[list[Any]] = []
        self.busy: list[tuple[float, float, float]] = []
        self.clock = 0.0
        self.device_free = 0.0

    def spend(self, state: str, seconds: float, *, pack: int | None = None, step: int | None = None) -> None:
        """The thread is in a state for so long."""
        if seconds > 1e-9:
            self.rows.append(["cpu", state, self.clock * 1e6, seconds * 1e6, pack, step])
            self.clock += seconds

    def launch(self, state: str, seconds: float, device: float, *, pack: int, step: int | None) -> None:
        """A stage is launched for so long, and its kernels take the device so long."""
        begin = max(self.device_free, self.clock)
        self.spend(state, seconds, pack=pack, step=step)
        self.device_free = max(begin + device, self.clock)
        self.rows.append(["gpu", state, begin * 1e6, (self.device_free - begin) * 1e6, pack, step])
        self.busy.append((begin, self.device_free, device / max(self.device_free - begin, 1e-9)))

    def samples(self) -> Samples:
        """Once a second, the share of the second in which kernels ran."""
        begins, ends, shares = (np.array(column) for column in zip(*self.busy, strict=True))
        rows = []
        for second in range(1, int(self.clock) + 1):
            inside = np.clip(np.minimum(ends, second) - np.maximum(begins, second - 1), 0, None)
            rows.append({"time": BEGAN + second, "gpu": 0, "utilisation": float((inside * shares).sum())})
        return Samples.of(rows)


def launched(plant: Launched | None = None, **changes: Any) -> RunData:
    """The data of such a run."""
    plant, thread, ends = replace(plant or Launched(), **changes), Thread(), [0.0]
    train: list[dict[str, Any]] = []
    for step in range(plant.steps):
        before = thread.clock
        thread.spend("wait_gpu", max(plant.wait, ends[max(0, step - 1)] - thread.clock), step=step)
        thread.launch("target", plant.target_launch, plant.target_device, pack=step + 1, step=None)
        thread.launch("forward", plant.use_launch * 0.95, plant.use_device * 0.55, pack=step, step=step)
        thread.launch("backward", plant.use_launch * 0.05, plant.use_device * 0.45, pack=step, step=step)
        ends.append(thread.device_free)
        thread.launch("optimizer", plant.once_launch, plant.once_device, pack=step, step=step)
        thread.spend("idle", plant.rest)
        if (step + 1) % plant.validate_every == 0:
            since = thread.clock = max(thread.clock, thread.device_free)
            thread.spend("validate", plant.validate, step=step + 1)
            thread.busy.append((since, thread.clock, plant.validate_utilisation))
            thread.device_free = thread.clock
        tokens = {"context_tokens": plant.tokens, "unique_tokens": plant.tokens}
        train.append({"kind": "train", "step": step, "seconds": thread.clock - before, **tokens})
    columns = SpanColumns("worker-0")
    header = {"kind": "start", "worker": "worker-0", "role": "colocated", "rank": 0, "gpu": 0, "pid": 1}
    columns.add([{**header, "unix_ns": int(BEGAN * 1e9), "clock_ns": 0}, *thread.rows])
    graphs = {"used": True, "why": "launching takes 28.9 of 29.5 ms of a step, more than 50%"}
    return RunData(
        root=Path("launched"),
        recipe={
            "name": "launched",
            "plan": {"packs_per_step": 1, "replays": 1, "ahead_packs": 2, "pack_tokens": 4096, "pack_anchors": 1024},
            "validation": {"every_steps": plant.validate_every, "max_prompts": 96},
            "placement": {"mode": "colocated"},
        },
        state={"status": "interrupted", "step": plant.steps, "steps": plant.all_steps},
        starts=[{"cores": 32, "gpus": ["NVIDIA H200"]}],
        train=train,
        events=[{"kind": "warm_up", "step": 0, "cuda_graphs": graphs}],
        spans={"worker-0": columns.spans},
        gpus=thread.samples(),
        prediction={"throughput": {"tokens_per_second": 62_000.0}, "stages": {"source": "table: H200, ratios measured"}},
        now=BEGAN + 1000,
    )
