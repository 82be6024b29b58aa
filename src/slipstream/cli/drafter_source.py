"""Where `evaluate` and `export` find a drafter: an exported folder, a checkpoint of a run, or a run (its newest checkpoint)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from slipstream.config import DrafterShape, TargetInfo


@dataclass(frozen=True, slots=True)
class DrafterSource:
    """A drafter's shape and tensors. `described` says what was read; `target` is the model of the run it came from, if it
    came from one, and `target_fingerprint` that target's."""

    shape: DrafterShape
    state: Mapping[str, Tensor]
    described: str
    target: str | None
    target_fingerprint: str | None

    def check_target(self, info: TargetInfo) -> None:
        """Raise `CheckpointError` when the drafter was trained for another target than `info`."""
        from slipstream.target.fingerprint import fingerprint_target

        for key, ours, theirs in (
            ("hidden_size", self.shape.hidden_size, info.hidden_size),
            ("vocab_size", self.shape.vocab_size, info.vocab_size),
            ("num_target_layers", self.shape.num_target_layers, info.num_layers),
        ):
            if ours != theirs:
                rule = f"the drafter was made for another target: {info.folder} has {theirs}"
                raise CheckpointError(key=key, value=ours, rule=rule)
        known = (None, *(fingerprint_target(info, dtype=dtype) for dtype in ("bfloat16", "float8")))
        if self.target_fingerprint not in known:
            rule = "has other weights than the target that the checkpoint was trained on"
            raise CheckpointError(key="--target", value=str(info.folder), rule=rule)


def read_drafter(path: Path) -> DrafterSource:
    """Read a drafter, whatever kind of folder it is in. Raises `UsageError` when it is none of the three."""
    from slipstream.export.dflash_format import is_export, read_dflash
    from slipstream.runfolder import RunFolder
    from slipstream.trainer.checkpoint import DESCRIPTION, latest

    if is_export(path):
        shape, state = read_dflash(path)
        return DrafterSource(shape=shape, state=state, described=f"export {path}", target=None, target_fingerprint=None)
    if (path / DESCRIPTION).is_file():
        return _of_checkpoint(path)
    checkpoints = RunFolder(path).checkpoints
    if checkpoints.is_dir():
        newest = latest(checkpoints)
        if newest is None:
            raise CheckpointError(key="CKPT", value=str(path), rule="is a run without a checkpoint yet")
        return _of_checkpoint(newest)
    raise UsageError(
        key="CKPT",
        value=str(path),
        rule="is neither an exported drafter nor a checkpoint nor a run",
        hint="config.json and model.safetensors, checkpoint.json, or checkpoints/ must be in it",
    )


def _of_checkpoint(path: Path) -> DrafterSource:
    from slipstream.config import load_recipe
    from slipstream.runfolder import RunFolder
    from slipstream.trainer.checkpoint import DESCRIPTION, read_drafter_state

    fields, state = read_drafter_state(path)
    identity = json.loads((path / DESCRIPTION).read_text())["identity"]
    if identity["keys"].get("target.weights") == "random":
        raise CheckpointError(
            key="target.weights",
            value="random",
            rule=f"{path} was trained on made-up hidden states: it rehearsed a placement and drafts nothing",
        )
    recipe = RunFolder(path.resolve().parent.parent).recipe
    return DrafterSource(
        shape=_shape(fields),
        state=state,
        described=f"checkpoint {path}",
        target=load_recipe(recipe).target.model if recipe.is_file() else None,
        target_fingerprint=identity["target_fingerprint"],
    )


def _shape(fields: Mapping[str, Any]) -> DrafterShape:
    from slipstream.config import DrafterShape

    # JSON has no tuples.
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
    return DrafterShape(**values)
