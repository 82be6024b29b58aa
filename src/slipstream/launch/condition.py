"""How a run is, from the end of its files: state, step, rate, time left, health. Reads little: many runs are listed at once."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slipstream.launch.handle import RunHandle, read_handle
from slipstream.runfolder import RunFolder

TAIL_BYTES = 1 << 18
RATE_STEPS = 20
SILENT_STEPS = 20.0
"""A run that has not ended a step for so many steps' time, and for `SILENT_SECONDS`, is called silent."""
SILENT_SECONDS = 120.0
UNDER_WAY = ("starting", "training")


@dataclass(frozen=True, slots=True)
class Condition:
    """One run as it is now. `state` is state.json's, or "lost" when its process is gone without having said why.

    `seconds_left` None while nothing is known; `health` one sentence, "well" when nothing is wrong; times in Unix seconds.
    """

    name: str
    folder: str
    state: str
    step: int
    steps: int | None
    context_tokens_per_second: float | None
    seconds_per_step: float | None
    seconds_left: float | None
    loss: float | None
    acceptance_length: float | None
    validated: float | None
    skipped: int
    restarts: int
    rejected_seals: int
    detached: bool
    pid: int | None
    updated: float | None
    health: str

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def condition_of(folder: RunFolder) -> Condition:
    """Read it. A file that is missing or half written leaves its figures None."""
    state, handle = _state(folder), read_handle(folder)
    lines = _tail(folder.metrics)
    train = [line for line in lines if line.get("kind") == "train"]
    validations = [line for line in lines if line.get("kind") == "validation"]
    last = train[-1] if train else {}
    recent = [line["seconds"] for line in train[-RATE_STEPS:] if line.get("seconds")]
    seconds = sum(recent) / len(recent) if recent else None
    # state.json is written when the state changes: between that, the newest step is the metrics'.
    step, steps = max([int(state.get("step") or 0), *(int(line["step"]) for line in train[-1:])]), state.get("steps")
    status = _status(state, handle)
    under_way = status in UNDER_WAY
    updated = folder.metrics.stat().st_mtime if folder.metrics.is_file() else None
    return Condition(
        name=folder.root.name,
        folder=str(folder.root),
        state=status,
        step=step + 1 if train and under_way else step,
        steps=steps,
        context_tokens_per_second=_rate(train[-RATE_STEPS:]),
        seconds_per_step=seconds,
        seconds_left=seconds * (steps - step - 1) if seconds and steps and under_way else None,
        loss=last.get("loss"),
        acceptance_length=last.get("acceptance_length"),
        validated=validations[-1].get("acceptance_length") if validations else None,
        skipped=int(last.get("total_skipped_steps", 0)),
        restarts=int(state.get("restarts", 0)),
        rejected_seals=int(state.get("rejected_seals", 0)),
        detached=handle is not None and handle.detached,
        pid=handle.pid if handle is not None and handle.is_alive else None,
        updated=updated,
        health=_health(status=status, state=state, train=train, seconds=seconds, updated=updated),
    )


def _status(state: dict[str, Any], handle: RunHandle | None) -> str:
    status = str(state.get("status", "starting"))
    if status in UNDER_WAY and handle is not None and handle.is_here and not handle.is_alive:
        return "lost"
    return status


def _health(
    *, status: str, state: dict[str, Any], train: list[dict[str, Any]], seconds: float | None, updated: float | None
) -> str:
    if status == "lost":
        return "its process is gone without a word; go on with train --resume"
    if status in ("failed", "interrupted"):
        cause = str(state.get("cause") or "").strip().splitlines()
        return cause[0] if cause else status
    said = []
    if status == "training" and seconds and updated is not None:
        silent = time.time() - updated
        if silent > max(SILENT_SECONDS, SILENT_STEPS * seconds):
            said.append(f"no step for {silent:.0f} s")
    skipped = sum(bool(line.get("skipped")) for line in train[-RATE_STEPS:])
    if skipped:
        said.append(f"{skipped} of the last {min(len(train), RATE_STEPS)} steps were skipped: not finite")
    if state.get("restarts"):
        said.append(f"target workers restarted {state['restarts']} times")
    if state.get("rejected_seals"):
        said.append(f"{state['rejected_seals']} packs of hidden states came damaged and were made again")
    return "; ".join(said) or "well"


def _rate(train: list[dict[str, Any]]) -> float | None:
    seconds = sum(line.get("seconds") or 0.0 for line in train)
    return sum(line.get("context_tokens", 0) for line in train) / seconds if seconds else None


def _state(folder: RunFolder) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(folder.state.read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return found


def _tail(path: Path) -> list[dict[str, Any]]:
    """Whole JSON lines at the end of a file."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        start = max(0, path.stat().st_size - TAIL_BYTES)
        file.seek(start)
        text = file.read().decode(errors="replace")
    lines = text.split("\n")[1 if start else 0 :]
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found
