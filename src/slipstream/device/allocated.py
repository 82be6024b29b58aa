"""What a process took of its GPU's memory, at most: asked at its end, and compared with the plan."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class AllocatedMemory:
    """Bytes: `peak_bytes` that torch's allocator had handed out at most, `reserved_bytes` that it had of the driver at most.

    `outside_bytes` is what else is taken on the device now: the context, kernels' code, and other processes.
    """

    peak_bytes: int
    reserved_bytes: int
    outside_bytes: int

    def as_dict(self) -> dict[str, int]:
        """For JSON."""
        return asdict(self)


def allocated_memory() -> AllocatedMemory | None:
    """Since the process began, or since the peak was reset; None where the process has used no GPU."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    free, total = torch.cuda.mem_get_info()
    return AllocatedMemory(
        peak_bytes=int(torch.cuda.max_memory_allocated()),
        reserved_bytes=int(torch.cuda.max_memory_reserved()),
        outside_bytes=int(total - free - torch.cuda.memory_reserved()),
    )


def off_by(*, predicted: int, measured: int) -> float:
    """The prediction's error as a share of what was measured: above 0 where too much was predicted."""
    return predicted / measured - 1.0
