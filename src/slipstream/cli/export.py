"""`slipstream export`: a checkpoint as a folder that SGLang, vLLM and the `dflash` package load."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal, cast

import typer

from slipstream.errors import UsageError


def export(
    source: Annotated[Path, typer.Argument(metavar="CKPT_OR_RUN", help="Checkpoint folder, or run folder (newest one).")],
    out: Annotated[Path, typer.Option("--out", help="Folder to write; it appears only once it was read back.")],
    target: Annotated[
        str | None, typer.Option("--target", help="Target model; taken from the run's recipe if left out.")
    ] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="Type of the stored weights: bfloat16 or float32.")] = "bfloat16",
    force: Annotated[bool, typer.Option("--force", help="Replace another exported drafter at --out.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was written as JSON.")] = False,
) -> None:
    """Export a drafter for serving.

    The folder is loaded by the `dflash` package and must compute the same logits before it gets its name.
    """
    if dtype not in ("bfloat16", "float32"):
        raise UsageError(key="--dtype", value=dtype, rule="must be bfloat16 or float32")
    from slipstream.cli.drafter_source import read_drafter
    from slipstream.config import read_target_info
    from slipstream.export.dflash_format import export_dflash
    from slipstream.export.verify import Verified, verify_export
    from slipstream.target.ends import load_frozen_ends

    found = read_drafter(source)
    model = target or found.target
    if model is None:
        raise UsageError(key="--target", value=None, rule="is required: this folder does not say which target it belongs to")
    info = read_target_info(model)
    found.check_target(info)
    ends = load_frozen_ends(info=info, dtype="float32")
    verified: list[Verified] = []
    folder = export_dflash(
        drafter_state=found.state,
        shape=found.shape,
        info=info,
        out=out,
        verify=lambda part: verified.append(verify_export(part, embedding_VD=ends.embedding_VD, head_VD=ends.head_VD)),
        dtype=cast(Literal["bfloat16", "float32"], dtype),
        target_name=model,
        force=force,
    )
    result = {"folder": str(folder), "source": found.described, "target": model, "dtype": dtype, **asdict(verified[0])}
    if as_json:
        typer.echo(json.dumps(result))
    else:
        typer.echo(f"{found.described} → {folder} ({dtype}, {found.shape.num_parameters:,} weights)")
        typer.echo(
            f"read back by the dflash package: {verified[0].slots} slots draft the same token, logits apart by at most "
            f"{verified[0].largest_difference:.1e} of the largest"
        )
