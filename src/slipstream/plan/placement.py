"""Who owns which column, and which processes a recipe starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slipstream.config.recipe import PlacementSection
from slipstream.errors import PlanError

Mode = Literal["colocated", "split"]
Role = Literal["colocated", "target", "drafter"]
Device = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process of a run. `gpu` is its index among the visible ones; none on a CPU."""

    role: Role
    rank: int
    gpu: int | None


@dataclass(frozen=True, slots=True)
class Placement:
    """A recipe's placement, resolved for a machine."""

    mode: Mode
    processes: tuple[ProcessSpec, ...]


def owned_columns(*, rank: int, ranks: int, num_columns: int) -> tuple[int, ...]:
    """Columns of drafter rank `rank` of `ranks`: rank, rank + ranks, … Raises `PlanError` if that is uneven."""
    if num_columns % ranks:
        below, above = num_columns // ranks * ranks, -(-num_columns // ranks) * ranks
        raise PlanError(
            key="plan.packs_per_step",
            value=num_columns,
            rule=f"must be a multiple of placement.drafter_ranks ({ranks})",
            hint=f"nearest: {below} or {above}" if below else f"nearest: {above}",
        )
    assert 0 <= rank < ranks, (rank, ranks)
    return tuple(range(rank, num_columns, ranks))


def resolve_placement(*, placement: PlacementSection, device: Device, num_devices: int) -> Placement:
    """The processes of a run on a machine with `num_devices` GPUs, or cores where `device` is "cpu".

    Automatic mode splits if there are two devices at least. GPUs that are not named are given out in order, targets
    first, round and round if there are too few. Raises `PlanError` when GPUs are named that are not there or that do not
    match the number of processes.
    """
    automatic: Mode = "split" if num_devices >= 2 else "colocated"
    mode: Mode = automatic if placement.mode == "auto" else placement.mode
    targets = placement.target_workers if mode == "split" else 0
    named: dict[str, tuple[tuple[int, ...] | None, int]] = {
        "target_gpus": (placement.target_gpus if targets else None, targets),
        "drafter_gpus": (placement.drafter_gpus, placement.drafter_ranks),
    }
    first, processes = 0, []
    for key, (gpus, count) in named.items():
        role: Role = "target" if key == "target_gpus" else "drafter" if mode == "split" else "colocated"
        if gpus is not None:
            _check_gpus(key=key, gpus=gpus, count=count, num_gpus=num_devices if device == "cuda" else 0)
        for rank in range(count):
            gpu = gpus[rank] if gpus is not None else (first + rank) % num_devices
            processes.append(ProcessSpec(role=role, rank=rank, gpu=gpu if device == "cuda" else None))
        first += count
    return Placement(mode=mode, processes=tuple(processes))


def _check_gpus(*, key: str, gpus: tuple[int, ...], count: int, num_gpus: int) -> None:
    if len(gpus) != count or max(gpus) >= num_gpus or min(gpus) < 0:
        raise PlanError(
            key=f"placement.{key}",
            value=list(gpus),
            rule=f"must name one of the {num_gpus} visible GPUs for each of {count} processes",
            hint="leave it out to have GPUs given out in order",
        )
