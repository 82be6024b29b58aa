"""What a process took of its GPU's memory, at most: asked at its end, and compared with the plan.

Recordings keep what they allocate in pools of their own, of which torch's allocator counts as handed out only what tensors
hold at the moment: next to nothing while they are replayed. `Taken` adds what they keep.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class AllocatedMemory:
    """Bytes: `peak_bytes` that torch's allocator had handed out at most, with what recordings keep beside; `reserved_bytes`
    that it had of the driver at most.

    `recordings_bytes` are the recordings' share of the peak; `replayed` the stages that have some ("target", "drafter").
    `outside_bytes` is what else is taken on the device now: the context, kernels' code, NCCL's buffers, other processes.
    """

    peak_bytes: int
    reserved_bytes: int
    outside_bytes: int
    recordings_bytes: int = 0
    replayed: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


class Taken:
    """The peaks of this process on its device, over recordings that are made in between."""

    def __init__(self) -> None:
        self._peak = self._reserved = self._kept = 0
        self._replayed: set[str] = set()

    @property
    def kept_bytes(self) -> int:
        """What recordings keep and no tensor holds."""
        return self._kept

    @property
    def replayed(self) -> tuple[str, ...]:
        """Stages that have recordings, in the order of the flow."""
        return tuple(stage for stage in ("target", "drafter") if stage in self._replayed)

    def keep(self, nbytes: int, *, stage: str, peak: int, reserved: int) -> None:
        """A recording of a stage keeps so many bytes more, or fewer, that no tensor holds; its making is over.

        `peak` and `reserved` are torch's peaks until now; the caller resets them, so that they can be told from later ones.
        """
        self._peak = self.peak(peak)
        self._reserved = max(self._reserved, reserved)
        self._kept += nbytes
        self._replayed.add(stage)

    def peak(self, since: int) -> int:
        """The peak of all, from torch's since the last recording."""
        return max(self._peak, since + self._kept)

    def reserved(self, since: int) -> int:
        """The most that was reserved, from torch's peak since the last recording."""
        return max(self._reserved, since)

    def forget_peaks(self) -> None:
        """Begin new peaks."""
        self._peak = self._reserved = 0


_taken = Taken()


def keep_recording(nbytes: int, *, stage: str) -> None:
    """Count what a recording keeps, whose stage ("target" or "drafter") has just been recorded. Resets torch's own peaks."""
    torch: Any = sys.modules["torch"]
    _taken.keep(nbytes, stage=stage, peak=torch.cuda.max_memory_allocated(), reserved=torch.cuda.max_memory_reserved())
    torch.cuda.reset_peak_memory_stats()


def forget_peaks() -> None:
    """Begin new peaks, on the current device."""
    torch: Any = sys.modules["torch"]
    _taken.forget_peaks()
    torch.cuda.reset_peak_memory_stats()


def allocated_memory() -> AllocatedMemory | None:
    """Since the process began, or since peaks were forgotten; None where the process has used no GPU."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    free, total = torch.cuda.mem_get_info()
    return AllocatedMemory(
        peak_bytes=_taken.peak(int(torch.cuda.max_memory_allocated())),
        reserved_bytes=_taken.reserved(int(torch.cuda.max_memory_reserved())),
        outside_bytes=int(total - free - torch.cuda.memory_reserved()),
        recordings_bytes=_taken.kept_bytes,
        replayed=_taken.replayed,
    )


def off_by(*, predicted: int, measured: int) -> float:
    """The prediction's error as a share of what was measured: above 0 where too much was predicted."""
    return predicted / measured - 1.0
