"""What a sink of metrics is told of its run when it starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What sinks are told at the start: the run's name, its planned steps, where files go, steps between console lines.

    `folder` is the run's; `recipe` the resolved one; `project` and `wandb_mode` are the recipe's keys of those names.
    """

    name: str
    num_steps: int
    metrics_path: Path
    console_every_steps: int
    folder: Path
    recipe: Mapping[str, Any]
    project: str = "slipstream"
    wandb_mode: Literal["online", "offline"] = "online"
