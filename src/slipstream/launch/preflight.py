"""Everything that can be wrong without a GPU, found in the first two seconds: no torch, transformers or datasets in here.

Waits for nothing. Each refusal is a `PreflightError` (or `RecipeError`, `CorpusError`) with the value, the rule and the key.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slipstream.config import DrafterShape, Recipe, TargetInfo, resolve_drafter
from slipstream.corpus.meta import CorpusMeta
from slipstream.device.gpus import GpuFacts, visible_gpus
from slipstream.device.kind import DeviceKind, compute_capability, count_gpus, device_kind
from slipstream.device.limits import available_cores
from slipstream.errors import PreflightError
from slipstream.launch.forecast import place
from slipstream.launch.given import check_validation, check_warm_start, read_corpus, read_target
from slipstream.observe import check_sinks
from slipstream.plan.memory_target import FUSED_TYPES
from slipstream.plan.placement import Placement
from slipstream.runfolder import RunFolder

GIB = 2**30
CHECKPOINT_BYTES = 12
"""Of one weight in a checkpoint: fp32 master and two moments."""
FLOAT8_CAPABILITY = (8, 9)
"""Compute capability from which a GPU multiplies float8."""


@dataclass(frozen=True, slots=True)
class Preflight:
    """What is known before anything expensive starts. `placement` is resolved for this machine's devices.

    `chosen` says, where automatic placement went by a prediction, what it took and why.
    """

    recipe: Recipe
    info: TargetInfo
    shape: DrafterShape
    corpus: CorpusMeta
    folder: RunFolder
    device: DeviceKind
    placement: Placement
    resume: bool
    chosen: str | None = None


def preflight(recipe: Recipe, *, resume: bool = False, elsewhere: tuple[GpuFacts, ...] | None = None) -> Preflight:
    """Check a recipe against this machine, its target and its corpus, before anything loads. Raises on the first violation.

    The recipe of the result has the placement that automatic mode chose put in. `elsewhere` are the GPUs of another machine,
    to plan for: what only that machine can tell, its disk, its memory and what its GPUs can do, is not checked.
    """
    info = read_target(recipe)
    shape = resolve_drafter(recipe=recipe, info=info)
    corpus = read_corpus(recipe=recipe, info=info, shape=shape)
    check_validation(recipe=recipe, info=info)
    folder = RunFolder(Path(recipe.runs) / recipe.name)
    if not (resume and any(folder.checkpoints.glob("step-*"))):  # a checkpoint's weights come after those of any warm start
        check_warm_start(recipe=recipe, shape=shape)
    device = device_kind(recipe.placement.device) if elsewhere is None else "cuda"
    _check_attention(recipe=recipe, device=device)
    _check_graphs(recipe=recipe, device=device)
    check_sinks(recipe.observe.sinks)
    num_devices = available_cores() if device == "cpu" else count_gpus() if elsewhere is None else len(elsewhere)
    gpus = elsewhere if elsewhere is not None else visible_gpus() if device == "cuda" else ()
    recipe, placement, chosen = place(recipe=recipe, info=info, shape=shape, device=device, num_devices=num_devices, gpus=gpus)
    _check_ranks(placement=placement, device=device)
    check_run_folder(folder=folder, resume=resume)
    if elsewhere is None:
        check_float8(recipe=recipe, info=info, device=device, placement=placement)
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
        chosen=chosen,
    )


def check_run_folder(*, folder: RunFolder, resume: bool) -> None:
    """Refuse a name that is taken, a run to resume that is not there, and a place where no run can be written."""
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
            key="name",
            value=folder.root.name,
            rule=f"there is no run of this name in {folder.root.parent} to resume",
            hint="start it without --resume",
        )
    place = _existing(folder.root)
    if not place.is_dir():
        raise PreflightError(key="runs", value=str(folder.root.parent), rule=f"{place} is not a folder")
    if not os.access(place, os.W_OK | os.X_OK):
        raise PreflightError(key="runs", value=str(folder.root.parent), rule=f"{place} cannot be written to")


def _check_attention(*, recipe: Recipe, device: DeviceKind) -> None:
    if recipe.drafter.attention == "flex" and device == "cpu":
        raise PreflightError(
            key="drafter.attention",
            value="flex",
            rule="has no backward on a CPU, which is what this run trains on",
            hint='use "auto" or "sdpa"',
        )


def _check_ranks(*, placement: Placement, device: DeviceKind) -> None:
    """Refuse two ranks of the drafter on one GPU, which NCCL does not connect."""
    gpus = [process.gpu for process in placement.processes if process.role != "target"]
    shared = sorted({gpu for gpu in gpus if gpu is not None and gpus.count(gpu) > 1})
    if device == "cuda" and shared:
        raise PreflightError(
            key="placement.drafter_ranks",
            value=len(gpus),
            rule=f"puts {gpus.count(shared[0])} ranks on GPU {shared[0]}; gradients are summed between GPUs, a rank on each",
            hint="lower it, or name a GPU for each in placement.drafter_gpus",
        )


def check_float8(*, recipe: Recipe, info: TargetInfo, device: DeviceKind, placement: Placement) -> None:
    """Refuse a float8 target on a CPU, on a GPU that cannot multiply float8, and of a kind that has no float8 layers."""
    if recipe.target.dtype == "float8":
        gpus = {process.gpu for process in placement.processes if process.role != "drafter" and process.gpu is not None}
        rule = _against_float8(model_type=info.model_type, device=device, gpus=sorted(gpus))
        if rule is not None:
            raise PreflightError(key="target.dtype", value="float8", rule=rule, hint='use "bfloat16"')


def _against_float8(*, model_type: str, device: DeviceKind, gpus: Sequence[int]) -> str | None:
    lowest = ".".join(map(str, FLOAT8_CAPABILITY))
    if device == "cpu":
        return f"needs a GPU of compute capability {lowest} or more, and this run is on a CPU"
    if model_type not in FUSED_TYPES:
        return f"has no layers for a target of type {model_type}, only for {', '.join(FUSED_TYPES)}"
    for gpu in gpus:
        capability = compute_capability(gpu)
        if capability is not None and capability < FLOAT8_CAPABILITY:
            return f"needs compute capability {lowest} or more, and GPU {gpu} has {'.'.join(map(str, capability))}"
    return None


def _check_graphs(*, recipe: Recipe, device: DeviceKind) -> None:
    if recipe.placement.cuda_graphs == "on" and device == "cpu":
        raise PreflightError(
            key="placement.cuda_graphs",
            value="on",
            rule="a CPU, which is what this run trains on, has no CUDA graphs",
            hint='use "auto" or "off"',
        )


def _check_disk(*, recipe: Recipe, folder: RunFolder, shape: DrafterShape) -> None:
    """Checkpoints that are kept, the best one, and the one being written; what a run to resume has already is not counted."""
    place = _existing(folder.root)
    there = sum(file.stat().st_size for file in folder.checkpoints.glob("step-*/*") if file.is_file())
    needed = (recipe.checkpoint.keep + 2) * shape.num_parameters * CHECKPOINT_BYTES - there
    free = shutil.disk_usage(place).free
    if needed > free:
        raise PreflightError(
            key="checkpoint.keep",
            value=recipe.checkpoint.keep,
            rule=f"checkpoints need up to {needed / GIB:.1f} GiB more, {free / GIB:.1f} GiB are free in {place}",
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
                    hint="set it to what slots may take; slipstream plan shows what they need",
                )


def _existing(path: Path) -> Path:
    """The path itself, or the nearest folder above it that is there."""
    return next(place for place in (path, *path.absolute().parents) if place.exists())
