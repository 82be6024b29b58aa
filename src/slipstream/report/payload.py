"""What a page holds of a run, as plain values: whole, or only what came since the page last asked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tomli_w

from slipstream.report.curves import (
    GPU_COLUMNS,
    QUEUE_COLUMNS,
    mixing_curve,
    sample_curves,
    slot_accuracy,
    slot_curves,
    train_curves,
)
from slipstream.report.figures import run_figures, verdict_figures
from slipstream.report.lanes import MOST_SPANS, Thinning, choose_thinning, encode_lanes
from slipstream.report.reading import RunData
from slipstream.report.times import worker_order
from slipstream.report.verdict import judge

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Cursor:
    """How far a page has read: whose `starts` it saw (a run that starts again is read anew), spans by worker, step, times."""

    starts: str
    begin: float
    spans: Mapping[str, int]
    step: int
    queues: float
    gpus: float

    def text(self) -> str:
        """The cursor as the page gives it back."""
        return json.dumps([self.starts, self.begin, dict(self.spans), self.step, self.queues, self.gpus], separators=(",", ":"))

    @classmethod
    def parse(cls, text: str) -> Cursor | None:
        """A cursor that a page gave back; none when it is no cursor of ours."""
        try:
            starts, begin, spans, step, queues, gpus = json.loads(text)
            return cls(
                starts=str(starts),
                begin=float(begin),
                spans={str(worker): int(count) for worker, count in spans.items()},
                step=int(step),
                queues=float(queues),
                gpus=float(gpus),
            )
        except (ValueError, TypeError, AttributeError):
            return None


@dataclass(frozen=True, slots=True)
class Told:
    """What is told of a run in numbers and words, JSON-able: the part of a page that has to look at every span."""

    figures: dict[str, Any]
    verdict: dict[str, Any]


def tell(run: RunData, *, window: float | None = None) -> Told:
    """Figures and verdict; the latter over the newest `window` seconds, or over the whole run."""
    return Told(figures=run_figures(run), verdict=verdict_figures(judge(run, window=window)))


def run_payload(
    run: RunData, *, told: Told | None = None, since: Cursor | None = None, most_spans: int = MOST_SPANS
) -> dict[str, Any]:
    """One run for the page. With `since`, curves and lanes hold only what is newer; figures and verdict are always whole.

    They are `told`, or told now of the whole run. A cursor from before the run's newest start is of no use: the answer then
    says `whole`, and the page forgets what it had.
    """
    told = told or tell(run)
    cursor = cursor_of(run)
    known = since if since is not None and _continues(since, cursor) else None
    begin = known.begin if known else cursor.begin
    thinning = None if known else choose_thinning(run, most_spans=most_spans)
    queues_after, gpus_after = (known.queues, known.gpus) if known else (-np.inf, -np.inf)
    return {
        "whole": known is None,
        "cursor": Cursor(cursor.starts, begin, cursor.spans, cursor.step, cursor.queues, cursor.gpus).text(),
        "begin": begin,
        "end": run.end,
        "now": run.now,
        "ended": run.ended,
        "figures": told.figures,
        "verdict": told.verdict,
        "train": train_curves(run, after_step=known.step if known else -1),
        "slot_accuracy": slot_accuracy(run),
        "slot_curves": slot_curves(run),
        "validations": run.validations,
        "events": [line for line in run.events if line.get("kind") in ("start", "checkpoint", "restart")],
        "lanes": _lanes(run, known=known, begin=begin, thinning=thinning),
        "exact": [[low - begin, high - begin] for low, high in thinning.exact] if thinning else None,
        "queues": sample_curves(run.queues, key="rank", names=QUEUE_COLUMNS, begin=begin, after=queues_after),
        "gpus": sample_curves(run.gpus, key="gpu", names=GPU_COLUMNS, begin=begin, after=gpus_after),
        **({} if known else _fixed(run)),
    }


def cursor_of(run: RunData) -> Cursor:
    """How far a page is that has read everything."""
    starts = [len(run.starts), sum(line.get("kind") == "start" for line in run.events)]
    return Cursor(
        starts=".".join(map(str, starts)),
        begin=run.begin,
        spans={worker: len(spans) for worker, spans in run.spans.items()},
        step=run.train[-1]["step"] if run.train else -1,
        queues=float(run.queues["time"][-1]) if len(run.queues) else 0.0,
        gpus=float(run.gpus["time"][-1]) if len(run.gpus) else 0.0,
    )


def _continues(since: Cursor, now: Cursor) -> bool:
    counts = all(count <= now.spans.get(worker, 0) for worker, count in since.spans.items())
    return since.starts == now.starts and counts and since.step <= now.step and since.begin <= now.begin + 1e-6


def _lanes(run: RunData, *, known: Cursor | None, begin: float, thinning: Thinning | None) -> list[dict[str, Any]]:
    lanes = []
    for worker, spans in sorted(run.spans.items(), key=lambda pair: worker_order(pair[0])):
        new = spans.pick(np.arange(known.spans.get(worker, 0), len(spans))) if known else spans
        lanes += encode_lanes(new, begin=begin, thinning=thinning)
    return lanes


def _fixed(run: RunData) -> dict[str, Any]:
    """What does not change while a run goes on."""
    return {
        "mixing": mixing_curve(run),
        "recipe": run.recipe,
        "recipe_text": tomli_w.dumps(run.recipe) if run.recipe else "",
        "recipe_given": run.recipe_given,
        "environment": run.starts,
        "process": run.process,
    }
