"""What `--resume` asks of a run: the same recipe where it decides the weights, and something left to do. Torch-free."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

from slipstream.config import Recipe, make_recipe
from slipstream.errors import CheckpointError
from slipstream.runfolder import RunFolder

DECIDING = ("target", "corpus", "plan", "drafter", "objective", "optimizer")
"""Sections that decide the weights. Placement, validation, checkpoints and observation may change between two starts."""

ALSO_DECIDING = ("placement.slot_dtype",)
"""Rounded hidden states make other weights."""

PERMISSIONS = ("plan.allow_lossy_replays",)
"""Decide nothing by themselves."""

PATHS = ("target.model", "corpus.path")
"""May name another place, not other content: the plan's digest and the checkpoint's target fingerprint tell."""


def check_same_recipe(*, recipe: Recipe, saved: Path) -> None:
    """Refuse to resume with another value of a key that the weights depend on. Raises `CheckpointError` naming it."""
    before = make_recipe(tomllib.loads(saved.read_text())).model_dump()
    now = recipe.model_dump()
    deciding = [f"{section}.{key}" for section in DECIDING for key in now[section]] + list(ALSO_DECIDING)
    for name in deciding:
        section, _, key = name.partition(".")
        if now[section][key] != before[section][key] and name not in (*PATHS, *PERMISSIONS):
            raise CheckpointError(
                key=name,
                value=now[section][key],
                rule=f"the run to resume was started with {before[section][key]}",
                hint=f"resume with the run's own recipe, start a run of another name, or remove {saved.parent}",
            )


def finished_steps(folder: RunFolder) -> int | None:
    """The steps of a run that has come to its end; none while something is left to do."""
    try:
        state = json.loads(folder.state.read_text())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise CheckpointError(
            key="resume", value=str(folder.state), rule=f"is damaged: {error}", hint="remove it; checkpoints are not in it"
        ) from error
    return int(state["steps"]) if state.get("status") == "finished" else None
