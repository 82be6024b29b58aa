"""The verdict: in words and numbers, what limited a run, what was lost to it, what to change, and what that would gain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from slipstream.report.findings import Finding, Kind, alternatives, flow_findings, percent, thousands
from slipstream.report.findings_workers import worker_findings
from slipstream.report.measured import Measured, measure
from slipstream.report.reading import RunData

__all__ = ["Finding", "Kind", "Verdict", "judge"]

CONSEQUENCES = ("back_pressure",)
"""What follows from another finding comes after it, however large."""
HARMLESS = ("balanced",)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a run's steady state says. `findings`: the cause worth most first; "balanced" alone where nothing is wrong.

    `shares` of the window by worker and state; `window` in Unix seconds; `tokens_per_second` trained context tokens;
    `costs` the stage costs as measured; `predictions` of all layouts, calibrated on what was measured;
    `prediction_error` how much more than measured was predicted before the run, as a share. All None or empty while there are
    too few steps.
    """

    headline: str
    findings: Sequence[Finding] = ()
    shares: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    window: tuple[float, float] | None = None
    steps: int = 0
    tokens_per_second: float | None = None
    unique_tokens_per_second: float | None = None
    costs: Mapping[str, Any] = field(default_factory=dict)
    predictions: Mapping[str, float] = field(default_factory=dict)
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
    others = worker_findings(measured, run=run)
    findings = sorted([*flow, *others], key=_rank)
    if others and findings[-1].kind in HARMLESS and findings[-1].predicted_gain is None:
        findings = findings[:-1]  # what keeps pace is no news beside what is wrong
    error = _error(run, measured)
    found = alternatives(measured)
    return Verdict(
        headline=_headline(findings[0], measured=measured, error=error),
        findings=tuple(findings),
        shares={worker.name: dict(worker.shares) for worker in measured.workers},
        window=(measured.begin, measured.end),
        steps=measured.steps,
        tokens_per_second=measured.rate,
        unique_tokens_per_second=measured.unique_rate,
        costs=measured.costs.as_dict(),
        predictions={str(item.layout): found.rate(item, measured=measured.rate) for item in (found.current, *found.others)},
        prediction_error=error,
    )


def _rank(finding: Finding) -> tuple[int, float, float]:
    """Causes before consequences before what is no fault; within them first what would gain most, then what costs most."""
    order = 2 if finding.kind in HARMLESS else 1 if finding.kind in CONSEQUENCES else 0
    return order, -(finding.predicted_gain or 0.0), -finding.share_lost


def _headline(first: Finding, *, measured: Measured, error: float | None) -> str:
    rate = f"{thousands(measured.rate)} tokens/s"
    said = f"{rate}: {first.sentence}. {first.advice[0].upper()}{first.advice[1:]}"
    if error is not None:
        said += f". {thousands(measured.rate * (1 + error))} were predicted before the run, {percent(error, sign=True)}"
    return said


def _error(run: RunData, measured: Measured) -> float | None:
    """Predicted over measured tokens a second, less one; none when nothing was predicted or measured."""
    predicted = ((run.prediction or {}).get("throughput") or {}).get("tokens_per_second")
    if not isinstance(predicted, int | float) or not measured.rate:
        return None
    return float(predicted) / measured.rate - 1


def _too_early(run: RunData) -> str:
    if run.recipe.get("observe", {}).get("spans") is False:
        return "nothing to judge by: observe.spans is false"
    return f"too few steps to judge: {len(run.train)} of {run.state.get('steps') or 'unknown'} were made"
