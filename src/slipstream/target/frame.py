"""What the kernels of one forward must know of its rows, made on the CPU and sent in one copy.

Shape letters: R rows of a forward · L tokens of a row · M sequences · C chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from slipstream.records import Int32Array
from slipstream.target.layouts import Forward, chunk_indices

ALIGNMENT = 32
"""int32 values in 128 bytes: a view that begins elsewhere can make Triton compile its kernels again."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A forward's inputs and borders, int32 on the device; `longest` stays on the CPU, where kernels are launched from.

    `token_ids_RL`, `position_ids_RL`; `cu_seqlens_M` `[M + 1]` ends at R · L; `chunks_C2` as `layouts.chunk_indices`;
    `num_tokens` `[1]`, the real tokens of a packed row. `compiled`: whether elementwise work runs compiled for this shape.
    """

    token_ids_RL: Tensor
    position_ids_RL: Tensor
    cu_seqlens_M: Tensor
    chunks_C2: Tensor
    num_tokens: Tensor
    longest: int
    compiled: bool


def send_frame(forward: Forward, *, num_tokens: int, device: torch.device, compiled: bool) -> Frame:
    """One pinned buffer, one copy on the current stream, five views. Nothing waits for it, and no kernel computes it.

    PyTorch's pinned allocator holds the buffer back until its copy has finished, and hands the same few out again.
    """
    chunks = chunk_indices(forward.cu_seqlens)
    parts: tuple[np.ndarray, ...] = (
        forward.token_ids.ravel(),
        forward.position_ids.ravel(),
        forward.cu_seqlens,
        chunks.ravel(),
        np.array([num_tokens]),
    )
    buffer, begins = _join(parts)
    host = torch.from_numpy(buffer)
    sent = host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
    ids, positions, borders, chunk_pairs, count = (
        sent[begin : begin + len(part)] for begin, part in zip(begins, parts, strict=True)
    )
    return Frame(
        token_ids_RL=ids.view(forward.token_ids.shape),
        position_ids_RL=positions.view(forward.token_ids.shape),
        cu_seqlens_M=borders,
        chunks_C2=chunk_pairs.view(chunks.shape),
        num_tokens=count,
        longest=forward.longest,
        compiled=compiled,
    )


def _join(parts: tuple[np.ndarray, ...]) -> tuple[Int32Array, list[int]]:
    begins, end = [], 0
    for part in parts:
        begins.append(end)
        end += -(-len(part) // ALIGNMENT) * ALIGNMENT
    buffer = np.zeros(end, dtype=np.int32)
    for begin, part in zip(begins, parts, strict=True):
        buffer[begin : begin + len(part)] = part
    return buffer, begins
