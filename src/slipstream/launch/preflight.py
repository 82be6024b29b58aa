"""Everything that can be wrong without a GPU, found in the first two seconds: no torch, transformers or datasets in here.

Waits for nothing. Each refusal is a `PreflightError` (or `RecipeError`, `CorpusError`) with the value, the rule and the key.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from slipstream.config import DrafterShape, Recipe, TargetInfo, read_target_info, resolve_drafter
from slipstream.corpus.meta import CorpusMeta, read_meta, template_fingerprint, tokenizer_fingerprint
from slipstream.device.kind import DeviceKind, count_gpus, device_kind
from slipstream.device.limits import available_cores
from slipstream.errors import PreflightError
from slipstream.plan.placement import Placement, resolve_placement
from slipstream.runfolder import RunFolder

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Preflight:
    """What is known before anything expensive starts. `placement` is resolved for this machine's devices."""

    recipe: Recipe
    info: TargetInfo
    shape: DrafterShape
    corpus: CorpusMeta
    folder: RunFolder
    device: DeviceKind
    placement: Placement
    resume: bool


def preflight(recipe: Recipe, *, resume: bool = False) -> Preflight:
    """Check a recipe against this machine, its target and its corpus, before anything loads. Raises on the first violation."""
    info = read_target_info(recipe.target.model)
    _check_target_files(info)
    shape = resolve_drafter(recipe=recipe, info=info)
    corpus = read_meta(Path(recipe.corpus.path))
    _check_corpus(recipe=recipe, info=info, shape=shape, corpus=corpus)
    _check_validation(recipe)
    _check_warm_start(recipe=recipe, shape=shape)
    device = device_kind(recipe.placement.device)
    num_devices = count_gpus() if device == "cuda" else available_cores()
    placement = resolve_placement(placement=recipe.placement, device=device, num_devices=num_devices)
    folder = RunFolder(Path(recipe.runs) / recipe.name)
    _check_run_folder(folder=folder, resume=resume)
    _check_disk(recipe=recipe, folder=folder, shape=shape)
    _check_host_memory(recipe)
    return Preflight(
        recipe=recipe,
        info=info,
        shape=shape,
        corpus=corpus,
        folder=folder,
        device=device,
        placement=placement,
        resume=resume,
    )


def _check_target_files(info: TargetInfo) -> None:
    if not (info.folder / "tokenizer.json").is_file():
        raise PreflightError(
            key="target.model", value=str(info.folder), rule="has no tokenizer.json", hint="a fast tokenizer is needed"
        )
    index = info.folder / "model.safetensors.index.json"
    sharded = index.is_file()
    names = sorted(set(json.loads(index.read_text())["weight_map"].values())) if sharded else ["model.safetensors"]
    missing = [name for name in names if not (info.folder / name).is_file()]
    if missing:
        raise PreflightError(
            key="target.model",
            value=str(info.folder),
            rule=f"lacks {len(missing)} of {len(names)} weight files, first {missing[0]}",
            hint="safetensors weights are needed; finish the download or convert them",
        )


def _check_corpus(*, recipe: Recipe, info: TargetInfo, shape: DrafterShape, corpus: CorpusMeta) -> None:
    pairs: list[tuple[str, str, Callable[[Path], str]]] = [
        ("tokenizer", corpus.tokenizer_fingerprint, tokenizer_fingerprint),
        ("chat template", corpus.template_fingerprint, template_fingerprint),
    ]
    for what, recorded, fingerprint in pairs:
        if recorded != fingerprint(info.folder):
            raise PreflightError(
                key="corpus.path",
                value=recipe.corpus.path,
                rule=f"was prepared with another {what} than that of target.model ({recipe.target.model})",
                hint=f"prepare it again: slipstream prepare … --target {recipe.target.model}",
            )
    if corpus.contains_token(shape.mask_token_id):
        raise PreflightError(
            key="drafter.mask_token_id",
            value=shape.mask_token_id,
            rule="occurs in the corpus, so a drafted slot could not be told from a real token",
            hint="take a token that no conversation contains",
        )
    if not corpus.num_documents:
        raise PreflightError(key="corpus.path", value=recipe.corpus.path, rule="holds no document")


def _check_validation(recipe: Recipe) -> None:
    prompts = recipe.validation.prompts
    if prompts is None:
        return
    path = Path(prompts)
    if not path.is_file():
        raise PreflightError(
            key="validation.prompts", value=prompts, rule="is not a file", hint="a JSONL of conversations, or leave it out"
        )
    with path.open(encoding="utf-8", errors="replace") as lines:
        first = lines.readline()
    try:
        json.loads(first)
    except json.JSONDecodeError as error:
        raise PreflightError(
            key="validation.prompts", value=prompts, rule=f"its first line is not JSON: {error}", hint="one JSON object a line"
        ) from error


def _check_warm_start(*, recipe: Recipe, shape: DrafterShape) -> None:
    folder = recipe.drafter.warm_start
    if folder is None:
        return
    file = Path(folder) / "config.json"
    if not file.is_file():
        raise PreflightError(
            key="drafter.warm_start", value=folder, rule="has no config.json", hint="an exported drafter folder"
        )
    config = json.loads(file.read_text())
    nested = config.get("dflash_config", {})
    found = {
        "hidden_size": config.get("hidden_size"),
        "num_layers": config.get("num_hidden_layers"),
        "block_size": nested.get("block_size", config.get("block_size")),
        "mask_token_id": nested.get("mask_token_id", config.get("mask_token_id")),
        "tap_layers": tuple(nested.get("target_layer_ids", config.get("target_layer_ids")) or ()),
    }
    for name, value in found.items():
        if value != getattr(shape, name):
            raise PreflightError(
                key="drafter.warm_start",
                value=folder,
                rule=f"its {name} is {value}, this recipe's is {getattr(shape, name)}",
                hint="make the recipe equal to the drafter it starts from",
            )


def _check_run_folder(*, folder: RunFolder, resume: bool) -> None:
    started = folder.recipe.is_file()
    if started and not resume:
        raise PreflightError(
            key="name",
            value=folder.root.name,
            rule=f"a run of this name is already in {folder.root.parent}",
            hint="choose another name, or continue it with --resume",
        )
    if resume and not started:
        raise PreflightError(
            key="name", value=folder.root.name, rule=f"there is no run of this name in {folder.root.parent} to resume"
        )
    if folder.root.exists() and not os.access(folder.root, os.W_OK):
        raise PreflightError(key="runs", value=str(folder.root), rule="cannot be written to")


def _check_disk(*, recipe: Recipe, folder: RunFolder, shape: DrafterShape) -> None:
    place = folder.root
    while not place.exists():
        place = place.parent
    if not os.access(place, os.W_OK):
        raise PreflightError(key="runs", value=recipe.runs, rule=f"{place} cannot be written to")
    needed = (recipe.checkpoint.keep + 2) * shape.num_parameters * 12
    free = shutil.disk_usage(place).free
    if needed > free:
        raise PreflightError(
            key="checkpoint.keep",
            value=recipe.checkpoint.keep,
            rule=f"checkpoints need up to {needed / GIB:.1f} GiB, {free / GIB:.1f} GiB are free in {place}",
            hint="keep fewer, or set runs to a larger disk",
        )


def _check_host_memory(recipe: Recipe) -> None:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            total = int(line.split()[1]) * 1024
            if recipe.placement.host_memory_gb * GIB > total:
                raise PreflightError(
                    key="placement.host_memory_gb",
                    value=recipe.placement.host_memory_gb,
                    rule=f"this machine has {total / GIB:.1f} GiB in all",
                    hint="give slots less, for example by fewer plan.replays or a smaller plan.replay_distance",
                )
