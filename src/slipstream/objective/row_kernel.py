"""The row pass of the cross-entropy as one Triton kernel: a chunk's logits become its losses, hits and softmax - onehot.

A program reads its row twice and writes it once, in place: for R rows of V logits of s bytes 2 R V s read, R V s written.
The second read comes from L2 as far as the rows in flight fit in it. One exponential an element for each read.

Shape letters: R rows of a chunk · V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

GROUP = tl.constexpr(8)
"""Neighbouring logits whose maximum a thread takes before it rescales: 16 bytes of bf16, one load."""

LOWEST = tl.constexpr(-3.0e38)
"""Stands for minus infinity where nothing was read yet: infinite maxima would make exp(-inf + inf) of it."""

MAX_BLOCK = 16384
"""Logits that a program has in flight: 32 KiB of bf16, enough to keep a multiprocessor's share of memory busy."""


@triton.jit
def _row_pass(  # type: ignore[no-untyped-def]
    logits,
    labels,
    loss,
    hit,
    vocabulary: tl.constexpr,
    gradient: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocabulary
    label = tl.load(labels + row)
    lanes: tl.constexpr = block // GROUP
    inside = tl.arange(0, lanes)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    top = tl.full([lanes], LOWEST, tl.float32)
    total = tl.zeros([lanes], tl.float32)
    for first in range(0, vocabulary, block):
        at = first + inside
        score = tl.load(logits + at, mask=at < vocabulary, other=LOWEST).to(tl.float32)
        above = tl.maximum(top, tl.max(score, axis=1))
        total = total * tl.exp(top - above) + tl.sum(tl.exp(score - above[:, None]), axis=1)
        top = above
    best = tl.max(top, axis=0)
    log_sum = best + tl.log(tl.sum(total * tl.exp(top - best), axis=0))
    own = tl.load(logits + label).to(tl.float32)
    tl.debug_barrier()  # `own` is read before any thread overwrites the row
    earlier = tl.zeros([lanes], tl.int32)
    for first in range(0, vocabulary, block):
        at = first + inside
        score = tl.load(logits + at, mask=at < vocabulary, other=LOWEST).to(tl.float32)
        earlier += tl.sum(((score == best) & (at < label)).to(tl.int32), axis=1)
        if gradient:
            unit = tl.exp(score - log_sum) - (at == label).to(tl.float32)
            tl.store(logits + at, unit.to(logits.dtype.element_ty), mask=at < vocabulary)
    tl.store(loss + row, log_sum - own)
    # of equal largest logits the first is the argmax; a row with NaN has none
    tl.store(hit + row, (own == best) & (tl.sum(earlier, axis=0) == 0) & (log_sum == log_sum))


def row_pass(
    logits_RV: torch.Tensor, labels_R: torch.Tensor, *, loss_R: torch.Tensor, hit_R: torch.Tensor, gradient: bool
) -> None:
    """Loss (fp32) and hit (bool) of each row into `loss_R` and `hit_R`; with `gradient`, logits become softmax - onehot.

    All are contiguous and on one device; the subtraction is made in fp32, before rounding. A row with NaN has loss NaN.
    """
    rows, vocabulary = logits_RV.shape
    block = min(MAX_BLOCK, max(128, triton.next_power_of_2(vocabulary)))
    warps = max(1, min(32, block // 512))
    _row_pass[(rows,)](
        logits_RV, labels_R, loss_R, hit_R, vocabulary=vocabulary, gradient=gradient, block=block, num_warps=warps
    )
