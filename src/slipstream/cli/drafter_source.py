"""Where `evaluate` and `export` find a drafter: an exported folder, a checkpoint of a run, or a run, of which one is taken."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from slipstream.config import DrafterShape, TargetInfo


@dataclass(frozen=True, slots=True)
class DrafterSource:
    """A drafter's shape and tensors. `described` says what was read, and `chosen` why that one where a run has several.

    `target` is the model of the run it came from, if it came from one, and `target_fingerprint` that target's.
    """

    shape: DrafterShape
    state: Mapping[str, Tensor]
    described: str
    target: str | None
    target_fingerprint: str | None
    chosen: str | None = None

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


CheckpointOption = Annotated[
    str | None,
    typer.Option(
        "--checkpoint",
        metavar="best|newest|STEP",
        help="Which checkpoint of a run: that of the longest acceptance length in validation, the newest, or a step's.",
        show_default="best; the newest where none was validated",
    ),
]
"""The option of the commands that take a run for a drafter."""


def read_drafter(path: Path, *, checkpoint: str | None = None) -> DrafterSource:
    """Read a drafter, whatever kind of folder it is in; of a run, `checkpoint` ("best", "newest" or a step) says which one.

    Raises `UsageError` when it is none of the three, or has no such checkpoint.
    """
    from slipstream.export.dflash_format import is_export, read_dflash
    from slipstream.runfolder import RunFolder
    from slipstream.trainer.checkpoint import DESCRIPTION

    checkpoints = RunFolder(path).checkpoints
    is_run = not is_export(path) and not (path / DESCRIPTION).is_file() and checkpoints.is_dir()
    if checkpoint is not None and not is_run:
        raise UsageError(key="--checkpoint", value=checkpoint, rule=f"is of a run folder, which {path} is not")
    if is_export(path):
        shape, state = read_dflash(path)
        return DrafterSource(shape=shape, state=state, described=f"export {path}", target=None, target_fingerprint=None)
    if (path / DESCRIPTION).is_file():
        return _of_checkpoint(path)
    if is_run:
        taken, why = choose_checkpoint(checkpoints, asked=checkpoint)
        return replace(_of_checkpoint(taken), chosen=why)
    raise UsageError(
        key="CKPT",
        value=str(path),
        rule="is neither an exported drafter nor a checkpoint nor a run",
        hint="config.json and model.safetensors, checkpoint.json, or checkpoints/ must be in it",
    )


def choose_checkpoint(checkpoints: Path, *, asked: str | None) -> tuple[Path, str]:
    """The checkpoint of a run that was asked for (`read_drafter`), and why it is the one, in words.

    Raises `CheckpointError` where there is none, `UsageError` where there is not that one.
    """
    from slipstream.trainer.checkpoint import best, complete_checkpoints, validated_length

    found = complete_checkpoints(checkpoints)
    if not found:
        raise CheckpointError(key="CKPT", value=str(checkpoints.parent), rule="is a run without a checkpoint yet")
    steps = {_step(path): path for path in found}
    newest, top = found[-1], best(checkpoints)
    others = [] if len(found) == 1 else [f"--checkpoint takes another: {', '.join(map(_told, reversed(found)))}"]
    if asked in (None, "best") and top is not None:
        words = f"the best in validation, acceptance length {validated_length(top):.3f}"
        return top, "; ".join([words + (", and the newest" if top == newest else ""), *others])
    if asked == "best":
        rule = "no checkpoint of this run was validated"
        raise UsageError(key="--checkpoint", value=asked, rule=rule, hint="newest, or a step")
    if asked in (None, "newest"):
        return newest, "; ".join(["the newest" + (", since none was validated" if asked is None else ""), *others])
    if not asked.isdigit() or int(asked) not in steps:
        rule = "must be best, newest, or the step of a checkpoint that the run has kept"
        raise UsageError(key="--checkpoint", value=asked, rule=rule, hint=f"steps {', '.join(map(str, steps))}")
    return steps[int(asked)], "as asked"


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _told(path: Path) -> str:
    from slipstream.trainer.checkpoint import validated_length

    length = validated_length(path)
    return f"step {_step(path)} ({'not validated' if length is None else f'{length:.3f}'})"


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
