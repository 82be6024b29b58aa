"""The portable folder of a drafter: written beside its place, read back, and only then named.

`config.json`, `model.safetensors` and a short `README.md`; the layout is checked by `layout`, the computation by `verify`.
"""

from __future__ import annotations

import filecmp
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from slipstream.config import DrafterShape, TargetInfo
from slipstream.errors import ExportError
from slipstream.export.layout import check_config, check_state, make_config, shape_from_config

CONFIG, WEIGHTS, README = "config.json", "model.safetensors", "README.md"
ExportDtype = Literal["bfloat16", "float32"]


def export_dflash(
    *,
    drafter_state: Mapping[str, Tensor],
    shape: DrafterShape,
    info: TargetInfo,
    out: Path,
    verify: Callable[[Path], None],
    dtype: ExportDtype = "bfloat16",
    target_name: str | None = None,
    force: bool = False,
) -> Path:
    """Write a drafter to the folder `out` and return it; `verify(folder)` sees the folder before it has its name.

    The tensors are rounded to `dtype`. Writing what is there already changes nothing; another drafter there is refused,
    and replaced with `force`. Raises `ExportError`, also what `verify` raises; nothing of the attempt is left then.
    """
    _check_fits(shape=shape, info=info)
    out = out.absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    try:
        _write(part, state=drafter_state, shape=shape, info=info, dtype=dtype, target=target_name or str(info.folder))
        read_dflash(part)
        verify(part)
        _name(part, out=out, force=force)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return out


def read_dflash(folder: Path) -> tuple[DrafterShape, dict[str, Tensor]]:
    """Shape and tensors (CPU, as stored) of an exported drafter, checked in full. Raises `ExportError` naming the key."""
    shape = shape_from_config(read_config(folder))
    state = _read_weights(folder / WEIGHTS)
    check_state(state, shape=shape)
    return shape, state


def read_config(folder: Path) -> dict[str, Any]:
    """The `config.json` of a folder. Raises `ExportError` when there is none, or it is no JSON table."""
    file = folder / CONFIG
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ExportError(key=CONFIG, value=str(file), rule=f"cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ExportError(key=CONFIG, value=str(file), rule="is not a JSON table")
    return config


def is_export(folder: Path) -> bool:
    """Whether a folder looks like an exported drafter, as against a run or a checkpoint."""
    return (folder / CONFIG).is_file() and (folder / WEIGHTS).is_file()


def _check_fits(*, shape: DrafterShape, info: TargetInfo) -> None:
    pairs = (
        ("hidden_size", shape.hidden_size, info.hidden_size),
        ("vocab_size", shape.vocab_size, info.vocab_size),
        ("num_target_layers", shape.num_target_layers, info.num_layers),
    )
    for key, ours, theirs in pairs:
        if ours != theirs:
            raise ExportError(key=key, value=ours, rule=f"must be the target's, {theirs}: servers lend its embedding and head")
    if shape.max_position_embeddings < info.max_position_embeddings:
        rule = f"must be at least the target's, {info.max_position_embeddings}, or the rotation table is too short"
        raise ExportError(key="max_position_embeddings", value=shape.max_position_embeddings, rule=rule)


def _write(
    folder: Path, *, state: Mapping[str, Tensor], shape: DrafterShape, info: TargetInfo, dtype: ExportDtype, target: str
) -> None:
    wanted: torch.dtype = getattr(torch, dtype)
    # Copied even where nothing changes: a trainer's tensors may be views of one flat buffer, which safetensors would refuse.
    rounded = {key: tensor.detach().to(device="cpu", dtype=wanted, copy=True).contiguous() for key, tensor in state.items()}
    check_state(rounded, shape=shape, dtype=wanted)
    config = make_config(shape=shape, info=info, dtype=dtype)
    check_config(config)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    save_file(rounded, folder / WEIGHTS, metadata={"format": "pt"})
    shutil.copymode(folder / CONFIG, folder / WEIGHTS)  # safetensors gives files to their owner alone
    (folder / README).write_text(_readme(shape=shape, target=target, folder=folder))


def _read_weights(file: Path) -> dict[str, Tensor]:
    try:
        with safe_open(file, framework="pt") as opened:
            if (opened.metadata() or {}).get("format") != "pt":
                rule = 'needs the metadata {"format": "pt"}, which transformers insists on'
                raise ExportError(key=WEIGHTS, value=opened.metadata(), rule=rule)
            return {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 (safe_open is no mapping)
    except (OSError, SafetensorError) as error:
        raise ExportError(key=WEIGHTS, value=str(file), rule=f"cannot be read: {error}") from error


def _name(part: Path, *, out: Path, force: bool) -> None:
    """Give the finished folder its name, without a moment in which a half-written drafter has it."""
    if not out.exists():
        os.replace(part, out)
        return
    empty = out.is_dir() and not any(out.iterdir())
    if empty:
        out.rmdir()
        os.replace(part, out)
        return
    if out.is_dir() and all((out / name).is_file() for name in (CONFIG, WEIGHTS)) and _same(part, out):
        return
    if not force:
        raise ExportError(
            key="--out", value=str(out), rule="exists and holds something else", hint="--force replaces a drafter"
        )
    if not is_export(out):
        raise ExportError(key="--out", value=str(out), rule="is no exported drafter, so it is not replaced even with --force")
    aside = out.with_name(f".{out.name}.{os.getpid()}.old")
    os.replace(out, aside)
    os.replace(part, out)
    shutil.rmtree(aside)


def _same(left: Path, right: Path) -> bool:
    return all(filecmp.cmp(left / name, right / name, shallow=False) for name in (CONFIG, WEIGHTS))


def _readme(*, shape: DrafterShape, target: str, folder: Path) -> str:
    drafted = shape.block_size - 1
    return f"""# DFlash drafter

Drafts {drafted} tokens at a time for `{target}` ({shape.num_target_layers} layers, taps {list(shape.tap_layers)}). Written by
Slipstream, and read back by the `dflash` package before it was named.

vLLM (`num_speculative_tokens` is the block size less one and has no default):

    vllm serve {target} --speculative-config \\
      '{{"method": "dflash", "model": "PATH_OF_THIS_FOLDER", "num_speculative_tokens": {drafted}}}'

SGLang (the block size itself):

    python -m sglang.launch_server --model-path {target} --speculative-algorithm DFLASH \\
      --speculative-draft-model-path PATH_OF_THIS_FOLDER --speculative-num-draft-tokens {shape.block_size}
"""
