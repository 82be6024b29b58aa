"""Which parts each kind of process holds: the stages that run in it, as recordings or launched, and its slots.

A colocated process on a GPU has its slots there if all of them fit beside the rest, else in host memory, with a few on the
device to pass through: `launch/on_gpu.py` asks the same question here, with the same figures.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import Literal

from slipstream.config import DrafterShape, Recipe, TargetInfo
from slipstream.plan.memory_drafter import DrafterLoad, drafter_items
from slipstream.plan.memory_items import BYTES, MIB, MemoryItem, peak_moment, slot_bytes
from slipstream.plan.memory_recordings import (
    Stage,
    guess_drafter,
    guess_target,
    may_replay_target,
    replayed_drafter,
    replayed_target,
)
from slipstream.plan.memory_target import TargetLoad, answering_items, target_items
from slipstream.plan.weights import TargetWeights

TARGET_SLOTS = 2
"""Device slots of a target: one is written while the other is copied out."""
DRAFTER_BUFFERS = 3
"""Device buffers of a drafter: one is trained on, one is there, one is being copied."""
PASSING_SLOTS = 2
"""Device slots of a colocated process for packs that are trained on once: one in use, one being made."""
RESERVE = 0.05
"""Share of a GPU that is left alone when slots are placed on it: what the allocator cannot fill, and others' use."""
DRIVER_BYTES = 640 * MIB
"""What a process takes of a GPU beside torch's allocator: the context, and the code of kernels. Not measured: an estimate."""
NCCL_BYTES, NCCL_CHANNEL_BYTES, NCCL_CHANNELS, NCCL_PEERS = 400 * MIB, 12 * MIB, 32, 2
"""What NCCL takes of a rank's GPU, outside torch's allocator: for itself, and for each channel to each neighbour in the ring, a
receive buffer of 10 MiB and a send buffer of 2 MiB. By the issues of github.com/NVIDIA/nccl: 1685, those buffers, up to 32
channels on an H100; 864, two neighbours however many ranks; 964, 544 MiB with one neighbour and 688 with two on an A100, whose
12 channels leave 400. Not measured here. NVLink multicast, where it is on, takes more."""

Device = Literal["cpu", "cuda"]
Role = Literal["colocated", "target", "drafter", "answers"]
Stages = tuple[Stage, ...]
STAGES: dict[Role, Stages] = {
    "colocated": ("target", "drafter"),
    "target": ("target",),
    "drafter": ("drafter",),
    "answers": (),
}


@dataclass(frozen=True, slots=True)
class Processes:
    """The processes of a recipe on one kind of device. `weights` are `count_target_weights(info)`, which reads files.

    `rank_slots` hold the training packs of a drafter rank, `kept_slots` those that it measures, of the rank that has most.
    `gpu_memory_bytes` is the size of a GPU; None where it is not known.
    """

    recipe: Recipe
    info: TargetInfo
    shape: DrafterShape
    weights: TargetWeights
    device: Device
    rank_slots: int = 0
    kept_slots: int = 0
    gpu_memory_bytes: int | None = None

    @property
    def slot_nbytes(self) -> int:
        """Of one slot."""
        return slot_bytes(
            pack_tokens=self.recipe.plan.pack_tokens,
            num_taps=self.shape.num_taps,
            hidden_size=self.info.hidden_size,
            dtype=self.recipe.slot_dtype,
        )

    @property
    def ranks(self) -> int:
        """Drafter ranks."""
        return self.recipe.placement.drafter_ranks

    def items(self, role: Role, *, replayed: Stages) -> tuple[MemoryItem, ...]:
        """All parts of a process, some of its stages replayed from recordings."""
        if role == "answers":
            return self._answering()
        parts: tuple[MemoryItem, ...] = ()
        if role in ("target", "colocated"):
            parts += self._target("target" in replayed, alone=role == "target")
        if role in ("drafter", "colocated"):
            parts += self._drafter("drafter" in replayed, beside_target=role == "colocated")
        return (*parts, *self._slots(role))

    def choices(self, role: Role) -> list[Stages]:
        """Which of a process's stages may be replayed, in every combination that the recipe and the device leave open."""
        wish, possible = self.recipe.placement.cuda_graphs, self._recordable(role)
        if wish == "on":
            return [possible]
        most = len(possible) if wish == "auto" else 0
        return [chosen for count in range(most + 1) for chosen in combinations(possible, count)]

    def guess(self, role: Role) -> Stages:
        """The stages that will be, as far as can be told before they are timed."""
        wish = self.recipe.placement.cuda_graphs
        likely: dict[Stage, bool] = {
            "target": guess_target(self.target_load(), wish=wish),
            "drafter": guess_drafter(self.drafter_load(), wish=wish),
        }
        return tuple(stage for stage in self._recordable(role) if likely[stage])

    def outside_bytes(self, role: Role) -> int:
        """What a process takes of its GPU beside torch's allocator; nothing on a CPU."""
        if self.device == "cpu":
            return 0
        neighbours = min(self.ranks - 1, NCCL_PEERS) if role in ("drafter", "colocated") else 0
        return DRIVER_BYTES + (NCCL_BYTES + neighbours * NCCL_CHANNELS * NCCL_CHANNEL_BYTES if neighbours else 0)

    def room(self, *, gpu_memory_bytes: int) -> int:
        """Bytes that a colocated process leaves on a GPU for slots, less a reserve."""
        parts = (*self._target("target" in self.guess("colocated"), alone=False), *self._colocated_drafter())
        taken = self.outside_bytes("colocated") + peak_moment(parts)[1]
        return int(gpu_memory_bytes * (1 - RESERVE)) - taken

    def has_slots_on_device(self) -> bool:
        """Whether all slots of a colocated process lie on its GPU. Where its size is not known, those of passing packs do."""
        if self.device == "cpu":
            return False
        if self.gpu_memory_bytes is None:
            return self.recipe.plan.replays == 1
        return fit_on_device(
            num_slots=self._device_slots(),
            slot_nbytes=self.slot_nbytes,
            room=self.room(gpu_memory_bytes=self.gpu_memory_bytes),
        )

    def target_load(self) -> TargetLoad:
        """What a target process captures."""
        return TargetLoad(
            info=self.info,
            weights=self.weights,
            tokens=self.recipe.plan.pack_tokens,
            depth=self.shape.tap_layers[-1] + 1,
            dtype=self.recipe.target.dtype,
            device=self.device,
        )

    def drafter_load(self, *, beside_target: bool = False) -> DrafterLoad:
        """What a drafter process trains on."""
        recipe, tied = self.recipe, self.info.tie_word_embeddings
        same_type = recipe.drafter.dtype == recipe.target.hidden_dtype
        return DrafterLoad(
            shape=self.shape,
            tokens=recipe.plan.pack_tokens,
            anchors=recipe.plan.pack_anchors,
            chunk_rows=recipe.objective.chunk_rows,
            dtype=recipe.drafter.dtype,
            slot_dtype=recipe.target.dtype,
            attention=recipe.drafter.attention,
            tied=tied,
            noise=bool(recipe.objective.noise_std or recipe.objective.noise_end_std),
            embedding_on_device=self.device == "cpu" or tied,
            ends_of_target=self.device == "cuda" and beside_target and tied and same_type,
        )

    def _recordable(self, role: Role) -> Stages:
        if self.device == "cpu":
            return ()
        return tuple(stage for stage in STAGES[role] if stage == "drafter" or may_replay_target(self.target_load()))

    def _target(self, replayed: bool, *, alone: bool) -> tuple[MemoryItem, ...]:
        load = self.target_load()
        items = replayed_target(load, slot_nbytes=self.slot_nbytes) if replayed else target_items(load)
        # what loading takes for a moment is over when the drafter's part of a process is built
        return tuple(item for item in items if alone or item.moments != ("loading",))

    def _drafter(self, replayed: bool, *, beside_target: bool) -> tuple[MemoryItem, ...]:
        load, recipe = self.drafter_load(beside_target=beside_target), self.recipe
        if replayed:
            items = replayed_drafter(load, several=recipe.plan.packs_per_step > self.ranks)
        else:
            items = drafter_items(load, device=self.device)
        if recipe.slot_dtype == recipe.target.hidden_dtype:
            return items
        nbytes = load.tokens * self.shape.num_taps * self.shape.hidden_size * BYTES[recipe.target.hidden_dtype]
        return (*items, MemoryItem("pack written out of its slot", nbytes, "T K D in the target's dtype", "plan.pack_tokens"))

    def _colocated_drafter(self) -> tuple[MemoryItem, ...]:
        return self._drafter("drafter" in self.guess("colocated"), beside_target=True)

    def _slots(self, role: Role) -> tuple[MemoryItem, ...]:
        if self.device == "cpu":
            return ()
        if role == "colocated" and self.has_slots_on_device():
            return (self._some_slots("slots on the device", self._device_slots()),)
        staged = {
            "target": self._some_slots("device slots", TARGET_SLOTS),
            "drafter": self._some_slots("device buffers of packs", DRAFTER_BUFFERS + bool(self.kept_slots)),
        }
        return tuple(staged[stage] for stage in STAGES[role])

    def _device_slots(self) -> int:
        passing = PASSING_SLOTS if self.recipe.plan.replays == 1 else self.rank_slots
        return passing + self.kept_slots

    def _some_slots(self, name: str, count: int) -> MemoryItem:
        return MemoryItem(name, count * self.slot_nbytes, f"{count} x T K D", "plan.pack_tokens")

    def _answering(self) -> tuple[MemoryItem, ...]:
        section = self.recipe.validation
        return answering_items(self.target_load(), batch=section.batch_size, answer_tokens=section.max_new_tokens)


def fit_on_device(*, num_slots: int, slot_nbytes: int, room: int) -> bool:
    """Whether a colocated process has its slots on the device: all of them, or none."""
    return num_slots * slot_nbytes <= room
