"""The paths of a run, nothing else. A run folder explains itself: whoever finds it can tell what was run and how."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Names of what lies in a run folder. Makes nothing by itself except in `create`."""

    root: Path

    @property
    def recipe_given(self) -> Path:
        """The recipe file as the user gave it."""
        return self.root / "recipe.given.toml"

    @property
    def recipe(self) -> Path:
        """The resolved recipe: every key, defaults and overrides included."""
        return self.root / "recipe.toml"

    @property
    def environment(self) -> Path:
        """Versions, code, machine and command of each start, one JSON line a start."""
        return self.root / "environment.jsonl"

    @property
    def state(self) -> Path:
        """JSON: `status` (starting, training, finished, interrupted, failed), step, steps, cause."""
        return self.root / "state.json"

    @property
    def schedule(self) -> Path:
        """Folder of the planned schedule and its digest."""
        return self.root / "schedule"

    @property
    def validation(self) -> Path:
        """Folder of the validation answers and their packs."""
        return self.root / "validation"

    @property
    def checkpoints(self) -> Path:
        """Folder of checkpoints, one folder each, named by step."""
        return self.root / "checkpoints"

    @property
    def metrics(self) -> Path:
        """JSON lines: one record a training step, one a validation, each with its step."""
        return self.root / "metrics.jsonl"

    @property
    def accounts(self) -> Path:
        """Folder of the accounts of time, one JSON-lines file a worker."""
        return self.root / "accounts"

    @property
    def spans(self) -> Path:
        """Folder of the stretches of time that the accounts are made of, one JSON-lines file a worker."""
        return self.root / "spans"

    @property
    def queues(self) -> Path:
        """JSON lines: packs and bytes that wait between target and drafter, by drafter rank, about once a second."""
        return self.root / "queues.jsonl"

    @property
    def gpus(self) -> Path:
        """JSON lines: what NVML says of each GPU of the run, about once a second."""
        return self.root / "gpus.jsonl"

    @property
    def prediction(self) -> Path:
        """JSON: memory, stage costs and throughput as predicted before the start."""
        return self.root / "prediction.json"

    @property
    def process(self) -> Path:
        """JSON: `pid`, start time, host and command of the process that supervises the run, and whether it is detached."""
        return self.root / "process.json"

    @property
    def logs(self) -> Path:
        """Folder of log files, one a worker."""
        return self.root / "logs"

    @property
    def exports(self) -> Path:
        """Folder of exported drafters."""
        return self.root / "exports"

    def create(self) -> None:
        """Make the folder and those inside it that workers write to."""
        for folder in (self.root, self.checkpoints, self.accounts, self.spans, self.logs):
            folder.mkdir(parents=True, exist_ok=True)
