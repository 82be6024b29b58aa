"""The supervisor's book of a run: `state.json`, metrics into sinks, validations, restarts. Reports come in, files go out."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from slipstream.config import Recipe
from slipstream.launch.prediction import compare
from slipstream.launch.queues import QueueFile
from slipstream.launch.rejections import KIND as REJECTED_SEALS
from slipstream.observe import MetricLog, RunFacts, open_metric_log
from slipstream.report.verdict import Verdict
from slipstream.runfolder import RunFolder

log = logging.getLogger(__name__)


class RunBook:
    """Keeps what a run says of itself. `take` hears every report of every worker, in the supervisor's thread."""

    def __init__(self, *, folder: RunFolder, recipe: Recipe, on_report: Callable[[str, str, Any], None] | None) -> None:
        self._folder = folder
        self._recipe = recipe
        self._on_report = on_report
        self._metrics: MetricLog | None = None
        self._state: dict[str, Any] = {
            "status": "starting", "step": 0, "steps": None, "cause": None, "restarts": 0, "rejected_seals": 0,
        }  # fmt: skip
        self.validations: list[dict[str, Any]] = []
        self.queues = QueueFile(folder.queues)
        self.trained = -1
        """The last step that was trained, as far as was heard; -1 before the first of this start."""

    def state(self, status: str, *, cause: str | None = None, step: int | None = None) -> None:
        """Write `state.json`, whole or not at all."""
        self._state.update(status=status, cause=cause, pid=os.getpid(), time=time.time())
        if step is not None:
            self._state["step"] = step
        temporary = self._folder.state.with_suffix(".part")
        temporary.write_text(json.dumps(self._state, indent=1))
        os.replace(temporary, self._folder.state)

    def conclude(self, verdict: Verdict) -> None:
        """Keep the verdict for the state that comes next."""
        self._state.update(verdict=verdict.headline, prediction_error=verdict.prediction_error)

    def begin(self, *, start_step: int, num_steps: int) -> None:
        """Start the sinks. Raises `PreflightError` when a configured one does not start."""
        self._state.update(step=start_step, steps=num_steps)
        self._metrics = open_metric_log(
            self._recipe.observe.sinks,
            facts=RunFacts(
                name=self._recipe.name,
                num_steps=num_steps,
                metrics_path=self._folder.metrics,
                console_every_steps=self._recipe.observe.every_steps,
                folder=self._folder.root,
                recipe=self._recipe.model_dump(mode="json"),
                project=self._recipe.observe.project,
                wandb_mode=self._recipe.observe.wandb_mode,
            ),
        )
        self.state("training")

    def refill(self, *, packs: int, seconds: float | None) -> None:
        """Say what a run that resumes makes again before anything new, and how long that is predicted to take."""
        known = {} if seconds is None else {"predicted_seconds": seconds}
        told = "" if seconds is None else f", about {seconds:,.0f} s"
        log.info("resumed at step %d: %d packs are made again first%s", self._state["step"], packs, told)
        self._write({"kind": "refill", "step": self._state["step"], "packs": packs, **known})

    def take(self, worker: str, kind: str, payload: Any) -> None:
        """Hear one report."""
        if kind == "record":
            self._record(payload)
        elif kind == "queues":
            self.queues.write(payload)
        elif kind == "restart":
            self._state["restarts"] += 1
            self._renew()
            self._write({"kind": "restart", "step": self._state["step"], "worker": worker, **payload})
        elif kind == "late_work":
            log.warning("%s compiled or allocated something after warm-up: %s", worker, payload)
            self._write({"kind": kind, "step": self._state["step"], "worker": worker, **payload})
        elif kind == "done" and payload.get("bad_rows"):
            rows = payload["bad_rows"]
            log.warning("%s made %d hidden-state rows that are not finite: steps that met them changed no weight", worker, rows)
            self._write({"kind": "bad_rows", "step": self._state["step"], "worker": worker, "rows": rows})
        if kind == "done" and "memory" in payload:
            self._write({"kind": "memory", "step": self._state["step"], **compare(self._folder.prediction, worker, payload)})
        elif kind == "failed":
            log.error("%s failed: %s: %s", worker, payload["kind"], payload["message"])
        if self._on_report is not None:
            self._on_report(worker, kind, payload)

    def close(self) -> None:
        """Close the sinks."""
        self.queues.close()
        if self._metrics is not None:
            self._metrics.close()

    def _record(self, line: Mapping[str, Any]) -> None:
        self._state["step"] = max(self._state["step"], int(line["step"]))
        if line["kind"] == "train":
            self.trained = max(self.trained, int(line["step"]))
        if line["kind"] == "validation":
            self.validations.append(dict(line))
        if line["kind"] == REJECTED_SEALS:
            self._state["rejected_seals"] += line["rejected"]
            log.warning(
                "%s refused %d packs of hidden states whose bytes were not those that were sealed, packs %s: made again",
                line["worker"], line["rejected"], ", ".join(map(str, line["packs"])),
            )  # fmt: skip
            self._renew()
        self._write(line)

    def _renew(self) -> None:
        """Put down what was counted since the state last changed, for who reads it meanwhile; a full disk costs no run."""
        try:
            self.state(self._state["status"], cause=self._state["cause"])
        except OSError:
            log.warning("%s cannot be written", self._folder.state.name, exc_info=True)

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._metrics is not None:
            self._metrics.write(line)
