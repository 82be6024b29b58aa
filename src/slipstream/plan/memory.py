"""Memory of every process of a run, part by part, before anything loads; and what a machine or a GPU has too little for.

The parts are in `memory_target` and `memory_drafter`. On CUDA they add up to what torch's allocator hands out at most; what
the driver takes for itself is a part of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from slipstream.config import DrafterShape, Recipe, TargetInfo
from slipstream.errors import PlanError
from slipstream.plan.memory_drafter import DrafterLoad, drafter_items
from slipstream.plan.memory_items import BEFORE_TRAINING, BYTES, GIB, MIB, MemoryItem, Moment, peak_moment, slot_bytes
from slipstream.plan.memory_target import TargetLoad, answering_items, target_items
from slipstream.plan.placement import Placement
from slipstream.plan.weights import count_target_weights

__all__ = ["GIB", "MemoryItem", "MemoryPlan", "ProcessMemory", "plan_memory", "slot_bytes"]

TARGET_SLOTS = 2
"""Device slots of a target: one is written while the other is copied out."""
DRAFTER_BUFFERS = 3
"""Device buffers of a drafter: one is trained on, one is there, one is being copied."""
RESERVE = 0.05
"""Share of a GPU that is left alone when slots are placed on it: what the allocator cannot fill, and others' use."""
DRIVER_BYTES = 640 * MIB
"""What a process takes of a GPU beside torch's allocator: the context, and the code of kernels. Not measured: an estimate."""


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Memory of one process of a role; `count` processes of it run. `device` is where it lies. Answering comes before all."""

    placement: Literal["colocated", "split"]
    role: Literal["colocated", "target", "drafter", "answers"]
    count: int
    device: Literal["cpu", "cuda"]
    items: tuple[MemoryItem, ...]

    @property
    def peak_moment(self) -> Moment:
        """When most is held."""
        return peak_moment(self.items)[0]

    @property
    def peak_bytes(self) -> int:
        """What is held then: at the most, loading and warm-up included."""
        return peak_moment(self.items)[1]

    @property
    def training_bytes(self) -> int:
        """The most that is held after warm-up."""
        return peak_moment(self.items, without=BEFORE_TRAINING)[1]

    @property
    def device_bytes(self) -> int:
        """What the process takes of its GPU, or of host memory: the peak, and on a GPU the driver's part."""
        return self.peak_bytes + (DRIVER_BYTES if self.device == "cuda" else 0)

    def at_peak(self) -> tuple[MemoryItem, ...]:
        """The parts that are held at the peak, the largest first."""
        held = [item for item in self.items if item.held(self.peak_moment) and item.nbytes]
        return tuple(sorted(held, key=lambda item: -item.nbytes))


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Memory of a run in both placements, and the host memory of its slots, which both need alike."""

    processes: tuple[ProcessMemory, ...]
    slot_nbytes: int
    num_slots: int
    host_memory_bytes: int

    @property
    def host_slot_bytes(self) -> int:
        """All slots of all columns, and those kept for validation."""
        return self.num_slots * self.slot_nbytes

    def of(self, placement: Literal["colocated", "split"]) -> tuple[ProcessMemory, ...]:
        """The processes of one placement; the one that answers, if there is one, is over when the others start."""
        return tuple(process for process in self.processes if process.placement == placement)

    def total_bytes(self, placement: Literal["colocated", "split"]) -> int:
        """All processes of a placement at their peaks, and the slots: what one host holds when they all run on its CPU."""
        training = sum(process.count * process.peak_bytes for process in self.of(placement) if process.role != "answers")
        answering = sum(process.peak_bytes for process in self.of(placement) if process.role == "answers")
        return max(training + self.host_slot_bytes, answering)

    def check_host_slots(self) -> None:
        """Raise `PlanError` when the slots need more than `placement.host_memory_gb`."""
        if self.host_slot_bytes > self.host_memory_bytes:
            raise PlanError(
                key="placement.host_memory_gb",
                value=round(self.host_memory_bytes / GIB, 3),
                rule=f"the schedule needs {self.num_slots} slots of {self.slot_nbytes / GIB:.4f} GiB, "
                f"{self.host_slot_bytes / GIB:.3f} GiB in all",
                hint="raise it, or lower plan.replays, plan.replay_distance or plan.packs_per_step",
            )

    def check_machine(self, *, placement: Literal["colocated", "split"], memory_bytes: int) -> None:
        """Raise `PlanError` when a run on the CPU needs more than the machine has."""
        needed = self.total_bytes(placement)
        if needed > memory_bytes:
            raise PlanError(
                key="placement.mode",
                value=placement,
                rule=f"this machine has {memory_bytes / GIB:.1f} GiB for the run, which needs {needed / GIB:.1f} GiB",
                hint="lower plan.pack_tokens, plan.pack_anchors, objective.chunk_rows or drafter.num_layers",
            )

    def check_gpus(self, *, placement: Placement, gpu_memory_bytes: Sequence[int | None]) -> None:
        """Raise `PlanError` when the processes that share a GPU need more than it has. None: its size is not known."""
        by_role = {process.role: process for process in self.of(placement.mode)}
        for gpu, available in enumerate(gpu_memory_bytes):
            here = [by_role[process.role] for process in placement.processes if process.gpu == gpu]
            first = any(
                process.gpu == gpu and process.rank == 0 for process in placement.processes if process.role != "drafter"
            )
            for together in (here, [by_role["answers"]] if first and "answers" in by_role else []):
                if available is not None and sum(process.device_bytes for process in together) > available:
                    raise _too_small(gpu=gpu, available=available, processes=together, mode=placement.mode)


def plan_memory(
    *,
    recipe: Recipe,
    info: TargetInfo,
    shape: DrafterShape,
    schedule_slots_per_column: int,
    validation_slots: int = 0,
    device: Literal["cpu", "cuda"] = "cpu",
    gpu_memory_bytes: int | None = None,
) -> MemoryPlan:
    """The memory plan of a recipe whose schedule needs so many slots a column, in both placements.

    `validation_slots` are kept besides. `gpu_memory_bytes` decides whether a colocated process has its slots on the device;
    if it is not known, they are taken to fit. Activations on a CPU are estimates; all else is exact.
    """
    slot = slot_bytes(
        pack_tokens=recipe.plan.pack_tokens, num_taps=shape.num_taps, hidden_size=info.hidden_size, dtype=recipe.slot_dtype
    )
    per_rank = recipe.plan.packs_per_step // recipe.placement.drafter_ranks * schedule_slots_per_column
    target = target_items(target_load(recipe=recipe, info=info, shape=shape, device=device))
    draft = drafter_items(drafter_load(recipe=recipe, info=info, shape=shape), device=device)
    draft = (*draft, *_widened(recipe=recipe, shape=shape))
    slots: dict[str, tuple[MemoryItem, ...]] = dict.fromkeys(("target", "drafter", "colocated"), ())
    if device == "cuda":
        slots["target"] = (_slots("device slots", TARGET_SLOTS, slot),)
        slots["drafter"] = (_slots("device buffers of packs", DRAFTER_BUFFERS + bool(validation_slots), slot),)
        passing = 2 if recipe.plan.replays == 1 else per_rank
        free = None if gpu_memory_bytes is None else _room((*target, *draft), gpu_memory_bytes=gpu_memory_bytes)
        if free is None or (passing + validation_slots) * slot <= free:
            slots["colocated"] = (_slots("slots on the device", passing + validation_slots, slot),)
        else:
            slots["colocated"] = (*slots["target"], *slots["drafter"])
    ranks, workers = recipe.placement.drafter_ranks, recipe.placement.target_workers
    answering = _answers(recipe=recipe, info=info, shape=shape, device=device)
    merged = [item for item in target if item.moments != ("loading",)]  # over when the drafter's part of a process is built
    return MemoryPlan(
        processes=(
            ProcessMemory("colocated", "colocated", ranks, device, (*merged, *draft, *slots["colocated"])),
            *(ProcessMemory("colocated", "answers", 1, device, items) for items in answering),
            ProcessMemory("split", "target", workers, device, (*target, *slots["target"])),
            ProcessMemory("split", "drafter", ranks, device, (*draft, *slots["drafter"])),
            *(ProcessMemory("split", "answers", 1, device, items) for items in answering),
        ),
        slot_nbytes=slot,
        num_slots=recipe.plan.packs_per_step * schedule_slots_per_column + validation_slots,
        host_memory_bytes=int(recipe.placement.host_memory_gb * GIB),
    )


def colocated_room(*, recipe: Recipe, info: TargetInfo, shape: DrafterShape, gpu_memory_bytes: int) -> int:
    """Bytes that a colocated process leaves on a GPU for slots, less a reserve."""
    target = target_items(target_load(recipe=recipe, info=info, shape=shape, device="cuda"))
    draft = drafter_items(drafter_load(recipe=recipe, info=info, shape=shape), device="cuda")
    return _room((*target, *draft, *_widened(recipe=recipe, shape=shape)), gpu_memory_bytes=gpu_memory_bytes)


def target_load(*, recipe: Recipe, info: TargetInfo, shape: DrafterShape, device: Literal["cpu", "cuda"]) -> TargetLoad:
    """What a target process captures for a recipe."""
    return TargetLoad(
        info=info,
        weights=count_target_weights(info),
        tokens=recipe.plan.pack_tokens,
        depth=shape.tap_layers[-1] + 1,
        dtype=recipe.target.dtype,
        device=device,
    )


def drafter_load(*, recipe: Recipe, info: TargetInfo, shape: DrafterShape) -> DrafterLoad:
    """What a drafter process trains on for a recipe."""
    return DrafterLoad(
        shape=shape,
        tokens=recipe.plan.pack_tokens,
        anchors=recipe.plan.pack_anchors,
        chunk_rows=recipe.objective.chunk_rows,
        dtype=recipe.drafter.dtype,
        slot_dtype=recipe.target.dtype,
        attention=recipe.drafter.attention,
        tied=info.tie_word_embeddings,
        noise=bool(recipe.objective.noise_std or recipe.objective.noise_end_std),
    )


def _room(items: Sequence[MemoryItem], *, gpu_memory_bytes: int) -> int:
    return int(gpu_memory_bytes * (1 - RESERVE)) - DRIVER_BYTES - peak_moment(items)[1]


def _answers(
    *, recipe: Recipe, info: TargetInfo, shape: DrafterShape, device: Literal["cpu", "cuda"]
) -> list[tuple[MemoryItem, ...]]:
    if recipe.validation.prompts is None:
        return []
    load = target_load(recipe=recipe, info=info, shape=shape, device=device)
    section = recipe.validation
    return [answering_items(load, batch=section.batch_size, answer_tokens=section.max_new_tokens)]


def _slots(name: str, count: int, nbytes: int) -> MemoryItem:
    return MemoryItem(name, count * nbytes, f"{count} x T K D", "plan.pack_tokens")


def _widened(*, recipe: Recipe, shape: DrafterShape) -> tuple[MemoryItem, ...]:
    if recipe.slot_dtype == recipe.target.hidden_dtype:
        return ()
    nbytes = recipe.plan.pack_tokens * shape.num_taps * shape.hidden_size * BYTES[recipe.target.hidden_dtype]
    return (MemoryItem("pack written out of its slot", nbytes, "T K D in the target's dtype", "plan.pack_tokens"),)


def _too_small(*, gpu: int, available: int, processes: Sequence[ProcessMemory], mode: str) -> PlanError:
    """Names the biggest part of all that a key makes smaller."""
    needed = sum(process.device_bytes for process in processes)
    largest = max(processes, key=lambda process: process.device_bytes)
    parts = largest.at_peak()
    biggest, first = parts[0], next((item for item in parts if item.key), None)
    told = f"{biggest.name}, {biggest.nbytes / GIB:.1f} GiB"
    hint = "" if first is None else f"lower {first.key}"
    if first is not None and first is not biggest:
        hint += f" ({first.name}, {first.nbytes / GIB:.1f} GiB)"
    others = "place target and drafter on GPUs of their own" if len(processes) > 1 or mode == "colocated" else ""
    return PlanError(
        key="placement.mode",
        value=mode,
        rule=f"GPU {gpu} has {available / GIB:.1f} GiB, its processes ({', '.join(p.role for p in processes)}) need "
        f"{needed / GIB:.1f} GiB at their peaks; the biggest part is {told}",
        hint=" or ".join(part for part in (hint, others) if part),
    )
