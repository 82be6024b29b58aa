"""What is done to slots on a device: copy them, and add up their words. Each call only enqueues, on the current stream.

Written against by `departures` and `arrivals`; the event-order model puts operations in place that note down every access.

Shape letters: T context tokens · K tapped layers · D hidden size · P parts of a checksum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from slipstream.transport.layout import WORD_BYTES, SlotLayout
from slipstream.transport.seals import checksum
from slipstream.transport.slots import DTYPES


@dataclass(frozen=True, slots=True, eq=False)
class DeviceSlot:
    """Memory on the device for one pack, persistent: `[T, K, D]`, `[T, D]` or none, and its checksum int64 `[P]`.

    `scale_TK` fp32 where hidden states are e4m3. The parts of a checksum add up to it modulo 2^64.
    """

    hidden_TKD: torch.Tensor
    last_hidden_TD: torch.Tensor | None
    parts_P: torch.Tensor
    scale_TK: torch.Tensor | None = None


class Operations(Protocol):
    """The work on slots, on one device."""

    num_parts: int
    """P."""

    def copy(self, *, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy one tensor into another of its shape and type, to, from or on the device."""
        ...

    def add_up(self, slot: DeviceSlot, *, parts_P: torch.Tensor) -> None:
        """Checksum of what the slot holds, all of its tensors in order, into `parts_P` on the device."""
        ...

    def read(self, parts_P: torch.Tensor) -> int:
        """A checksum in host memory, once an event has told that it is there: modulo 2^64. Runs on the CPU, at once."""
        ...


class CudaOperations:
    """The operations on CUDA: asynchronous copies from and to page-locked memory, and the kernel of `seal_kernel`."""

    def __init__(self) -> None:
        from slipstream.transport import seal_kernel  # here, not above: there is no Triton without a GPU

        self._kernel = seal_kernel
        self.num_parts = seal_kernel.PROGRAMS

    def copy(self, *, target: torch.Tensor, source: torch.Tensor) -> None:
        """Contract: `Operations.copy`."""
        target.copy_(source, non_blocking=True)

    def add_up(self, slot: DeviceSlot, *, parts_P: torch.Tensor) -> None:
        """Contract: `Operations.add_up`."""
        first_word = 0
        for tensor in tensors_of(slot):
            words = tensor.view(-1).view(torch.int32)
            self._kernel.add_up(words, parts_P=parts_P, first_word=first_word, onto=first_word > 0)
            first_word += words.numel()

    def read(self, parts_P: torch.Tensor) -> int:
        """Contract: `Operations.read`."""
        return sum_of_parts(parts_P)


def tensors_of(slot: DeviceSlot) -> list[torch.Tensor]:
    """The slot's one to three tensors, in the order in which they are sealed."""
    return [part for part in (slot.hidden_TKD, slot.scale_TK, slot.last_hidden_TD) if part is not None]


def sum_of_parts(parts_P: torch.Tensor) -> int:
    """int64 addition wraps, which is the modulus wanted."""
    return int(parts_P.sum()) % (1 << 64)


def plain_checksum(slot: DeviceSlot) -> int:
    """What `add_up` must find, on the CPU, for a slot that lies there: the oracle, and the model's own."""
    total, first_word = 0, 0
    for tensor in tensors_of(slot):
        total += checksum(tensor.view(-1).view(torch.int32), first_word=first_word)
        first_word += tensor.nbytes // WORD_BYTES
    return total % (1 << 64)


def device_slots(layout: SlotLayout, num_slots: int, *, operations: Operations, device: torch.device) -> list[DeviceSlot]:
    """Zeroed slots on the device, for good.

    Each is a tensor of its own, with its own version counter, made outside inference mode: it can be saved for backward
    while others are written. Their checksums are taken once, which compiles the kernel before anything waits for it.
    """
    tokens, taps, width = layout.pack_tokens, layout.num_taps, layout.hidden_size
    last_dtype = DTYPES[layout.last_hidden_dtype]
    with torch.inference_mode(False):
        slots = [
            DeviceSlot(
                hidden_TKD=torch.zeros(tokens, taps, width, dtype=DTYPES[layout.dtype], device=device),
                last_hidden_TD=torch.zeros(tokens, width, dtype=last_dtype, device=device) if layout.last_hidden else None,
                parts_P=torch.zeros(operations.num_parts, dtype=torch.int64, device=device),
                scale_TK=torch.zeros(tokens, taps, device=device) if layout.is_scaled else None,
            )
            for _ in range(num_slots)
        ]
    for slot in slots:
        operations.add_up(slot, parts_P=slot.parts_P)
    return slots
