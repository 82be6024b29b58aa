"""Columns for the page's charts: by step from metrics, by time from samples; thinned to what a chart can show."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from slipstream.report.codec import encode_differences, encode_floats
from slipstream.report.reading import RunData, column
from slipstream.report.spans import Floats, Samples
from slipstream.runfolder import RunFolder

MOST_POINTS = 20_000
MOST_SAMPLES = 3_000
TRAIN_COLUMNS = (
    "loss", "acceptance_length", "accuracy", "learning_rate", "gradient_norm", "seconds", "context_tokens_per_second",
    "supervised_tokens_per_second", "anchors_per_second", "token_fill", "anchor_fill", "memory_bytes", "device_allocated_bytes",
    "mfu",
)  # fmt: skip
GPU_COLUMNS = (
    "utilisation", "sm_active", "tensor_active", "memory_bytes", "power_watts", "pcie_tx_bytes_per_second",
    "pcie_rx_bytes_per_second",
)  # fmt: skip
SLOT_POINTS = 200
QUEUE_COLUMNS = ("ready", "ready_bytes", "issued", "free")


def train_curves(run: RunData, *, after_step: int = -1) -> dict[str, Any]:
    """Curves by step of the steps after one, without columns that no line has; `mean_of` is how many steps a point is."""
    lines = run.train if after_step < 0 else [line for line in run.train if line["step"] > after_step]
    steps = np.array([line["step"] for line in lines], dtype=np.int64)
    width = -(-len(lines) // MOST_POINTS) if lines else 1
    columns = {}
    for name in TRAIN_COLUMNS:
        values = column(lines, name)
        if np.isfinite(values).any():
            columns[name] = encode_floats(bin_means(values, width))
    skipped = [line["step"] for line in lines if line.get("skipped")]
    return {"step": encode_differences(steps[::width]), "columns": columns, "mean_of": width, "skipped": skipped}


def slot_accuracy(run: RunData) -> list[float | None]:
    """Accuracy by slot of the block, mean of the last twentieth of the steps (at most 200)."""
    last = run.train[-min(200, max(1, len(run.train) // 20)) :]
    values = _by_slot(last)
    return [_none(value) for value in _nanmean(values, axis=0)] if len(values) else []


def slot_curves(run: RunData) -> dict[str, Any]:
    """Accuracy by slot of the block over all steps: a column a slot, means of so many steps each that they are few."""
    lines = [line for line in run.train if line.get("accuracy_per_slot")]
    values, width = _by_slot(lines), max(1, -(-len(lines) // SLOT_POINTS))
    steps = np.array([line["step"] for line in lines], dtype=np.int64)[::width]
    columns = [encode_floats(bin_means(column, width)) for column in values.T] if len(values) else []
    return {"step": encode_differences(steps), "columns": columns, "mean_of": width}


def _by_slot(lines: list[dict[str, Any]]) -> Floats:
    """Accuracies, float64 `[lines, slots]`; NaN where a slot had nothing supervised."""
    rows = [line["accuracy_per_slot"] for line in lines if line.get("accuracy_per_slot")]
    return np.array([[np.nan if value is None else value for value in row] for row in rows], dtype=np.float64)


def mixing_curve(run: RunData) -> dict[str, Any] | None:
    """The planned distance of each step's document lengths to the corpus', by step; none without a schedule."""
    path = RunFolder(run.root).schedule / "mixing.npy"
    if not path.is_file():
        return None
    values = np.load(path, allow_pickle=False).astype(np.float64)
    width = max(1, -(-len(values) // MOST_SAMPLES))
    steps = np.arange(len(values), dtype=np.int64)[::width]
    return {"step": encode_differences(steps), "distance": encode_floats(bin_means(values, width)), "mean_of": width}


def sample_curves(
    samples: Samples, *, key: str, names: tuple[str, ...], begin: float, after: float = -np.inf
) -> list[dict[str, Any]]:
    """Curves by time (seconds since `begin`), one entry a value of `key`; only samples later than `after` (Unix seconds)."""
    found = []
    for which in np.unique(samples[key][np.isfinite(samples[key])]):
        rows = samples.where(key, float(which))
        rows = rows.pick(rows["time"] > after)
        if not len(rows):
            continue
        width = -(-len(rows) // MOST_SAMPLES)
        columns = {name: encode_floats(bin_means(rows[name], width)) for name in names if np.isfinite(rows[name]).any()}
        times = encode_floats(bin_means(rows["time"] - begin, width))
        found.append({key: int(which), "time": times, "columns": columns, "mean_of": width})
    return found


def bin_means(values: Floats, width: int) -> Floats:
    """Means of each `width` values in a row, NaN left out; the last bin may be shorter."""
    if width <= 1:
        return values
    padded = np.concatenate((values, np.full(-len(values) % width, np.nan)))
    return _nanmean(padded.reshape(-1, width), axis=1)


def _nanmean(values: Floats, *, axis: int) -> Floats:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a bin with nothing in it is NaN, which is what is meant
        return np.asarray(np.nanmean(values, axis=axis))


def _none(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
