"""A run in numbers: what `slipstream report --json` prints and the tables of the page show."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import numpy as np

from slipstream.report.findings_workers import damaged_packs
from slipstream.report.reading import RunData, column
from slipstream.report.spans import Floats, Samples
from slipstream.report.times import split_by_kind, stage_rows, training_window, worker_times
from slipstream.report.verdict import Verdict
from slipstream.runfolder import RunFolder

RAMP_SHARE = 0.05
RAMP_STEPS = 50
"""Steps at the start that rates leave out: this share of the run, at most so many."""
LAST_SHARE = 0.05
TOLD = ("warm_up", "target_warm_up", "late", "late_work", "restart", "sink_failed", "bad_rows", "rejected_seals")
"""Kinds of lines of metrics that are shown as events."""


def run_figures(run: RunData) -> dict[str, Any]:
    """Everything about one run that is a number or a name, JSON-able, without its curves and spans. Times are in seconds."""
    window = training_window(run)
    workers = worker_times(run)
    for worker in workers:
        worker["kinds"] = split_by_kind(worker["training"] or worker["whole"])
        worker["gpu_kinds"] = split_by_kind(worker["gpu_training"]) if worker["gpu_training"] else None
    return {
        "name": run.name,
        "folder": run.root.name,
        "status": run.state.get("status"),
        "cause": run.state.get("cause"),
        "step": steps_done(run),
        "steps": run.state.get("steps"),
        "restarts": run.state.get("restarts", 0),
        "seconds": run.end - run.begin,
        "training_seconds": window[1] - window[0] if window else None,
        "training_after_seconds": window[0] - run.begin if window else None,
        "time_left_seconds": time_left(run),
        "rates": rates(run),
        "results": results(run),
        "workers": workers,
        "stages": stage_rows(run),
        "queues": queue_rows(run.queues, window=window),
        "gpus": gpu_rows(run.gpus, window=window),
        "memory": memory_rows(run),
        "prediction": run.prediction,
        "plan": plan_summary(run),
        "told": [line for line in run.events if line.get("kind") in TOLD],
        "torn_lines": run.torn_lines,
    }


def verdict_figures(verdict: Verdict) -> dict[str, Any]:
    """The verdict as plain values."""
    return asdict(verdict)


def rates(run: RunData) -> dict[str, float | None]:
    """Tokens, anchors and steps per second while steps were made, without the first few; predicted beside measured."""
    ramp = min(RAMP_STEPS, int(len(run.train) * RAMP_SHARE), max(0, len(run.train) - 1))
    seconds = column(run.train[ramp:], "seconds")
    total = float(np.nansum(seconds))
    rate: dict[str, float | None] = {}
    for name in ("context_tokens", "supervised_tokens", "anchors"):
        counted = float(np.nansum(column(run.train[ramp:], name)))
        rate[f"{name}_per_second"] = counted / total if total else None
    rate["seconds_per_step"] = float(np.nanmedian(seconds)) if np.isfinite(seconds).any() else None
    predicted = ((run.prediction or {}).get("throughput") or {}).get("tokens_per_second")
    rate["predicted_tokens_per_second"] = predicted
    return rate


def results(run: RunData) -> dict[str, Any]:
    """Loss and acceptance at the end of training, and of validations the first, best and last."""
    last = max(1, int(len(run.train) * LAST_SHARE))
    found: dict[str, Any] = {
        "steps_averaged": min(last, len(run.train)),
        "loss": _mean(column(run.train[-last:], "loss")),
        "acceptance_length": _mean(column(run.train[-last:], "acceptance_length")),
        "accuracy": _mean(column(run.train[-last:], "accuracy")),
        "skipped_steps": sum(bool(line.get("skipped")) for line in run.train),
        "bad_rows": int(np.nansum(column(run.train, "bad_rows"))),
        "rejected_seals": damaged_packs(run),
        "context_tokens": int(np.nansum(column(run.train, "context_tokens"))),
        "anchors": int(np.nansum(column(run.train, "anchors"))),
        "validation": None,
    }
    lengths = [(line["step"], line.get("acceptance_length")) for line in run.validations]
    known = [(step, length) for step, length in lengths if length is not None]
    if known:
        best = max(known, key=lambda pair: pair[1])
        named = {"first": known[0], "best": best, "last": known[-1]}
        found["validation"] = {name: {"step": step, "acceptance_length": value} for name, (step, value) in named.items()}
    return found


def queue_rows(queues: Samples, *, window: tuple[float, float] | None) -> list[dict[str, Any]]:
    """One row a drafter rank: percentiles of packs and bytes that are ready, and shares of samples at empty and at full.

    Of samples taken while the run trained, as in `gpu_rows`.
    """
    rows = []
    for rank in np.unique(queues["rank"][np.isfinite(queues["rank"])]):
        of_rank = _in(window, queues.where("rank", float(rank)))
        ready, free, slots = of_rank["ready"], of_rank["free"], of_rank["slots"]
        row: dict[str, Any] = {"rank": int(rank), "samples": len(of_rank), "slots": _last(slots), "ready_mean": _mean(ready)}
        for percent in (10, 50, 90):
            row[f"ready_p{percent}"] = _percentile(ready, percent)
            row[f"ready_bytes_p{percent}"] = _percentile(of_rank["ready_bytes"], percent)
        row["issued_mean"] = _mean(of_rank["issued"])
        row["share_empty"] = float(np.mean(ready == 0))
        row["share_full"] = float(np.mean(free == 0))
        rows.append(row)
    return rows


def gpu_rows(gpus: Samples, *, window: tuple[float, float] | None) -> list[dict[str, Any]]:
    """One row a GPU: means of what its driver measured while the run trained, and the most memory that was ever in use.

    Where there is no `window` (Unix seconds), or no sample in it, the means are of all samples.
    """
    rows = []
    means = ("utilisation", "sm_active", "tensor_active", "power_watts", "pcie_tx_bytes_per_second", "pcie_rx_bytes_per_second")
    for gpu in np.unique(gpus["gpu"][np.isfinite(gpus["gpu"])]):
        of_gpu = gpus.where("gpu", float(gpu))
        trained = _in(window, of_gpu)
        row: dict[str, Any] = {"gpu": int(gpu), "samples": len(trained)}
        row |= {name: _mean(trained[name]) for name in means}
        row["memory_bytes_most"] = _percentile(of_gpu["memory_bytes"], 100)
        row["memory_bytes_total"] = _last(of_gpu["memory_total_bytes"])
        rows.append(row)
    return rows


def memory_rows(run: RunData) -> list[dict[str, Any]]:
    """Each process that was predicted, with the bytes that were measured of it.

    `peak_bytes` is what torch's allocator had handed out at most and recordings kept, told by the process at its end, and `off`
    how much more was predicted of it, as a share; `gpu_bytes` the most that was taken on its GPU in its time, by whomever;
    `host_bytes` the most that a drafter without a GPU had resident, libraries included.
    """
    told = {(line.get("role"), line.get("rank")): line for line in run.events if line.get("kind") == "memory"}
    rows = []
    for predicted in (run.prediction or {}).get("memory") or []:
        who = predicted["role"], predicted["rank"]
        spans = next((spans for spans in run.spans.values() if (spans.role, spans.rank) == who), None)
        gpu = None if spans is None else spans.gpu
        of_gpu = run.gpus.where("gpu", gpu) if gpu is not None and len(run.gpus) else None
        if of_gpu is not None and spans is not None and len(spans):
            of_gpu = of_gpu.between(float(spans.start.min()), float(spans.end.max()))
        on_host = gpu is None and who in (("drafter", 0), ("colocated", 0))
        line = told.get(who, {})
        peak, nbytes = line.get("peak_bytes"), line.get("predicted_bytes") or predicted["bytes"]
        rows.append({
            **predicted,
            "bytes": nbytes,
            "gpu": gpu,
            "peak_bytes": peak,
            "off": nbytes / peak - 1 if peak else None,
            "gpu_bytes": _percentile(of_gpu["memory_bytes"], 100) if of_gpu is not None else None,
            "host_bytes": _percentile(column(run.train, "memory_bytes"), 100) if on_host else None,
        })  # fmt: skip
    return rows


def plan_summary(run: RunData) -> dict[str, Any] | None:
    """What the schedule says of itself: fills, tokens, refusals, mixing."""
    path = RunFolder(run.root).schedule / "schedule.json"
    try:
        summary = json.loads(path.read_text("utf-8"))["summary"]
    except (FileNotFoundError, ValueError, KeyError):
        return None
    return dict(summary)


def steps_done(run: RunData) -> int:
    """Steps that the run has made, as far as its files say."""
    return max([int(run.state.get("step") or 0), *(int(line["step"]) + 1 for line in run.train[-1:])])


def time_left(run: RunData) -> float | None:
    """Seconds to the last step at the pace of the newest steps; none when the run is over or has no pace yet."""
    steps = run.state.get("steps")
    seconds = column(run.train[-RAMP_STEPS:], "seconds")
    if run.ended or steps is None or not np.isfinite(seconds).any():
        return None
    return float(np.nanmean(seconds)) * max(0, int(steps) - steps_done(run))


def _in(window: tuple[float, float] | None, samples: Samples) -> Samples:
    """Those of a window, in Unix seconds; all where there is none, or none in it."""
    inside = samples.between(*window) if window else samples
    return inside if len(inside) else samples


def _mean(values: Floats) -> float | None:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else None


def _percentile(values: Floats, percent: float) -> float | None:
    finite = values[np.isfinite(values)]
    return float(np.percentile(finite, percent)) if len(finite) else None


def _last(values: Floats) -> float | None:
    finite = values[np.isfinite(values)]
    return float(finite[-1]) if len(finite) else None
