"""The checksum of `seals.checksum` on CUDA: one pass over the words, at the speed of memory.

P programs add up every P-th block of words each; what they found stays apart, as P numbers that add up modulo 2^64 to the
checksum, so that nothing is reduced twice and no kernel waits for another. The CPU adds them up when it reads them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

PROGRAMS = 1056
"""P: eight programs on each of 132 multiprocessors. Their numbers are 8 KB, which travel with the slot."""

_BLOCK_WORDS = 2048


@triton.jit(do_not_specialize=["num_words", "first_word"])
def _add_up(  # type: ignore[no-untyped-def]
    words, parts, num_words, first_word, rounds: tl.constexpr, onto: tl.constexpr, block: tl.constexpr
):
    program = tl.program_id(0)
    lanes = tl.arange(0, block).to(tl.int64)
    sums = tl.zeros([block], tl.int64)
    for turn in range(0, rounds):
        at = (turn * tl.num_programs(0) + program).to(tl.int64) * block + lanes
        word = tl.load(words + at, mask=at < num_words, other=0).to(tl.int64)
        sums += word * (2 * (first_word + at) + 1)
    total = tl.sum(sums, axis=0)
    if onto:
        total += tl.load(parts + program)
    tl.store(parts + program, total)


def add_up(words: torch.Tensor, *, parts_P: torch.Tensor, first_word: int, onto: bool) -> None:
    """Checksum of int32 `[W]`, counting from `first_word`, as int64 `[P]`; `onto` adds it to what stands there.

    Enqueued on the current stream; both are on the device and contiguous.
    """
    assert words.dtype == torch.int32, words.dtype
    assert parts_P.dtype == torch.int64, parts_P.dtype
    assert parts_P.shape == (PROGRAMS,), parts_P.shape
    assert words.is_contiguous()
    assert words.numel() + first_word < 2**31, "indices of words are 32 bits wide"
    rounds = triton.cdiv(words.numel(), PROGRAMS * _BLOCK_WORDS)  # known when compiled: a process has slots of one layout
    _add_up[(PROGRAMS,)](words, parts_P, words.numel(), first_word, rounds=rounds, onto=onto, block=_BLOCK_WORDS, num_warps=8)
