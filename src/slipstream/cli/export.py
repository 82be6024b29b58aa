"""`slipstream export`: a checkpoint as a folder that SGLang, vLLM and the `dflash` package load."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from slipstream.cli.drafter_source import CheckpointOption, read_drafter
from slipstream.errors import UsageError

if TYPE_CHECKING:
    from slipstream.cli.drafter_source import DrafterSource
    from slipstream.cli.progress import Bars
    from slipstream.export.dflash_format import ExportDtype


def export(
    source: Annotated[Path, typer.Argument(metavar="CKPT_OR_RUN", help="Checkpoint folder, or run folder (its best one).")],
    out: Annotated[Path, typer.Option("--out", help="Folder to write; it appears only once it was read back.")],
    target: Annotated[
        str | None, typer.Option("--target", help="Target model; taken from the run's recipe if left out.")
    ] = None,
    checkpoint: CheckpointOption = None,
    dtype: Annotated[str, typer.Option("--dtype", help="Type of the stored weights: bfloat16 or float32.")] = "bfloat16",
    force: Annotated[bool, typer.Option("--force", help="Replace another exported drafter at --out.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was written as JSON.")] = False,
) -> None:
    """Export a drafter for serving.

    The folder is loaded by the `dflash` package and must compute the same logits before it gets its name.
    """
    if dtype not in ("bfloat16", "float32"):
        raise UsageError(key="--dtype", value=dtype, rule="must be bfloat16 or float32")
    from slipstream.cli.progress import Bars

    with Bars(quiet=as_json) as bars:
        bars("export", 0, 4, "reads the drafter")
        found = read_drafter(source, checkpoint=checkpoint)
        result = _export(found, out=out, target=target, dtype=cast("ExportDtype", dtype), force=force, bars=bars)
    if as_json:
        typer.echo(json.dumps(result))
    else:
        typer.echo(f"{result['source']} → {result['folder']} ({dtype}, {result['weights']:,} weights)")
        if result["chosen"] is not None:
            typer.echo(f"taken of the run: {result['chosen']}")
        typer.echo(
            f"read back by the dflash package: {result['slots']} slots draft the same token, logits apart by at most "
            f"{result['largest_difference']:.1e} of the largest"
        )


def _export(
    found: DrafterSource, *, out: Path, target: str | None, dtype: ExportDtype, force: bool, bars: Bars
) -> dict[str, Any]:
    """Export, and say what was written; the stages are short ones, but of large files."""
    from slipstream.config import read_target_info
    from slipstream.export.dflash_format import export_dflash
    from slipstream.export.verify import Verified, verify_export
    from slipstream.target.ends import load_frozen_ends

    model = target or found.target
    if model is None:
        raise UsageError(key="--target", value=None, rule="is required: this folder does not say which target it belongs to")
    info = read_target_info(model)
    found.check_target(info)
    bars("export", 1, 4, "reads embedding and head of the target")
    ends = load_frozen_ends(info=info, dtype="float32")
    verified: list[Verified] = []

    def verify(part: Path) -> None:
        bars("export", 3, 4, "is read back by the dflash package")
        verified.append(verify_export(part, embedding_VD=ends.embedding_VD, head_VD=ends.head_VD))

    bars("export", 2, 4, "writes")
    folder = export_dflash(
        drafter_state=found.state,
        shape=found.shape,
        info=info,
        out=out,
        verify=verify,
        dtype=dtype,
        target_name=model,
        force=force,
    )
    bars("export", 4, 4, "done")
    written = {"folder": str(folder), "source": found.described, "chosen": found.chosen, "target": model, "dtype": dtype}
    return {**written, **asdict(verified[0]), "weights": found.shape.num_parameters}
