"""Where the bytes of a slot lie. Pure arithmetic: the supervisor sizes the memory from it without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ALIGNMENT_BYTES = 128  # a cache line pair, and what vector loads and device copies like best
WORD_BYTES = 4  # seals are taken over 32-bit words
_ELEMENT_BYTES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """One slot: hidden `[T, K, D]`, then, if asked for, last hidden `[T, D]`, each starting at a multiple of 128 bytes."""

    pack_tokens: int
    num_taps: int
    hidden_size: int
    dtype: Literal["bfloat16", "float32"]
    last_hidden: bool = False

    def __post_init__(self) -> None:
        assert self.dtype in _ELEMENT_BYTES, f"slots hold {sorted(_ELEMENT_BYTES)}, not {self.dtype}"
        assert min(self.pack_tokens, self.num_taps, self.hidden_size) > 0, f"empty slot: {self}"
        parts = (self.hidden_bytes, self.last_hidden_bytes)
        assert all(part % WORD_BYTES == 0 for part in parts), f"a slot is sealed in whole 32-bit words: {self}"

    @property
    def hidden_bytes(self) -> int:
        """Bytes of hidden `[T, K, D]`."""
        return self.pack_tokens * self.num_taps * self.hidden_size * _ELEMENT_BYTES[self.dtype]

    @property
    def last_hidden_bytes(self) -> int:
        """Bytes of last hidden `[T, D]`; 0 without it."""
        return self.pack_tokens * self.hidden_size * _ELEMENT_BYTES[self.dtype] if self.last_hidden else 0

    @property
    def last_hidden_offset(self) -> int:
        """First byte of last hidden within the slot."""
        return _aligned(self.hidden_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes of a slot, alignment included: slot i starts at byte i * nbytes of its pool."""
        return self.last_hidden_offset + _aligned(self.last_hidden_bytes)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
