"""Pools of slots: the persistent memory that hidden states are written to and read from.

Each slot is a tensor with a version counter of its own. Were slots views of one tensor, writing the next pack between
forward and backward of this one would make autograd refuse; this way it still notices when one's own slot is written.

Letters: T context tokens · K tapped layers · D hidden size.
"""

from __future__ import annotations

import mmap

import torch

from slipstream.device import float8
from slipstream.device.shared import SharedMemory, tensor_over
from slipstream.transport.layout import ALIGNMENT_BYTES, WORD_BYTES, SlotLayout
from slipstream.transport.seals import checksum, make_seal

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float8_e4m3": float8.DTYPE}


class SlotPool:
    """`num_slots` slots of one layout over one mapping, zero at first; slot i starts at byte i * layout.nbytes."""

    def __init__(
        self,
        *,
        layout: SlotLayout,
        num_slots: int,
        hidden: list[torch.Tensor],
        scale: list[torch.Tensor],
        last_hidden: list[torch.Tensor],
    ) -> None:
        parts = hidden + scale + last_hidden
        assert all(part.data_ptr() % ALIGNMENT_BYTES == 0 for part in parts), "a slot is not aligned"
        self.layout, self.num_slots = layout, num_slots
        self._hidden, self._scale, self._last_hidden = hidden, scale, last_hidden

    @classmethod
    def private(cls, layout: SlotLayout, num_slots: int) -> SlotPool:
        """Slots of this process alone."""
        assert num_slots > 0, "a pool needs slots"
        return cls._over(
            mmap.mmap(-1, layout.nbytes * num_slots, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), layout, num_slots
        )

    @classmethod
    def shared(cls, layout: SlotLayout, num_slots: int, memory: SharedMemory) -> SlotPool:
        """Slots over memory that other processes map too."""
        assert memory.nbytes == layout.nbytes * num_slots, (
            f"{memory.nbytes} bytes of shared memory do not hold {num_slots} slots of {layout.nbytes}"
        )
        return cls._over(memory.mapping, layout, num_slots)

    @classmethod
    def _over(cls, mapping: mmap.mmap, layout: SlotLayout, num_slots: int) -> SlotPool:
        tokens, taps, width = layout.pack_tokens, layout.num_taps, layout.hidden_size

        def parts(dtype: torch.dtype, shape: tuple[int, ...], first_byte: int) -> list[torch.Tensor]:
            starts = [slot * layout.nbytes + first_byte for slot in range(num_slots)]
            return [tensor_over(mapping, dtype=dtype, shape=shape, offset=start) for start in starts]

        last_dtype = DTYPES[layout.last_hidden_dtype]
        return cls(
            layout=layout,
            num_slots=num_slots,
            hidden=parts(DTYPES[layout.dtype], (tokens, taps, width), 0),
            scale=parts(torch.float32, (tokens, taps), layout.scale_offset) if layout.is_scaled else [],
            last_hidden=parts(last_dtype, (tokens, width), layout.last_hidden_offset) if layout.last_hidden else [],
        )

    def hidden(self, slot: int) -> torch.Tensor:
        """Hidden states `[T, K, D]` of a slot; always the same tensor."""
        return self._hidden[slot]

    def scale(self, slot: int) -> torch.Tensor | None:
        """Scales `[T, K]` of a slot's hidden states; None where the layout has none."""
        return self._scale[slot] if self._scale else None

    def last_hidden(self, slot: int) -> torch.Tensor | None:
        """Last hidden states `[T, D]` of a slot; None where the layout has none."""
        return self._last_hidden[slot] if self._last_hidden else None

    def seal(self, slot: int, pack_id: int, generation: int) -> int:
        """Seal of what the slot holds now, all of its tensors in order."""
        total, first_word = 0, 0
        for tensors in (self._hidden, self._scale, self._last_hidden):
            if tensors:
                words = tensors[slot].view(-1).view(torch.int32)
                total += checksum(words, first_word=first_word)
                first_word += tensors[slot].nbytes // WORD_BYTES
        return make_seal(total=total, pack_id=pack_id, slot=slot, generation=generation)

    def close(self) -> None:
        """Drop the tensors; the memory goes when nobody holds one any more. May be called twice."""
        self._hidden, self._scale, self._last_hidden = [], [], []
