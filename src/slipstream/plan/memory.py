"""Memory of every process of a run, part by part, before anything loads; and what a machine or a GPU has too little for.

The parts are in `memory_target`, `memory_drafter` and `memory_recordings`, put together in `memory_processes`. On CUDA they
add up to what torch's allocator hands out at most, and what recordings keep beside; what the driver and NCCL take for
themselves is a part of its own, and `memory_host` has the host's side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from slipstream.config import DrafterShape, Recipe, TargetInfo
from slipstream.errors import PlanError
from slipstream.plan.memory_host import HostMemory, host_memory
from slipstream.plan.memory_items import BEFORE_TRAINING, GIB, HeldParts, MemoryItem, peak_moment, slot_bytes
from slipstream.plan.memory_processes import Processes, Role, Stages
from slipstream.plan.placement import Mode, Placement
from slipstream.plan.weights import count_target_weights

__all__ = ["GIB", "MemoryItem", "MemoryPlan", "ProcessMemory", "plan_memory", "slot_bytes"]


@dataclass(frozen=True, slots=True)
class ProcessMemory(HeldParts):
    """Memory of one process of a role; `count` processes of it run. `device` is where it lies. Answering comes before all.

    `replayed` are its stages that are taken to be replayed from recordings, `outside_bytes` what it takes of its GPU beside
    torch's allocator.
    """

    placement: Mode
    role: Role
    count: int
    device: Literal["cpu", "cuda"]
    items: tuple[MemoryItem, ...]
    replayed: Stages = ()
    outside_bytes: int = 0

    @property
    def training_bytes(self) -> int:
        """The most that is held after warm-up."""
        return peak_moment(self.items, without=BEFORE_TRAINING)[1]

    @property
    def device_bytes(self) -> int:
        """What the process takes of its GPU, or of host memory: the peak, and on a GPU what others take for it."""
        return self.peak_bytes + self.outside_bytes


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Memory of a run in both placements, and the host memory of its slots.

    `alternatives` are the same processes with every choice of stages that may be replayed: which ones are, warm-up decides.
    `colocated_on_device` says that colocated processes have their slots on their GPUs, and none in host memory.
    `host` is what a run on CUDA holds of the host, in each placement; empty on a CPU, where processes hold nothing else.
    """

    processes: tuple[ProcessMemory, ...]
    slot_nbytes: int
    num_slots: int
    host_memory_bytes: int
    alternatives: tuple[ProcessMemory, ...] = ()
    colocated_on_device: bool = False
    host: tuple[HostMemory, ...] = ()

    @property
    def host_slot_bytes(self) -> int:
        """All slots of all columns, and those kept for validation: where they lie in host memory."""
        return self.num_slots * self.slot_nbytes

    def slots_in_host_memory(self, placement: Mode) -> int:
        """How many slots a placement has in host memory."""
        return 0 if placement == "colocated" and self.colocated_on_device else self.num_slots

    def of(self, placement: Mode) -> tuple[ProcessMemory, ...]:
        """The processes of one placement; the one that answers, if there is one, is over when the others start."""
        return tuple(process for process in self.processes if process.placement == placement)

    def total_bytes(self, placement: Mode) -> int:
        """All processes of a placement at their peaks, and the slots: what one host holds when they all run on its CPU."""
        training = sum(process.count * process.peak_bytes for process in self.of(placement) if process.role != "answers")
        answering = sum(process.peak_bytes for process in self.of(placement) if process.role == "answers")
        return max(training + self.host_slot_bytes, answering)

    def check_host_slots(self, placement: Mode) -> None:
        """Raise `PlanError` when a placement's slots in host memory need more than `placement.host_memory_gb`."""
        num_slots = self.slots_in_host_memory(placement)
        if num_slots * self.slot_nbytes > self.host_memory_bytes:
            raise PlanError(
                key="placement.host_memory_gb",
                value=round(self.host_memory_bytes / GIB, 3),
                rule=f"the schedule needs {num_slots} slots of {self.slot_nbytes / GIB:.4f} GiB, "
                f"{num_slots * self.slot_nbytes / GIB:.3f} GiB in all",
                hint="raise it, or lower plan.replays, plan.replay_distance or plan.packs_per_step",
            )

    def check_machine(self, *, placement: Mode, memory_bytes: int) -> None:
        """Raise `PlanError` when a run on the CPU needs more than the machine has."""
        needed = self.total_bytes(placement)
        if needed > memory_bytes:
            raise PlanError(
                key="placement.mode",
                value=placement,
                rule=f"this machine has {memory_bytes / GIB:.1f} GiB for the run, which needs {needed / GIB:.1f} GiB",
                hint="lower plan.pack_tokens, plan.pack_anchors, objective.chunk_rows or drafter.num_layers",
            )

    def host_of(self, placement: Mode) -> HostMemory | None:
        """Host memory of one placement on CUDA; None on a CPU."""
        return next((host for host in self.host if host.placement == placement), None)

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

    `validation_slots` are kept besides, by the drafter ranks in turn. `gpu_memory_bytes` decides whether a colocated process
    has its slots on the device; if it is not known, those of packs that are trained on once are taken to fit, others not.
    Activations on a CPU and what the driver takes are estimates; all else is counted.
    """
    processes = Processes(
        recipe=recipe,
        info=info,
        shape=shape,
        weights=count_target_weights(info),
        device=device,
        rank_slots=recipe.plan.packs_per_step // recipe.placement.drafter_ranks * schedule_slots_per_column,
        kept_slots=-(-validation_slots // recipe.placement.drafter_ranks),
        gpu_memory_bytes=gpu_memory_bytes,
    )
    planned, alternatives = [], []
    for mode, role, count in _counts(recipe):
        process = ProcessMemory(mode, role, count, device, (), outside_bytes=processes.outside_bytes(role))
        guess = processes.guess(role)
        for replayed in processes.choices(role):
            found = replace(process, items=processes.items(role, replayed=replayed), replayed=replayed)
            alternatives.append(found)
            if replayed == guess:
                planned.append(found)
    plan = MemoryPlan(
        processes=tuple(planned),
        slot_nbytes=processes.slot_nbytes,
        num_slots=recipe.plan.packs_per_step * schedule_slots_per_column + validation_slots,
        host_memory_bytes=int(recipe.placement.host_memory_gb * GIB),
        alternatives=tuple(alternatives),
        colocated_on_device=processes.has_slots_on_device(),
    )
    return plan if device == "cpu" else replace(plan, host=tuple(_host(plan, processes, mode) for mode in get_args(Mode)))


def _host(plan: MemoryPlan, processes: Processes, mode: Mode) -> HostMemory:
    return host_memory(
        recipe=processes.recipe,
        info=processes.info,
        shape=processes.shape,
        placement=mode,
        num_slots=plan.slots_in_host_memory(mode),
        slot_nbytes=plan.slot_nbytes,
    )


def _counts(recipe: Recipe) -> list[tuple[Mode, Role, int]]:
    """Placement, role and number of every kind of process."""
    ranks, workers = recipe.placement.drafter_ranks, recipe.placement.target_workers
    kinds: list[tuple[Mode, Role, int]] = [
        ("colocated", "colocated", ranks),
        ("colocated", "answers", 1),
        ("split", "target", workers),
        ("split", "drafter", ranks),
        ("split", "answers", 1),
    ]
    return [kind for kind in kinds if kind[1] != "answers" or recipe.validation.prompts is not None]


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
