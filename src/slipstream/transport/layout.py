"""Where the bytes of a slot lie. Pure arithmetic: the supervisor sizes the memory from it without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ALIGNMENT_BYTES = 128  # a cache line pair, and what vector loads and device copies like best
WORD_BYTES = 4  # seals are taken over 32-bit words
_ELEMENT_BYTES = {"bfloat16": 2, "float32": 4, "float8_e4m3": 1}
_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """One slot: hidden `[T, K, D]`, scales `[T, K]` where that is e4m3, and, if asked for, last hidden `[T, D]`.

    Each starts at a multiple of 128 bytes. Scales are fp32; last hidden beside e4m3 is bf16.
    """

    pack_tokens: int
    num_taps: int
    hidden_size: int
    dtype: Literal["bfloat16", "float32", "float8_e4m3"]
    last_hidden: bool = False

    def __post_init__(self) -> None:
        assert self.dtype in _ELEMENT_BYTES, f"slots hold {sorted(_ELEMENT_BYTES)}, not {self.dtype}"
        assert min(self.pack_tokens, self.num_taps, self.hidden_size) > 0, f"empty slot: {self}"
        parts = (self.hidden_bytes, self.scale_bytes, self.last_hidden_bytes)
        assert all(part % WORD_BYTES == 0 for part in parts), f"a slot is sealed in whole 32-bit words: {self}"

    @property
    def hidden_bytes(self) -> int:
        """Bytes of hidden `[T, K, D]`."""
        return self.pack_tokens * self.num_taps * self.hidden_size * _ELEMENT_BYTES[self.dtype]

    @property
    def is_scaled(self) -> bool:
        """Whether values count only together with their scales."""
        return self.dtype == "float8_e4m3"

    @property
    def scale_bytes(self) -> int:
        """Bytes of scales `[T, K]`; 0 without them."""
        return self.pack_tokens * self.num_taps * _SCALE_BYTES if self.is_scaled else 0

    @property
    def scale_offset(self) -> int:
        """First byte of the scales within the slot."""
        return _aligned(self.hidden_bytes)

    @property
    def last_hidden_dtype(self) -> Literal["bfloat16", "float32"]:
        """Type of last hidden."""
        return "float32" if self.dtype == "float32" else "bfloat16"

    @property
    def last_hidden_bytes(self) -> int:
        """Bytes of last hidden `[T, D]`; 0 without it."""
        return self.pack_tokens * self.hidden_size * _ELEMENT_BYTES[self.last_hidden_dtype] if self.last_hidden else 0

    @property
    def last_hidden_offset(self) -> int:
        """First byte of last hidden within the slot."""
        return self.scale_offset + _aligned(self.scale_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes of a slot, alignment included: slot i starts at byte i * nbytes of its pool."""
        return self.last_hidden_offset + _aligned(self.last_hidden_bytes)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
