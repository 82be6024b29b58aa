"""Checkpoints: a folder that is whole or not there, that says what it belongs to, and that is checked when read.

`step-000123/` holds `weights.safetensors` (fp32 masters), `optimizer.safetensors` (moments, count of good steps) and
`checkpoint.json` (cursor, identity, counters, checksums). It is written under another name, flushed to disk and renamed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.config.drafter_shape import DrafterShape
from slipstream.config.recipe import Recipe
from slipstream.errors import CheckpointError
from slipstream.records import Cursor
from slipstream.trainer.optim import OptimizerState

FORMAT = 1
DESCRIPTION = "checkpoint.json"
WEIGHTS = "weights.safetensors"
OPTIMIZER = "optimizer.safetensors"


@dataclass(frozen=True, slots=True)
class CheckpointIdentity:
    """What a checkpoint must share with the run that reads it. `keys` are the recipe keys that decide the weights."""

    plan_digest: str
    target_fingerprint: str
    drafter_shape: Mapping[str, Any]
    keys: Mapping[str, Any]

    @classmethod
    def of(cls, *, recipe: Recipe, shape: DrafterShape, plan_digest: str, target_fingerprint: str) -> CheckpointIdentity:
        """The identity of a run. Paths, placement, validation and sinks may change between its parts; the rest may not.

        Of placement, the type of the slots counts: rounded states make other weights.
        """
        dumped = recipe.model_dump(mode="json")
        dumped["target"].pop("model")
        dumped["drafter"].pop("warm_start")
        dumped["plan"].pop("allow_lossy_replays")  # a permission: the distance itself is among the keys
        sections = ("target", "plan", "drafter", "objective", "optimizer")
        keys = {f"{section}.{key}": value for section in sections for key, value in dumped[section].items()}
        if recipe.slot_dtype != recipe.target.hidden_dtype:
            keys["placement.slot_dtype"] = recipe.slot_dtype
        return cls(
            plan_digest=plan_digest,
            target_fingerprint=target_fingerprint,
            drafter_shape=json.loads(json.dumps(asdict(shape))),
            keys=keys,
        )

    @property
    def recipe_digest(self) -> str:
        """Digest of the keys."""
        return hashlib.sha256(json.dumps(dict(self.keys), sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint as read back, or as handed to the writer."""

    cursor: Cursor
    state: OptimizerState
    counters: Mapping[str, int]
    acceptance_length: float | None


def checkpoint_name(step: int) -> str:
    """Name of the folder of `step` finished updates."""
    return f"step-{step:06d}"


def complete_checkpoints(folder: Path) -> list[Path]:
    """Checkpoint folders, oldest first. Half-written ones have another name and are not among them."""
    found = [path for path in folder.glob("step-*") if path.name[5:].isdigit() and (path / DESCRIPTION).is_file()]
    return sorted(found, key=lambda path: int(path.name[5:]))


def latest(folder: Path) -> Path | None:
    """The newest checkpoint in a folder of checkpoints, or none."""
    found = complete_checkpoints(folder)
    return found[-1] if found else None


def best(folder: Path) -> Path | None:
    """The checkpoint with the longest acceptance length in validation, of equal ones the newest; none if none was validated.

    A checkpoint is validated if the run validated at its step.
    """
    measured = [(length, path) for path in complete_checkpoints(folder) if (length := validated_length(path)) is not None]
    return max(reversed(measured), key=lambda entry: entry[0])[1] if measured else None


def write_checkpoint(
    checkpoint: Checkpoint, *, folder: Path, identity: CheckpointIdentity, versions: Mapping[str, str]
) -> Path:
    """Write `folder/step-…` so that after any interruption it is either whole or not there. Returns its path.

    Raises `CheckpointError` when the disk refuses.
    """
    final = folder / checkpoint_name(checkpoint.cursor.step)
    temporary = folder / f".{final.name}.writing"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        _write_files(checkpoint, temporary=temporary, identity=identity, versions=versions)
        _put_in_place(temporary, final)
    except OSError as error:
        raise CheckpointError(key=str(final), value="a checkpoint", rule=f"could not be written: {error}") from error
    return final


def keep_checkpoints(folder: Path, *, keep: int) -> None:
    """Remove all but the `keep` newest checkpoints and the one with the best acceptance length."""
    found = complete_checkpoints(folder)
    kept = {*found[-keep:], best(folder)}
    for path in found:
        if path not in kept:
            (path / DESCRIPTION).unlink()  # first: without it the rest is no checkpoint, whatever interrupts
            shutil.rmtree(path)


def read_checkpoint(path: Path, *, identity: CheckpointIdentity) -> Checkpoint:
    """Read and check a checkpoint. Raises `CheckpointError`: missing, damaged, truncated, or of another run (which keys)."""
    description = _read_description(path)
    _check_identity(path, description["identity"], identity)
    weights = _read_tensors(path, WEIGHTS, description)
    optimizer = _read_tensors(path, OPTIMIZER, description)
    parts: dict[str, dict[str, Tensor]] = {"exp_avg": {}, "exp_avg_sq": {}}
    good_steps = optimizer.pop("good_steps")
    for name, tensor in optimizer.items():
        part, _, parameter = name.partition("/")
        parts[part][parameter] = tensor
    state = OptimizerState(master=weights, exp_avg=parts["exp_avg"], exp_avg_sq=parts["exp_avg_sq"], good_steps=good_steps)
    return Checkpoint(
        cursor=Cursor(**description["cursor"]),
        state=state,
        counters=description["counters"],
        acceptance_length=description["acceptance_length"],
    )


def read_cursor(path: Path) -> Cursor:
    """Where a checkpoint stands, from its description alone. Raises `CheckpointError`; the rest is not checked yet."""
    return Cursor(**_read_description(path)["cursor"])


def read_drafter_state(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The drafter in a checkpoint: its shape (the fields of `DrafterShape`) and its fp32 weights by name, checked."""
    description = _read_description(path)
    return description["identity"]["drafter_shape"], _read_tensors(path, WEIGHTS, description)


def _write_files(checkpoint: Checkpoint, *, temporary: Path, identity: CheckpointIdentity, versions: Mapping[str, str]) -> None:
    state = checkpoint.state
    moments = {f"exp_avg/{name}": tensor for name, tensor in state.exp_avg.items()}
    moments |= {f"exp_avg_sq/{name}": tensor for name, tensor in state.exp_avg_sq.items()}
    save_file(state.master, temporary / WEIGHTS)
    save_file(moments | {"good_steps": state.good_steps}, temporary / OPTIMIZER)
    description = {
        "format": FORMAT,
        "cursor": asdict(checkpoint.cursor),
        "identity": asdict(identity) | {"recipe_digest": identity.recipe_digest},
        "counters": dict(checkpoint.counters),
        "acceptance_length": checkpoint.acceptance_length,
        "versions": dict(versions),
        "files": {name: _fingerprint(temporary / name) for name in (WEIGHTS, OPTIMIZER)},
    }
    (temporary / DESCRIPTION).write_text(json.dumps(description, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    for name in (WEIGHTS, OPTIMIZER):
        shutil.copymode(temporary / DESCRIPTION, temporary / name)  # safetensors gives files to their owner alone
    for name in (WEIGHTS, OPTIMIZER, DESCRIPTION, "."):
        _flush(temporary / name)


def _put_in_place(temporary: Path, final: Path) -> None:
    """Rename. A folder in the way is of the same step of this run, from before a resume: it makes room first."""
    replaced = final.with_name(f".{final.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if final.exists():
        os.replace(final, replaced)
    os.replace(temporary, final)
    _flush(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def validated_length(path: Path) -> float | None:
    """What validation measured with a checkpoint's weights; none where there was none at its step, or it is damaged."""
    try:
        value = _read_description(path)["acceptance_length"]
    except CheckpointError:
        return None  # a damaged one is no candidate for the best; it leaves with the old ones
    return None if value is None else float(value)


def _read_description(path: Path) -> dict[str, Any]:
    file = path / DESCRIPTION
    try:
        description = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(key=str(path), value="no checkpoint", rule=f"has no {DESCRIPTION}") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(key=str(file), value="damaged", rule=f"cannot be read: {error}", hint=_OTHER) from error
    if not isinstance(description, dict) or description.get("format") != FORMAT:
        found = description.get("format") if isinstance(description, dict) else None
        raise CheckpointError(key=str(file), value=f"format {found}", rule=f"this version reads format {FORMAT}")
    return description


_OTHER = "move the folder away to go on from the checkpoint before it"


def _read_tensors(path: Path, name: str, description: Mapping[str, Any]) -> dict[str, Tensor]:
    file, expected = path / name, description["files"][name]
    if not file.is_file():
        raise CheckpointError(key=str(file), value="missing", rule="belongs to the checkpoint", hint=_OTHER)
    size = file.stat().st_size
    if size != expected["bytes"]:
        what = "truncated" if size < expected["bytes"] else "longer than written"
        raise CheckpointError(
            key=str(file), value=f"{size} bytes", rule=f"{what}: {expected['bytes']} were written", hint=_OTHER
        )
    found = _fingerprint(file)["sha256"]
    if found != expected["sha256"]:
        raise CheckpointError(
            key=str(file), value=f"sha256 {found[:12]}", rule=f"damaged: {expected['sha256'][:12]} was written", hint=_OTHER
        )
    try:
        return load_file(file)
    except SafetensorError as error:
        raise CheckpointError(key=str(file), value="damaged", rule=f"cannot be read: {error}", hint=_OTHER) from error


def _check_identity(path: Path, found: Mapping[str, Any], ours: CheckpointIdentity) -> None:
    differing = [key for key in {**found["keys"], **ours.keys} if found["keys"].get(key) != ours.keys.get(key)]
    shown = ", ".join(f"{key} {found['keys'].get(key)} there, {ours.keys.get(key)} here" for key in sorted(differing))
    if differing:
        raise CheckpointError(key=str(path), value="a checkpoint of another recipe", rule=f"differs in {shown}")
    if found["target_fingerprint"] != ours.target_fingerprint:
        raise CheckpointError(
            key=str(path),
            value=f"target {found['target_fingerprint'][:12]}",
            rule=f"target.model is another model now: {ours.target_fingerprint[:12]}",
        )
    shape, our_shape = found["drafter_shape"], dict(ours.drafter_shape)
    if shape != our_shape:
        names = ", ".join(
            f"{name} {shape.get(name)} there, {our_shape.get(name)} here"
            for name in sorted({**shape, **our_shape})
            if shape.get(name) != our_shape.get(name)
        )
        raise CheckpointError(key=str(path), value="a drafter of another shape", rule=f"differs in {names}")
    if found["plan_digest"] != ours.plan_digest:
        raise CheckpointError(
            key=str(path),
            value=f"plan {found['plan_digest'][:12]}",
            rule=f"the plan is {ours.plan_digest[:12]} with the same keys: the corpus is another one",
        )
