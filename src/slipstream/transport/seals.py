"""Seals: a checksum of a slot's bytes, bound to the pack, slot and generation they belong to.

checksum = sum over i of word_i * (2i + 1) mod 2^64, word_i the i-th 32-bit word read as a signed integer. The factor is
odd, so any flipped bit shows; it differs from word to word, so rows that changed places show, which a plain sum misses.
Binding it to the generation tells a slot that is stale but whole from the one that was sealed.
"""

from __future__ import annotations

import torch

_MASK = (1 << 64) - 1
# One block of words is widened to 64 bit at a time, never the whole slot. A block stays below the 32,768 elements from
# which torch shares an operator out over threads: on busy cores the barriers cost more than ten times the sums.
_BLOCK_ROWS, _ROW_WORDS = 7, 4096


def checksum(words: torch.Tensor, *, first_word: int = 0) -> int:
    """Sum of word_i * (2i + 1) mod 2^64 over int32 `[W]`, i counting from `first_word`.

    With i = row * R + column: the sum needs only the sums of rows and of columns, so no word is multiplied.
    """
    assert words.dtype == torch.int32, f"a checksum is taken over int32 words, not {words.dtype}"
    assert words.dim() == 1, f"a checksum is taken over a flat tensor, not {tuple(words.shape)}"
    num_rows = words.numel() // _ROW_WORDS
    head, tail = words[: num_rows * _ROW_WORDS].view(num_rows, _ROW_WORDS), words[num_rows * _ROW_WORDS :]
    with torch.no_grad():
        wide = torch.empty(min(num_rows, _BLOCK_ROWS), _ROW_WORDS, dtype=torch.int64)
        columns = torch.zeros(_ROW_WORDS, dtype=torch.int64)
        rows = torch.empty(num_rows, dtype=torch.int64)
        for start in range(0, num_rows, _BLOCK_ROWS):
            block = head[start : start + _BLOCK_ROWS]
            block_wide = wide[: len(block)].copy_(block)
            columns.add_(block_wide.sum(0))
            torch.sum(block_wide, 1, out=rows[start : start + len(block)])
        total = _weighted(columns, first=0) + 2 * _ROW_WORDS * int((rows * torch.arange(num_rows)).sum())
        total += _weighted(tail.to(torch.int64), first=num_rows * _ROW_WORDS)
        plain = int(rows.sum()) + int(tail.sum(dtype=torch.int64))
    return (total + 2 * first_word * plain) & _MASK


def make_seal(*, total: int, pack_id: int, slot: int, generation: int) -> int:
    """The 64-bit seal: checksum and identity mixed by the finaliser of SplitMix64 (Steele, Lea, Flood 2014)."""
    state = total & _MASK
    for part in (pack_id, slot, generation):
        state = _mixed(state ^ _mixed((part + 0x9E3779B97F4A7C15) & _MASK))
    return state


def _weighted(words: torch.Tensor, *, first: int) -> int:
    """Sum of word_i * (2i + 1) over int64 `[W]`, i from `first`; int64 wraps, which is the modulus wanted."""
    return int((words * torch.arange(2 * first + 1, 2 * (first + len(words)) + 1, 2)).sum())


def _mixed(state: int) -> int:
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)
