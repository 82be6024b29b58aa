"""What the terminal shows of a run besides its lanes, as lines: how far it is, its curves, the verdict, queues and GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.text import Text

from slipstream.report.figures import steps_done, time_left
from slipstream.report.findings import percent
from slipstream.report.findings_workers import damaged_packs
from slipstream.report.reading import RunData, column
from slipstream.report.spans import Floats, Samples
from slipstream.report.terminal_plots import Curve, bar, sparkline
from slipstream.report.terminal_text import apart, capital, cut, duration, exact, short, with_parts, wrapped
from slipstream.report.verdict import Verdict

RATE_STEPS = 20
"""Steps whose mean stands for now."""
STATE_COLOURS = {
    "training": "green", "finished": "green", "starting": "cyan", "interrupted": "yellow", "failed": "red", "lost": "red",
}  # fmt: skip
CURVES = (
    ("tokens/s", "context_tokens_per_second", "#88ccee", True),
    ("loss", "loss", "#f59a5f", False),
    ("acceptance length τ", "acceptance_length", "#5cc9ba", False),
    ("accuracy", "accuracy", "#bdbd4a", False),
    ("gradient norm", "gradient_norm", "#d078c2", True),
    ("learning rate", "learning_rate", "#8fa3b5", True),
    ("seconds a step", "seconds", "#ffbf40", True),
    ("MFU", "mfu", "#8f7fe0", True),
    ("memory, bytes", "memory_bytes", "#b3c2d1", True),
)
"""Title, key in the lines of metrics, colour, and whether the curve stands on 0; the most telling first."""
VALIDATED = ("acceptance length τ (● validated)", "τ (● validated)")
ALWAYS = ("context_tokens_per_second", "loss", "acceptance_length")
"""Curves that keep their place before they have a value."""
SPARK_CELLS = 24
STALE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Health:
    """What the run's process says that its files cannot: `state` (state.json's, or "lost") and a sentence, "well" if so."""

    state: str
    sentence: str = "well"

    @property
    def over(self) -> bool:
        """Whether nothing more will come."""
        return self.state not in ("starting", "training")


def title_row(run: RunData, *, health: Health, width: int) -> Text:
    """Name and state on the left, steps and time left on the right."""
    left = Text().append(f" {run.name} ", style="bold reverse").append(" ")
    left.append(f"● {health.state}", style=f"bold {STATE_COLOURS.get(health.state, 'white')}")
    silent = run.now - run.end
    if not health.over and silent > STALE_SECONDS and run.spans:
        left.append(f"  nothing written for {duration(silent)}", style="yellow")
    seconds = None if health.over else time_left(run)
    right = Text().append(f"step {steps_done(run):,}/{_steps(run)}", style="bold")
    if seconds is not None:
        right.append("  left ", style="dim").append(duration(seconds), style="bold")
    elif run.end > run.begin:
        right.append("  took " if health.over else "  since ", style="dim").append(duration(run.end - run.begin), style="bold")
    return apart(left, right, width=width)


def progress_row(run: RunData, *, width: int) -> Text:
    """A bar of the steps that were made."""
    steps = run.state.get("steps")
    share = steps_done(run) / steps if isinstance(steps, int) and steps else 0.0
    told = f" {share:4.0%}" if steps else "  ? %"
    room = max(0, width - len(told))
    filled = bar(share, width=room).rstrip()
    return Text().append(filled, style="#3fae66").append("─" * (room - len(filled)), style="dim").append(told, style="bold")


def figures_row(run: RunData, *, width: int) -> Text:
    """The newest figures, those that matter most first, as far as they fit."""
    last = run.train[-RATE_STEPS:]
    seconds, tokens = column(last, "seconds"), column(last, "context_tokens")
    rate = float(np.nansum(tokens) / np.nansum(seconds)) if np.nansum(seconds) > 0 else None
    found: list[tuple[str, float | None]] = [("tokens/s", rate), ("loss", _mean(column(last, "loss")))]
    found.append(("τ", _mean(column(last, "acceptance_length"))))
    validated = run.validations[-1] if run.validations else {}
    found.append(("τ validated", validated.get("acceptance_length")))
    found.append(("s/step", _mean(seconds)))
    for label, key in (("lr", "learning_rate"), ("grad", "gradient_norm"), ("MFU", "mfu"), ("anchors/s", "anchors_per_second")):
        found.append((label, _mean(column(last, key))))
    skipped = last[-1].get("total_skipped_steps") if last else None
    row = Text()
    for label, value in [*found, ("skipped", skipped or None), ("packs damaged", damaged_packs(run) or None)]:
        if value is None or len(row) + len(label) + 12 > width:
            continue
        row.append("   " if row else " ").append(f"{label} ", style="dim").append(exact(value), style="bold")
    return row if row else Text(" no step was made yet", style="dim")


def curves(run: RunData, *, seconds: float | None, most: int) -> list[Curve]:
    """At most so many of the run's curves, the most telling first; with `seconds` over the newest steps that took so long."""
    lines = run.train if seconds is None else _newest(run.train, seconds)
    steps = np.array([line["step"] + 1 for line in lines], dtype=np.int64)
    first = int(steps[0]) - 1 if len(steps) and seconds is not None else 0
    marks = [
        (float(line["step"]), float(line["acceptance_length"]))
        for line in run.validations
        if line.get("acceptance_length") is not None and line["step"] >= first
    ]
    found: list[Curve] = []
    for title, key, tone, from_zero in CURVES:
        if len(found) == most:
            break
        values = column(lines, key)
        with_marks = marks if key == "acceptance_length" else []
        if np.isfinite(values).any() or with_marks or key in ALWAYS:
            titles = VALIDATED if with_marks else (title,)
            found.append(Curve(titles, steps, values, tone, short, marks=with_marks, from_zero=from_zero))
    return found


def verdict_rows(verdict: Verdict, *, width: int, height: int) -> list[Text]:
    """The headline, then as many of the other findings as there is room for, each with its advice."""
    rows = [Text(line, style="bold") for line in wrapped(verdict.headline, width)]
    for finding in verdict.findings[1:]:
        rows += [Text(line) for line in wrapped(f"• {finding.sentence}. {capital(finding.advice)}", width, hanging="  ")]
    return cut(rows, width=width, height=height)


def verdict_in_full(verdict: Verdict, *, width: int) -> list[Text]:
    """Everything that the verdict says: findings with loss and gain, predictions of all layouts, stage costs."""
    rows = [Text(line, style="bold") for line in wrapped(verdict.headline, width)]
    for number, finding in enumerate(verdict.findings, start=1):
        gain = "" if finding.predicted_gain is None else f", {percent(finding.predicted_gain, sign=True)} predicted"
        rows += [Text(), Text().append(f"{number}. {finding.kind}", style="bold cyan")]
        rows[-1].append(f"   {percent(finding.share_lost)} of all time lost{gain}", style="yellow")
        rows += [Text(line) for line in wrapped(finding.sentence, width, indent="   ")]
        rows += [Text(line, style="green") for line in wrapped(capital(finding.advice), width, indent="   → ", hanging="     ")]
        changes = ", ".join(f"{key} = {value}" for key, value in finding.change.items())
        rows += [Text(line, style="dim") for line in (wrapped(changes, width, indent="     ") if changes else [])]
    if verdict.predictions:
        rows += [
            Text(),
            Text("predicted tokens/s of other layouts (targets + drafters)", style="bold"),
        ]
        best = max(verdict.predictions.values())
        for layout, rate in sorted(verdict.predictions.items(), key=lambda pair: -pair[1]):
            row = Text(f"   {layout:<14} {rate:>12,.0f} ")
            rows.append(row.append(bar(rate / best if best else 0.0, width=max(0, min(40, width - 32))), style="cyan"))
    return rows


def queue_rows(queues: Samples, *, width: int) -> list[Text]:
    """One line a drafter rank: packs ready of its slots over the window, bytes, packs in work, free slots."""
    rows = []
    for rank in _groups(queues, "rank"):
        of_rank = queues.where("rank", rank)
        ready, slots = of_rank["ready"], _last(of_rank["slots"])
        now, most = _last(ready), slots or float(np.nanmax(ready))
        row = Text().append(f"rank {int(rank)} ", style="dim")
        row.append(sparkline(ready, width=_spark(width), low=0, high=most), style="#f59a5f")
        row.append(f" {_count(now)}/{_count(slots)}", style="bold").append(" ready", style="dim")
        empty = float(np.mean(ready == 0))
        parts = [("", f"{_bytes(_last(of_rank['ready_bytes']))}"), ("in work ", _count(_last(of_rank["issued"])))]
        parts += [("free ", _count(_last(of_rank["free"]))), ("empty ", f"{empty:.0%}")]
        rows.append(with_parts(row, parts, width=width))
    return rows


def gpu_rows(gpus: Samples, *, width: int, together: bool = False) -> list[Text]:
    """One line a GPU: utilisation over the window, then what its driver says now; `together` one line of their means."""
    found = _groups(gpus, "gpu")
    if together and len(found) > 1:
        return [_gpu_row(gpus, name=f"{len(found)} GPUs ", newest=len(found), width=width)]
    return [_gpu_row(gpus.where("gpu", gpu), name=f"GPU {int(gpu)} ", newest=1, width=width) for gpu in found]


def _gpu_row(gpus: Samples, *, name: str, newest: int, width: int) -> Text:
    """One line of samples that are in order of time, of which the `newest` ones stand for now."""
    row = Text().append(name, style="dim")
    row.append(sparkline(gpus["utilisation"], width=_spark(width), low=0, high=1), style="#3fae66")
    now = gpus.pick(np.arange(max(0, len(gpus) - newest), len(gpus)))
    use, memory, total = _mean(now["utilisation"]), _mean(now["memory_bytes"]), _mean(now["memory_total_bytes"])
    row.append(f" {_share(use)}", style="bold").append(" busy", style="dim")
    told = [("SM ", _mean(now["sm_active"]), _share), ("tensor ", _mean(now["tensor_active"]), _share)]
    parts = [(label, say(value)) for label, value, say in told if value is not None]
    if memory is not None:
        parts.append(("", f"{_gb(memory)}/{_gb(total)} GB"))
    if (watts := _mean(now["power_watts"])) is not None:
        parts.append(("", f"{_count(watts)} W"))
    return with_parts(row, parts, width=width)


def _newest(lines: list[dict[str, Any]], seconds: float) -> list[dict[str, Any]]:
    took = np.nan_to_num(column(lines, "seconds"))
    behind = np.cumsum(took[::-1])[::-1]
    return lines[int(np.searchsorted(-behind, -seconds)) :]


def _steps(run: RunData) -> str:
    steps = run.state.get("steps")
    return f"{steps:,}" if isinstance(steps, int) else "?"


def _spark(width: int) -> int:
    return max(4, min(SPARK_CELLS, width // 3))


def _groups(samples: Samples, key: str) -> list[float]:
    values = samples[key]
    return [float(value) for value in np.unique(values[np.isfinite(values)])]


def _mean(values: Floats) -> float | None:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else None


def _last(values: Floats) -> float | None:
    finite = values[np.isfinite(values)]
    return float(finite[-1]) if len(finite) else None


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _bytes(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value / 1e9:.1f} GB" if value >= 1e8 or value == 0 else f"{value / 1e6:.1f} MB"


def _gb(value: float | None) -> str:
    return "-" if value is None else f"{value / 1e9:.1f}"
