"""The verdict: in words and numbers, what limited a run, what was lost to it, what to change, and what that would gain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from slipstream.report.findings import Finding, Kind, alternatives, flow_findings, percent, thousands
from slipstream.report.findings_launch import launch_finding
from slipstream.report.findings_workers import worker_findings
from slipstream.report.measured import Measured, measure
from slipstream.report.reading import RunData

__all__ = ["Finding", "Kind", "Verdict", "judge"]

CONSEQUENCES = ("back_pressure",)
"""What follows from another finding comes after it, however large."""
HARMLESS = ("balanced",)
TOLD_TOO = 0.10
"""A second cause is in the headline from this share of lost time on."""
ALWAYS_TOLD = ("rejected_seals", "restarts")
"""What is in the headline whatever it costs: data was damaged, or a worker died."""
ALTERNATIVE = "; "
"""Parts one advice from the next; the headline has the first."""
PAUSED = 0.01
"""Pauses for validation and checkpoints are told apart from this share of the time on."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a run's steady state says. `findings`: the cause that costs most first; "balanced" alone where nothing is wrong.

    `shares` of the window by worker and state; `window` in Unix seconds; `tokens_per_second` trained context tokens, over all
    of the window, `steady_tokens_per_second` over what validation and checkpoints leave of it; `costs` the stage costs as
    measured; `predictions` of all layouts, calibrated on what was measured; `predicted_tokens_per_second` what was predicted
    before the run for the time outside pauses, `prediction_error` how much more that is than was measured then, as a share. All
    None or empty while there are too few steps.
    """

    headline: str
    findings: Sequence[Finding] = ()
    shares: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    window: tuple[float, float] | None = None
    steps: int = 0
    tokens_per_second: float | None = None
    unique_tokens_per_second: float | None = None
    steady_tokens_per_second: float | None = None
    costs: Mapping[str, Any] = field(default_factory=dict)
    predictions: Mapping[str, float] = field(default_factory=dict)
    predicted_tokens_per_second: float | None = None
    prediction_error: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def judge(run: RunData, *, window: float | None = None) -> Verdict:
    """Judge a run, or its last `window` seconds; a run that goes on as well as one that is over."""
    measured = measure(run, window=window)
    if measured is None:
        return Verdict(headline=_too_early(run))
    flow = flow_findings(measured, queues=run.queues)
    launch = launch_finding(measured, run=run)
    others = [*worker_findings(measured, run=run), *([launch] if launch else [])]
    findings = sorted([*flow, *others], key=_rank)
    if others and findings[-1].kind in HARMLESS and findings[-1].predicted_gain is None:
        findings = findings[:-1]  # what keeps pace is no news beside what is wrong
    found = alternatives(measured)
    steady, predicted = measured.steady_rate, _predicted(run, measured)
    return Verdict(
        headline=_headline(findings, measured=measured, predicted=predicted, source=_source(run)),
        findings=tuple(findings),
        shares={worker.name: dict(worker.shares) for worker in measured.workers},
        window=(measured.begin, measured.end),
        steps=measured.steps,
        tokens_per_second=measured.rate,
        unique_tokens_per_second=measured.unique_rate,
        steady_tokens_per_second=steady,
        costs=measured.costs.as_dict(),
        predictions={str(item.layout): found.rate(item, measured=measured.rate) for item in (found.current, *found.others)},
        predicted_tokens_per_second=predicted,
        prediction_error=predicted / steady - 1 if predicted is not None and steady else None,
    )


def _rank(finding: Finding) -> tuple[int, float, float]:
    """Causes before consequences before what is no fault; within them first what costs most, then what would gain most."""
    order = 2 if finding.kind in HARMLESS else 1 if finding.kind in CONSEQUENCES else 0
    return order, -finding.share_lost, -(finding.predicted_gain or 0.0)


def _headline(findings: Sequence[Finding], *, measured: Measured, predicted: float | None, source: str) -> str:
    first, steady = findings[0], measured.steady_rate
    advice = first.advice.split(ALTERNATIVE)[0]
    said = f"{thousands(measured.rate)} tokens/s: {first.sentence}. {advice[0].upper()}{advice[1:]}"
    if len(findings) > 1 and _rank(findings[1])[0] == 0 and findings[1].share_lost >= TOLD_TOO:
        second = findings[1]
        gain = "" if second.predicted_gain is None else f" (worth {percent(second.predicted_gain, sign=True)})"
        said += f". Besides, {second.sentence}{gain}"
    said += "".join(f". {also.sentence}" for also in findings[1:] if also.kind in ALWAYS_TOLD and also.sentence not in said)
    if predicted is not None:
        off = percent(predicted / steady - 1, sign=True)
        words = f"{thousands(predicted)} were predicted before the run{source}, {off}"
        if measured.paused >= PAUSED:
            words = f"Outside validation and checkpoints it makes {thousands(steady)}; {words}"
        said += f". {words}"
    return said


def _source(run: RunData) -> str:
    """Said of a prediction that no measurement of this recipe is behind."""
    source = ((run.prediction or {}).get("stages") or {}).get("source")
    return " from the table of known GPUs" if isinstance(source, str) and source.startswith("table") else ""


def _predicted(run: RunData, measured: Measured) -> float | None:
    """Tokens a second outside pauses that were predicted before the run; none when nothing was predicted or measured.

    Costs of the table know no pauses, those that another run measured do: they are taken off again.
    """
    prediction = run.prediction or {}
    predicted = (prediction.get("throughput") or {}).get("tokens_per_second")
    pauses = (prediction.get("stages") or {}).get("pause_seconds_per_step") or 0.0
    if not isinstance(predicted, int | float) or not predicted or not measured.rate:
        return None
    tokens = measured.rate * measured.step_seconds
    return tokens / max(tokens / predicted - pauses, 1e-9)


def _too_early(run: RunData) -> str:
    if run.recipe.get("observe", {}).get("spans") is False:
        return "nothing to judge by: observe.spans is false"
    return f"too few steps to judge: {len(run.train)} of {run.state.get('steps') or 'unknown'} were made"
