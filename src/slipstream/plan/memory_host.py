"""Host memory of a run on CUDA, part by part: what its processes hold together, beside the device memory of each.

Weights whose files have the type that they are loaded in are mapped from there: all processes share those pages, and the kernel
drops them when it needs memory, so that they count as nothing here. Weights of another type are copies, one a process.
"""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.config import DrafterShape, Recipe, TargetInfo
from slipstream.errors import PlanError
from slipstream.plan.memory_drafter import flat_elements
from slipstream.plan.memory_items import BYTES, FP32, GIB, HeldParts, MemoryItem, Moment
from slipstream.plan.placement import Mode
from slipstream.plan.weights import count_converted

PROCESS_BYTES = 3 * GIB // 2
"""What a process with a GPU holds of the host for itself: Python, torch, the CUDA context, what compiling left.

Measured as the most of its own pages, over eleven processes of runs on H200s, with small models: 0.91 to 1.51 GiB.
"""
PAGE_BYTES, PAGE_ENTRY_BYTES = 4096, 8
"""Slots are mapped in pages of that size; each mapping of one has an entry in its process's page tables."""

LOADING: tuple[Moment, ...] = ("loading",)
AFTER_LOADING: tuple[Moment, ...] = ("training",)


@dataclass(frozen=True, slots=True)
class HostMemory(HeldParts):
    """Host memory of one placement on CUDA, of all its processes together. Answering the validation prompts is over then."""

    placement: Mode
    items: tuple[MemoryItem, ...]

    def check(self, *, memory_bytes: int) -> None:
        """Raise `PlanError` when they need more than the host has left; names all parts and their keys."""
        if self.peak_bytes <= memory_bytes:
            return
        parts = self.at_peak()
        levers: dict[str, str] = {}
        for item in parts:
            if item.key:
                levers.setdefault(item.key, item.name)
        raise PlanError(
            key="placement.mode",
            value=self.placement,
            rule=f"this machine has {memory_bytes / GIB:.1f} GiB of host memory for the run, which needs "
            f"{self.peak_bytes / GIB:.1f} GiB: {', '.join(f'{item.name} {item.nbytes / GIB:.1f}' for item in parts)}",
            hint="lower " + ", or ".join(f"{key}: {name}" for key, name in levers.items()),
        )


def host_memory(
    *,
    recipe: Recipe,
    info: TargetInfo,
    shape: DrafterShape,
    placement: Mode,
    num_slots: int,
    slot_nbytes: int,
) -> HostMemory:
    """The host side of a placement with so many slots in host memory.

    Moments: in split, and with several colocated ranks, one process may load while others have all of theirs, at the start and
    when a target worker is started again; a single colocated process has loaded its target before it takes anything else.
    """
    ranks, workers = recipe.placement.drafter_ranks, recipe.placement.target_workers if placement == "split" else 0
    in_turn = placement == "colocated" and ranks == 1
    moments = AFTER_LOADING if in_turn else ()
    slots = num_slots * slot_nbytes
    entries = slots // PAGE_BYTES * PAGE_ENTRY_BYTES * (workers + 1)
    locked = "page-locked one by one from the start" + ("" if in_turn else ": all are taken to be while targets load")
    fewer = "plan.replays, plan.replay_distance or plan.packs_per_step"
    per_rank = "placement.drafter_ranks" if ranks > 1 else ""
    per_loader = per_rank if placement == "colocated" else "placement.target_workers" if workers > 1 else ""
    saved = 3 * FP32 * flat_elements(shape)
    return HostMemory(
        placement,
        (
            MemoryItem("slots", slots, f"{num_slots} x T K D, {locked}", fewer, moments),
            MemoryItem("page tables of slots", entries, f"8 bytes a page, {workers + 1} times mapped", fewer, moments),
            MemoryItem(
                "copy for checkpoints", saved, "masters and two moments in fp32, of rank 0", "drafter.num_layers", moments
            ),
            _target(recipe, info=info, depth=shape.tap_layers[-1] + 1, loaders=workers or ranks, key=per_loader),
            _embedding(recipe, info=info, ranks=ranks, key=per_rank),
            MemoryItem(
                "processes themselves",
                (workers + ranks) * PROCESS_BYTES,
                f"{workers + ranks} x {PROCESS_BYTES / GIB} GiB, as measured",
            ),
        ),
    )


def _target(recipe: Recipe, *, info: TargetInfo, depth: int, loaders: int, key: str) -> MemoryItem:
    """What `quantise_decoder` rounds layer by layer. Targets of other types are loaded onto the device tensor by tensor."""
    name = "target before it is rounded"
    if recipe.target.dtype != "float8":
        return MemoryItem(name, 0, "loaded onto the GPU tensor by tensor")
    if info.weights == "random":
        return MemoryItem(name, 0, "made up on the GPU")
    nbytes = loaders * BYTES["float8"] * count_converted(info, dtype="bfloat16", depth=depth).decoder
    if not nbytes:
        return MemoryItem(name, 0, "mapped from its files, which the kernel can drop")
    formula = f"{loaders} x what its files have in another type than bf16, layers 0 to {depth - 1}"
    return MemoryItem(name, nbytes, formula, key, LOADING)


def _embedding(recipe: Recipe, *, info: TargetInfo, ranks: int, key: str) -> MemoryItem:
    """What drafters read rows of, where the head is another table (`launch/borrowed.py`)."""
    name, dtype = "frozen embedding", recipe.drafter.dtype
    table = ranks * info.vocab_size * info.hidden_size * BYTES[dtype]
    if info.tie_word_embeddings:
        return MemoryItem(name, 0, "the head, on the GPU")
    if info.weights == "random":
        return MemoryItem(name, table, f"{ranks} x V D", key)
    if not count_converted(info, dtype=dtype, depth=0).embedding:
        return MemoryItem(name, 0, "mapped from its file, which the kernel can drop")
    return MemoryItem(name, table, f"{ranks} x V D in {dtype}, which its file has in another type", key)
