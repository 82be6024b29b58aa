"""What each process of a run gets of the machine: a GPU, cores and memory next to it, threads, an environment. No torch."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Any

from slipstream.device.gpus import GpuFacts, visible_gpus
from slipstream.device.limits import available_memory
from slipstream.device.numa import Binding, binding_of
from slipstream.device.shared import check_room
from slipstream.device.threads import share_threads
from slipstream.launch.allocator import allocator_settings
from slipstream.launch.kernel_cache import cache_settings
from slipstream.launch.preflight import Preflight
from slipstream.plan.memory import MemoryPlan, plan_memory
from slipstream.plan.placement import ProcessSpec

NOT_BOUND = "not bound to cores or memory: sysfs names no NUMA node for the GPU"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Resources:
    """Of one start of a run. `gpus` are the visible ones, `cores` those that the supervisor may run on.

    `elsewhere`: of another machine that is planned for, whose host memory is not known.
    """

    flight: Preflight
    gpus: tuple[GpuFacts, ...]
    cores: tuple[int, ...]
    elsewhere: bool = False

    @classmethod
    def of(cls, flight: Preflight) -> Resources:
        """Of this machine."""
        gpus = visible_gpus() if flight.device == "cuda" else ()
        return cls(flight=flight, gpus=gpus, cores=tuple(sorted(os.sched_getaffinity(0))))

    @classmethod
    def of_another(cls, flight: Preflight, *, gpus: tuple[GpuFacts, ...]) -> Resources:
        """Of a machine with such GPUs, to plan for."""
        return cls(flight=flight, gpus=gpus, cores=(), elsewhere=True)

    def plan_memory(self, *, slots_per_column: int, validation_slots: int) -> MemoryPlan:
        """The memory plan on these GPUs; the smallest one decides what fits beside a colocated process."""
        flight = self.flight
        sizes = [gpu.memory_bytes for gpu in self.gpus if gpu.memory_bytes is not None]
        return plan_memory(
            recipe=flight.recipe,
            info=flight.info,
            shape=flight.shape,
            schedule_slots_per_column=slots_per_column,
            validation_slots=validation_slots,
            device=flight.device,
            gpu_memory_bytes=min(sizes, default=None),
        )

    def check_memory(self, memory: MemoryPlan) -> None:
        """Refuse a run that cannot fit, before any weight loads. Raises `PlanError`, or `PreflightError` for slots alone.

        Of another machine the host's memory is not known: there slots are held against the recipe alone.
        """
        placement, ranks = self.flight.placement, self.flight.recipe.placement.drafter_ranks
        memory.check_host_slots(placement.mode)
        slots = memory.slots_in_host_memory(placement.mode)
        if slots and not self.elsewhere:
            check_room([memory.slot_nbytes * (slots // ranks + (rank < slots % ranks)) for rank in range(min(ranks, slots))])
        if self.flight.device == "cpu":
            memory.check_machine(placement=placement.mode, memory_bytes=available_memory())
            return
        if unknown := [str(gpu.index) for gpu in self.gpus if gpu.memory_bytes is None]:
            log.warning("the driver does not say how large GPU %s is: whether the run fits is not checked", ", ".join(unknown))
        memory.check_gpus(placement=placement, gpu_memory_bytes=[gpu.memory_bytes for gpu in self.gpus])
        host = memory.host_of(placement.mode)
        if host is not None and not self.elsewhere:
            host.check(memory_bytes=available_memory())

    def binding(self, *, role: str, index: int) -> Binding | None:
        """The node of a process's GPU; None on a CPU, and where the machine does not say."""
        gpu = self._spec(role=role, index=index).gpu
        if gpu is None or gpu >= len(self.gpus):
            return None
        return binding_of(self.gpus[gpu].pci_id, allowed=self.cores)

    def job_binding(self, *, role: str, index: int) -> dict[str, Any] | None:
        """The same for a child's job."""
        binding = self.binding(role=role, index=index)
        return None if binding is None else binding.as_job()

    def threads(self, *, role: str, index: int) -> int:
        """CPU threads of a process: as the recipe says, else the cores shared out evenly, those of its node at most."""
        section = self.flight.recipe.placement
        share = share_threads(
            target_workers=section.target_workers if self.flight.placement.mode == "split" else 0,
            drafter_ranks=section.drafter_ranks,
            target_threads=section.target_threads,
            drafter_threads=section.drafter_threads,
        )
        threads = share.target if role == "target" else share.drafter
        given = section.target_threads if role == "target" else section.drafter_threads
        binding = self.binding(role=role, index=index)
        if given is not None or binding is None or not binding.cores:
            return threads
        bound = [self.binding(role=spec.role, index=spec.rank) for spec in self.flight.placement.processes]
        together = sum(other is not None and other.node == binding.node for other in bound)
        return max(1, min(threads, len(binding.cores) // together))

    def environment(self, *, role: str, index: int) -> dict[str, str]:
        """GPU, allocator and kernel caches of a process, or without a GPU the interface that ranks on one host meet on."""
        if self.flight.device == "cpu":
            return {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
        gpu = self._spec(role=role, index=index).gpu
        assert gpu is not None
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        chosen = visible.split(",")[gpu].strip() if visible else str(gpu)
        name = self.gpus[gpu].name if gpu < len(self.gpus) else None
        return {
            "CUDA_VISIBLE_DEVICES": chosen,
            **allocator_settings(role=role, environ=os.environ),
            **cache_settings(environ=os.environ, gpu_name=name),
        }

    def describe_binding(self) -> dict[str, str]:
        """Where each process is bound, in words, for the record of a start."""
        if self.flight.device == "cpu":
            return {}
        found = {}
        for spec in self.flight.placement.processes:
            binding = self.binding(role=spec.role, index=spec.rank)
            found[f"{spec.role}-{spec.rank}"] = NOT_BOUND if binding is None else str(binding)
        if set(found.values()) == {NOT_BOUND}:
            log.info("processes are %s", NOT_BOUND)
        return found

    def _spec(self, *, role: str, index: int) -> ProcessSpec:
        return [spec for spec in self.flight.placement.processes if spec.role in (role, "colocated")][index]
