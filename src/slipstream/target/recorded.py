"""Packed forwards as recordings: what a pack launches kernel by kernel otherwise, in one launch and a copy.

A recording reads its frame from memory that stays and writes a slot of its own, from which the pack's is copied: that costs
a hundredth of the time of a forward that is worth recording, and one recording serves all slots, wherever they lie. Borders
are filled up with empty sequences to one of a few sizes, so that the same kernels are launched for every pack of a size, and
kernels of attention give a sequence the same bits whatever others there are. The kernels are those of a launched forward.

Shape letters as in `capture`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from slipstream.device.recorder import Recorder, Recording
from slipstream.target.capture import SlotWriter
from slipstream.target.engine import Engine
from slipstream.target.frame import Frame, FrameSize, frame_values
from slipstream.target.layouts import Forward


@dataclass(frozen=True, slots=True, eq=False)
class SlotMemory:
    """Where a pack's hidden states go: `[T, K, D]`; `scale_TK` with e4m3; `last_hidden_TD` where the target gives them."""

    hidden_TKD: Tensor
    scale_TK: Tensor | None = None
    last_hidden_TD: Tensor | None = None

    @property
    def parts(self) -> tuple[Tensor | None, ...]:
        """All three, in a fixed order."""
        return self.hidden_TKD, self.scale_TK, self.last_hidden_TD

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts if part is not None)

    def is_like(self, other: SlotMemory) -> bool:
        """Whether both have the same parts, of the same types and shapes."""
        pairs = list(zip(self.parts, other.parts, strict=True))
        return all(_is_like(ours, theirs) for ours, theirs in pairs)

    def copy(self, other: SlotMemory) -> None:
        """Take over what another one holds, on the current stream."""
        for to, of in zip(self.parts, other.parts, strict=True):
            if to is not None and of is not None:
                to.copy_(of, non_blocking=True)


class RecordedForwards:
    """Recordings of one size of pack, one for each of `sizes`. Records when it is made, in warm-up.

    `slot` is theirs from then on. `example` is a packed row of `num_tokens` real tokens that every size holds.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        writer: SlotWriter,
        sizes: Sequence[FrameSize],
        slot: SlotMemory,
        example: Forward,
        num_tokens: int,
        recorder: Recorder,
    ) -> None:
        self._engine, self._writer, self._slot = engine, writer, slot
        counted = writer.bad_rows.clone()
        with torch.inference_mode():
            values = frame_values(len(slot.hidden_TKD))
            self._memory = torch.zeros(values, dtype=torch.int32, device=slot.hidden_TKD.device)
            self._recordings: dict[FrameSize, Recording] = {}
            for size in sorted(sizes, key=lambda size: size.num_sequences):
                work = partial(self._run, self._send(example, num_tokens=num_tokens, size=size))
                recorder.try_out(work)
                self._recordings[size] = recorder.record(work)
            writer.bad_rows.copy_(counted)

    @property
    def nbytes(self) -> int:
        """Of the frame and the slot; what recordings allocate is counted by their recorder."""
        return self._memory.nbytes + self._slot.nbytes

    def replay(self, forward: Forward, *, num_tokens: int, slot: SlotMemory) -> bool:
        """Compute a packed row into a slot, bad rows counted. False, and nothing done, for one that was not recorded for."""
        if not slot.is_like(self._slot) or forward.token_ids.shape != (1, len(slot.hidden_TKD)):
            return False
        borders = forward.cu_seqlens
        size = next((size for size in self._recordings if size.holds(borders, num_tokens=num_tokens)), None)
        if size is None:
            return False
        self._send(forward, num_tokens=num_tokens, size=size)
        self._recordings[size].replay()
        slot.copy(self._slot)
        return True

    def _send(self, forward: Forward, *, num_tokens: int, size: FrameSize) -> Frame:
        return self._engine.frame(forward, num_tokens=num_tokens, packed=True, size=size, memory=self._memory)

    def _run(self, frame: Frame) -> None:
        slot = self._slot
        self._writer.open(slot.hidden_TKD, num_tokens=len(slot.hidden_TKD), scale_TK=slot.scale_TK)
        self._writer.expect((), frame=frame)
        output = self._engine.run(frame)
        if slot.last_hidden_TD is not None:
            self._writer.write_rows(slot.last_hidden_TD, output.last_hidden_state)
        self._writer.close()


def _is_like(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
