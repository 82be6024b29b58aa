"""A schedule in a folder: one `.npy` file an array, and `schedule.json` with checksums and the digest."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from slipstream.config.recipe import PlanSection
from slipstream.errors import PlanError
from slipstream.plan.figures import PlanSummary
from slipstream.plan.schedule import Schedule, ScheduleArrays, array_checksum, schedule_digest

FORMAT = 1
"""Version of the folder; a schedule of another one is refused."""

_INDEX = "schedule.json"
_MIXING = "mixing"


def save_schedule(*, schedule: Schedule, folder: Path) -> None:
    """Write a schedule. `schedule.json` is replaced last, in one move: a folder without it is not a schedule."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _INDEX).unlink(missing_ok=True)
    arrays = {**schedule.arrays.named(), _MIXING: schedule.mixing}
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array, allow_pickle=False)
    content = {
        "format": FORMAT,
        "digest": schedule.digest,
        "fingerprint": schedule.fingerprint,
        "block_size": schedule.block_size,
        "plan": schedule.plan.model_dump(mode="json"),
        "summary": asdict(schedule.figures),
        "checksums": {name: array_checksum(array) for name, array in arrays.items()},
    }
    partial = folder / f"{_INDEX}.partial"
    partial.write_text(json.dumps(content, indent=1))
    os.replace(partial, folder / _INDEX)


def load_schedule(folder: Path) -> Schedule:
    """Read and verify a schedule. Raises `PlanError` naming the file that is missing, truncated or damaged."""
    content = _read_index(folder / _INDEX)
    try:
        if content["format"] != FORMAT:
            raise PlanError(key=str(folder / _INDEX), value=content["format"], rule=f"only format {FORMAT} is read")
        checksums: dict[str, str] = content["checksums"]
        names = [field.name for field in fields(ScheduleArrays)]
        arrays = {name: _read_array(folder / f"{name}.npy", checksum=checksums[name]) for name in [*names, _MIXING]}
        plan = PlanSection.model_validate(content["plan"])
        digest = schedule_digest(
            plan=plan,
            block_size=content["block_size"],
            fingerprint=content["fingerprint"],
            checksums={name: checksums[name] for name in names},
        )
        if digest != content["digest"]:
            raise PlanError(key=str(folder / _INDEX), value=digest, rule=f"damaged: the digest says {content['digest']}")
        return Schedule(
            plan=plan,
            block_size=content["block_size"],
            fingerprint=content["fingerprint"],
            mixing=arrays.pop(_MIXING),
            arrays=ScheduleArrays(**arrays),
            figures=PlanSummary(**content["summary"]),
        )
    except (KeyError, TypeError, ValidationError) as error:
        raise PlanError(key=str(folder / _INDEX), value=str(error), rule="damaged: lacks what a schedule holds") from error


def _read_index(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
    except FileNotFoundError as error:
        raise PlanError(key=str(file), value="missing", rule="a schedule folder is completed by this file") from error
    except (OSError, ValueError) as error:
        raise PlanError(key=str(file), value=str(error), rule="damaged: cannot be read as JSON") from error
    if not isinstance(content, dict):
        raise PlanError(key=str(file), value=type(content).__name__, rule="damaged: is not an object")
    return content


def _read_array(file: Path, *, checksum: str) -> npt.NDArray[Any]:
    try:
        array: npt.NDArray[Any] = np.load(file, allow_pickle=False)
    except FileNotFoundError as error:
        raise PlanError(key=str(file), value="missing", rule="is part of the schedule") from error
    except (OSError, ValueError, EOFError) as error:
        raise PlanError(key=str(file), value=str(error), rule="truncated or damaged: cannot be read as an array") from error
    found = array_checksum(array)
    if found != checksum:
        raise PlanError(key=str(file), value=found, rule=f"damaged: the checksum should be {checksum}")
    return array
