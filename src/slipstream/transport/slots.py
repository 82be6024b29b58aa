"""Pools of slots: the persistent memory that hidden states are written to and read from.

Each slot is a tensor with a version counter of its own. Were slots views of one tensor, writing the next pack between
forward and backward of this one would make autograd refuse; this way it still notices when one's own slot is written.

Letters: T context tokens · K tapped layers · D hidden size.
"""

from __future__ import annotations

import mmap

import torch

from slipstream.device.shared import SharedMemory, tensor_over
from slipstream.transport.layout import ALIGNMENT_BYTES, WORD_BYTES, SlotLayout
from slipstream.transport.seals import checksum, make_seal

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class SlotPool:
    """`num_slots` slots of one layout over one mapping, zero at first; slot i starts at byte i * layout.nbytes."""

    def __init__(
        self, *, layout: SlotLayout, num_slots: int, hidden: list[torch.Tensor], last_hidden: list[torch.Tensor]
    ) -> None:
        assert all(slot.data_ptr() % ALIGNMENT_BYTES == 0 for slot in hidden + last_hidden), "a slot is not aligned"
        self.layout, self.num_slots = layout, num_slots
        self._hidden, self._last_hidden = hidden, last_hidden

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
        dtype = DTYPES[layout.dtype]
        taps = (layout.pack_tokens, layout.num_taps, layout.hidden_size)
        last = (layout.pack_tokens, layout.hidden_size)
        starts = [i * layout.nbytes for i in range(num_slots)]
        hidden = [tensor_over(mapping, dtype=dtype, shape=taps, offset=start) for start in starts]
        last_hidden = (
            [tensor_over(mapping, dtype=dtype, shape=last, offset=start + layout.last_hidden_offset) for start in starts]
            if layout.last_hidden
            else []
        )
        return cls(layout=layout, num_slots=num_slots, hidden=hidden, last_hidden=last_hidden)

    def hidden(self, slot: int) -> torch.Tensor:
        """Hidden states `[T, K, D]` of a slot; always the same tensor."""
        return self._hidden[slot]

    def last_hidden(self, slot: int) -> torch.Tensor | None:
        """Last hidden states `[T, D]` of a slot; None where the layout has none."""
        return self._last_hidden[slot] if self._last_hidden else None

    def seal(self, slot: int, pack_id: int, generation: int) -> int:
        """Seal of what the slot holds now, all of its tensors in order."""
        total, first_word = 0, 0
        for tensors in (self._hidden, self._last_hidden):
            if tensors:
                words = tensors[slot].view(-1).view(torch.int32)
                total += checksum(words, first_word=first_word)
                first_word += tensors[slot].nbytes // WORD_BYTES
        return make_seal(total=total, pack_id=pack_id, slot=slot, generation=generation)

    def close(self) -> None:
        """Drop the tensors; the memory goes when nobody holds one any more. May be called twice."""
        self._hidden, self._last_hidden = [], []
