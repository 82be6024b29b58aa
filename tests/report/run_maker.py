"""Synthetic run folders: the files of a run as its processes write them, without any process."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from slipstream.runfolder import RunFolder

BEGAN = 1_790_000_000.0
SPLIT = ("target-0", "target-1", "drafter-0")
ROLES = {"target": "target", "drafter": "drafter", "worker": "colocated"}
TARGET_STATES = (("wait_slot", 0.1), ("target", 0.8), ("publish", 0.1))
DRAFTER_STATES = (
    ("wait_input", 0.3), ("load", 0.02), ("forward", 0.26), ("backward", 0.34), ("optimizer", 0.05), ("wait_peer", 0.03),
)  # fmt: skip
COLOCATED_STATES = (("target", 0.5), ("forward", 0.2), ("backward", 0.25), ("optimizer", 0.05))
Cycle = Sequence[tuple[str, float]]


def make_run(
    folder: Path,
    *,
    steps: int = 100,
    workers: Sequence[str] = SPLIT,
    seconds_per_step: float = 0.5,
    states: Mapping[str, Cycle] | None = None,
    validate_every: int = 500,
    checkpoint_every: int = 500,
    began: float = BEGAN,
    seed: int = 0,
    status: str = "finished",
    recipe: Mapping[str, Any] | None = None,
    packs_per_step: int = 2,
) -> RunFolder:
    """Write a whole run folder. `states` gives a worker's cycle over one step: states and their shares, summing to 1.

    Targets deal out the packs of a step in turn and run one step ahead of the drafters.
    """
    run = RunFolder(folder)
    run.create()
    rng = np.random.default_rng(seed)
    given = f'name = "{folder.name}"\n'
    run.recipe_given.write_text(given)
    run.recipe.write_text(
        tomli_w.dumps(_recipe(folder.name, workers=workers, packs_per_step=packs_per_step) | dict(recipe or {}))
    )
    durations = seconds_per_step * 1e6 * (1 + 0.05 * rng.standard_normal(steps))
    _write_facts(run, steps=steps, status=status, began=began, seconds=steps * seconds_per_step)
    _lines(run.metrics, _metrics(durations, validate_every=validate_every, rng=rng))
    for index, worker in enumerate(workers):
        cycle = (states or {}).get(worker) or default_cycle(worker)
        spans = SpanMaker(worker=worker, cycle=cycle, durations=durations, packs_per_step=packs_per_step)
        targets = max(1, sum(name.startswith("target") for name in workers))
        rows = list(spans.rows(checkpoint_every=checkpoint_every, share=targets))
        header = {
            "kind": "start", "worker": worker, "role": ROLES[worker.split("-")[0]], "rank": int(worker.rsplit("-", 1)[1]),
            "gpu": index, "pid": 100 + index, "unix_ns": int(began * 1e9), "clock_ns": 1,
        }  # fmt: skip
        _lines(run.spans / f"{worker}.jsonl", [header, *rows])
        _lines(run.accounts / f"{worker}.jsonl", account_lines(rows, worker=worker, pid=100 + index, began=began))
    last = int(steps * seconds_per_step)
    _lines(run.queues, (_queue(second, began=began, rng=rng) for second in range(last)))
    _lines(run.gpus, (_gpu(second, gpu=gpu, began=began, rng=rng) for second in range(last) for gpu in range(len(workers))))
    return run


def default_cycle(worker: str) -> Cycle:
    """The cycle of a worker that is given none."""
    return {"target": TARGET_STATES, "drafter": DRAFTER_STATES, "worker": COLOCATED_STATES}[worker.split("-")[0]]


class SpanMaker:
    """Rows of one worker: its account on lane "cpu", and the states that work on lane "gpu". All workers keep one pace."""

    def __init__(self, *, worker: str, cycle: Cycle, durations: Sequence[float], packs_per_step: int) -> None:
        self.worker, self.cycle, self.durations, self.packs_per_step = worker, cycle, durations, packs_per_step
        self.clock = 0

    def rows(self, *, checkpoint_every: int, share: int) -> Iterator[list[Any]]:
        """All rows. Drafters begin a step's time behind the targets, which deal out packs to `share` of them."""
        yield ["cpu", "warm_up", 0, 3_000_000, None, None]
        self.clock = 3_000_000
        target = self.worker.startswith("target")
        if self.worker.startswith("drafter") and len(self.durations):
            yield from self._span("wait_input", int(self.durations[0] * 1.1), pack=None, step=None)
        rank = int(self.worker.rsplit("-", 1)[1])
        for step, micros in enumerate(self.durations):
            if step and step % checkpoint_every == 0:
                for state, seconds in (("wait_slot", 3),) if target else (("validate", 2), ("checkpoint", 1)):
                    yield from self._span(state, seconds * 1_000_000, pack=None, step=None if target else step)
            packs = range(step * self.packs_per_step, (step + 1) * self.packs_per_step)
            mine = [pack for pack in packs if not target or pack % share == rank]
            if not mine:
                yield from self._span("wait_slot", int(micros), pack=None, step=None)
            for pack in mine:
                for state, part in self.cycle:
                    took = max(20, int(micros / len(mine) * part))
                    yield from self._span(state, took, pack=pack, step=None if target else step)

    def _span(self, state: str, micros: int, *, pack: int | None, step: int | None) -> Iterator[list[Any]]:
        yield ["cpu", state, self.clock, micros, pack, step]
        if not state.startswith(("wait", "publish", "load", "checkpoint")):
            yield ["gpu", state, self.clock + micros // 50, micros - micros // 50, pack, step]
        self.clock += micros


def account_lines(rows: Sequence[list[Any]], *, worker: str, pid: int, began: float, every: int = 5) -> list[dict[str, Any]]:
    """Running totals of lane "cpu" about every few seconds and at the end."""
    totals: dict[str, float] = {"idle": 0.0}
    lines: list[dict[str, Any]] = []
    cpu = [row for row in rows if row[0] == "cpu"]
    due = every * 1e6
    for number, (_, state, start, micros, _, _) in enumerate(cpu):
        totals[state] = totals.get(state, 0.0) + micros / 1e6
        end, last = start + micros, number == len(cpu) - 1
        if end >= due or last:
            due = end + every * 1e6
            wall = end / 1e6
            line = {"worker": worker, "pid": pid, "time": began + wall, "wall_seconds": wall, "states": dict(totals)}
            lines.append(line | {"closed": last})
    return lines


def _metrics(durations: np.ndarray[Any, Any], *, validate_every: int, rng: np.random.Generator) -> Iterator[dict[str, Any]]:
    steps = len(durations)
    yield {"kind": "start", "step": 0, "run": "made", "num_steps": steps, "drafter_ranks": 1}
    for step, seconds in enumerate(durations / 1e6):
        if step % validate_every == 0:
            yield validation_line(step, acceptance=1.2 + 2.4 * (1 - math.exp(-step / 3000)))
        yield train_line(step, seconds=float(seconds), rng=rng)
    yield {"kind": "checkpoint", "step": steps}
    yield validation_line(steps, acceptance=1.2 + 2.4 * (1 - math.exp(-steps / 3000)))
    yield {"kind": "end", "step": steps, "status": "finished", "skipped_steps": 0}


def validation_line(step: int, *, acceptance: float, block_size: int = 8) -> dict[str, Any]:
    """A line of kind "validation"."""
    slots = [round(0.8 * (acceptance - 1) / (acceptance + 1) ** 0.3 * 0.8**slot, 4) for slot in range(block_size - 1)]
    return {
        "kind": "validation", "step": step, "acceptance_length": acceptance, "acceptance_length_by_request": acceptance * 0.98,
        "slot_acceptance": slots, "histogram": [0, 40, 22, 11, 6, 3, 1, 1, 2], "answers": 16, "seconds": 2.0,
    }  # fmt: skip


def train_line(step: int, *, seconds: float, rng: np.random.Generator, block_size: int = 8) -> dict[str, Any]:
    """A line of kind "train"."""
    loss = 2 + 7 * math.exp(-step / 1500) + 0.15 * float(rng.standard_normal())
    acceptance = 1 + 2.2 * (1 - math.exp(-step / 2500)) + 0.08 * float(rng.standard_normal())
    accuracy = [max(0.0, (acceptance - 1) / 3 * 0.82**slot) for slot in range(block_size - 1)]
    tokens = 2 * 8100 + int(rng.integers(0, 160))
    return {
        "kind": "train", "step": step, "epoch": step // 2000, "loss": loss, "accuracy": sum(accuracy) / len(accuracy),
        "accuracy_per_slot": accuracy, "acceptance_length": acceptance, "learning_rate": 6e-4 * min(1, (step + 1) / 200),
        "gradient_norm": 1.5 + abs(float(rng.standard_normal())), "skipped": False, "bad_rows": 0, "anchors": 4096,
        "supervised_tokens": 21_000, "context_tokens": tokens, "unique_tokens": tokens, "seconds": seconds,
        "context_tokens_per_second": tokens / seconds, "supervised_tokens_per_second": 21_000 / seconds,
        "anchors_per_second": 4096 / seconds, "memory_bytes": 9_000_000_000 + step * 1000, "total_skipped_steps": 0,
        "token_fill": tokens / (2 * 8192), "anchor_fill": 1.0 - 0.01 * (step % 7 == 0),
        **({"device_allocated_bytes": 31_000_000_000 + step * 1000} if step % 2 == 0 else {}),
    }  # fmt: skip


def _queue(second: int, *, began: float, rng: np.random.Generator) -> dict[str, Any]:
    ready = int(rng.integers(0, 5))
    return {
        "time": began + 3 + second, "rank": 0, "ready": ready, "ready_bytes": ready * 400_000_000, "issued": 2,
        "free": 6 - ready, "slots": 8,
    }  # fmt: skip


def _gpu(second: int, *, gpu: int, began: float, rng: np.random.Generator) -> dict[str, Any]:
    use = float(rng.uniform(0.5, 1.0))
    return {
        "time": began + 3 + second, "gpu": gpu, "utilisation": use, "sm_active": use * 0.8, "tensor_active": use * 0.45,
        "memory_bytes": int(61e9 + 1e9 * use), "memory_total_bytes": int(150e9), "power_watts": 300 + 350 * use,
        "pcie_tx_bytes_per_second": 4e8 * use, "pcie_rx_bytes_per_second": 6e8 * use,
    }  # fmt: skip


def _write_facts(run: RunFolder, *, steps: int, status: str, began: float, seconds: float) -> None:
    done = steps if status == "finished" else steps - 1
    state = {"status": status, "step": done, "steps": steps, "cause": None, "restarts": 0, "pid": 99, "time": began + seconds}
    run.state.write_text(json.dumps(state))
    start = {
        "time": "2026-09-21T12:53:20+0000", "command": ["slipstream", "train", "made.toml"], "python": "3.11.7",
        "system": "Linux", "cores": 16, "disk_free_bytes": 10**12, "versions": {"slipstream": "0.1.0", "torch": "2.11.0"},
    }  # fmt: skip
    _lines(run.environment, [start])
    parts = {"weights": 20e9, "optimizer": 30e9, "activations": 8e9}
    memory = [{"role": role, "rank": 0, "bytes": 58e9, "parts": parts} for role in ("target", "drafter")]
    stages = {"source": "table", "target_seconds_per_pack": 0.4, "drafter_seconds_per_use": 0.2}
    predicted = {"memory": memory, "stages": stages, "throughput": {"tokens_per_second": 36_000.0}}
    run.prediction.write_text(json.dumps(predicted))
    process = {
        "pid": 99,
        "start_time": began,
        "host": "made",
        "command": ["slipstream", "train", "made.toml"],
        "detached": False,
    }
    run.process.write_text(json.dumps(process))


def _recipe(name: str, *, workers: Sequence[str], packs_per_step: int) -> dict[str, Any]:
    targets = sum(worker.startswith("target") for worker in workers)
    placement = {"mode": "split" if targets else "colocated", "target_workers": max(1, targets)}
    return {
        "name": name,
        "plan": {"pack_tokens": 8192, "packs_per_step": packs_per_step, "epochs": 5, "seed": 0},
        "drafter": {"type": "dflash", "num_layers": 5, "block_size": 8},
        "optimizer": {"lr": 6e-4, "schedule": "cosine"},
        "placement": placement | {"drafter_ranks": len(workers) - targets},
    }


def _lines(path: Path, rows: Iterable[Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
