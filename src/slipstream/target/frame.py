"""What the kernels of one forward must know of its rows, made on the CPU and sent in one copy.

Shape letters: R rows of a forward · L tokens of a row · M sequences · C chunks.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from slipstream.records import Int32Array
from slipstream.target.layouts import Forward, chunk_indices

ALIGNMENT = 32
"""int32 values in 128 bytes: a view that begins elsewhere can make Triton compile its kernels again."""
FRAMES_IN_FLIGHT = 8
"""Page-locked buffers that a ring begins with. A loop's slots hold it back before it is so far ahead of the device."""


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


@dataclass(frozen=True, slots=True)
class FrameSize:
    """What packed frames are filled up to, so that kernels are launched alike for all of them: `num_sequences` borders' worth
    of sequences, none longer than `longest` tokens. Sequences that are not there are empty, and end where the row ends.
    """

    num_sequences: int
    longest: int

    def holds(self, cu_seqlens: Int32Array, *, num_tokens: int) -> bool:
        """Whether a packed row with these borders can be filled up; its padding is cut as often as need be."""
        documents = cu_seqlens[cu_seqlens <= num_tokens]
        needed = sequences_of(len(documents) - 1, padding=int(cu_seqlens[-1]) - num_tokens, longest=self.longest)
        return needed <= self.num_sequences and int(np.diff(documents).max(initial=0)) <= self.longest

    def filled(self, cu_seqlens: Int32Array, *, num_tokens: int) -> Int32Array:
        """The borders, int32 `[M + 1]`, of a row that the size holds."""
        assert self.holds(cu_seqlens, num_tokens=num_tokens), f"{self} does not hold {cu_seqlens}"
        end = int(cu_seqlens[-1])
        documents = cu_seqlens[cu_seqlens <= num_tokens]
        cuts = np.arange(num_tokens + self.longest, end, self.longest, dtype=np.int32)
        borders = np.full(self.num_sequences + 1, end, dtype=np.int32)
        borders[: len(documents)] = documents
        borders[len(documents) : len(documents) + len(cuts)] = cuts
        return borders


def sequences_of(num_documents: int, *, padding: int, longest: int) -> int:
    """Sequences of a row: its documents, and its padding tokens in pieces of at most `longest`."""
    return num_documents + -(-padding // longest)


@dataclass(slots=True)
class _HostBuffer:
    """Page-locked int32 values; `sent` is recorded behind the copy that reads them."""

    values: Tensor
    sent: torch.cuda.Event


@dataclass(slots=True)
class FrameRing:
    """Page-locked buffers for frames of each size, made when a size first comes, then kept and taken in turn.

    Room for the worst case of a size, documents of one token, and one size for all frames of the same power of two: so what
    is allocated, on the host and on the device, does not depend on how many documents a pack has.
    """

    device: torch.device
    _buffers: dict[int, deque[_HostBuffer]] = field(default_factory=dict)

    def send(self, values: Int32Array, *, num_tokens: int, memory: Tensor | None = None) -> Tensor:
        """The values on the device, in `memory` or in new one, copied on the current stream.

        A ring whose oldest copy still runs gets one buffer more.
        """
        size = 1 << (num_tokens - 1).bit_length()
        if size not in self._buffers:
            self._buffers[size] = deque(self._buffer(size) for _ in range(FRAMES_IN_FLIGHT))
        ring = self._buffers[size]
        buffer = ring.popleft() if ring[0].sent.query() else self._buffer(size)
        host = buffer.values[: len(values)]
        host.copy_(torch.from_numpy(values))
        sent = (torch.empty_like(buffer.values, device=self.device) if memory is None else memory)[: len(values)]
        sent.copy_(host, non_blocking=True)
        buffer.sent.record()
        ring.append(buffer)
        return sent

    @staticmethod
    def _buffer(size: int) -> _HostBuffer:
        values = torch.empty(frame_values(size), dtype=torch.int32, pin_memory=True)
        return _HostBuffer(values=values, sent=torch.cuda.Event())


def send_frame(
    forward: Forward,
    *,
    num_tokens: int,
    ring: FrameRing | None,
    compiled: bool,
    size: FrameSize | None = None,
    memory: Tensor | None = None,
) -> Frame:
    """One buffer, one copy on the current stream, five views. Nothing waits for it, and no kernel computes it.

    Without a ring everything stays where it is made, on the CPU. With a `size` borders are filled up to it. With a `memory`,
    of `frame_values` int32 at least, the frame lies there: frames of one size have all but their chunks at the same places.
    """
    borders = forward.cu_seqlens if size is None else size.filled(forward.cu_seqlens, num_tokens=num_tokens)
    chunks = chunk_indices(borders)
    parts: tuple[np.ndarray, ...] = (
        forward.token_ids.ravel(),
        forward.position_ids.ravel(),
        np.array([num_tokens]),
        borders,
        chunks.ravel(),
    )
    buffer, begins = _join(parts)
    if ring is not None:
        sent = ring.send(buffer, num_tokens=forward.token_ids.size, memory=memory)
    else:
        sent = torch.from_numpy(buffer) if memory is None else memory[: len(buffer)].copy_(torch.from_numpy(buffer))
    ids, positions, count, sequences, chunk_pairs = (
        sent[begin : begin + len(part)] for begin, part in zip(begins, parts, strict=True)
    )
    return Frame(
        token_ids_RL=ids.view(forward.token_ids.shape),
        position_ids_RL=positions.view(forward.token_ids.shape),
        cu_seqlens_M=sequences,
        chunks_C2=chunk_pairs.view(chunks.shape),
        num_tokens=count,
        longest=forward.longest if size is None else size.longest,
        compiled=compiled,
    )


def frame_values(num_tokens: int) -> int:
    """int32 values of the largest frame, documents of one token, with as many tokens or as the next power of two."""
    return 6 * (1 << (num_tokens - 1).bit_length()) + 8 * ALIGNMENT


def _join(parts: tuple[np.ndarray, ...]) -> tuple[Int32Array, list[int]]:
    begins, end = [], 0
    for part in parts:
        begins.append(end)
        end += -(-len(part) // ALIGNMENT) * ALIGNMENT
    buffer = np.zeros(end, dtype=np.int32)
    for begin, part in zip(begins, parts, strict=True):
        buffer[begin : begin + len(part)] = part
    return buffer, begins
