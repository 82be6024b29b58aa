"""Eight-bit slots on the drafter's side: every pack that is taken is written out in the type that the drafter is fed.

Over any source. Seals cover what the slots hold, so it is the values and scales that were found whole which are multiplied,
on the caller's stream, into one persistent buffer: nothing is allocated, and no event is needed.

Shape letters: T context tokens · K tapped layers · D hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from slipstream.device.float8 import dequantise
from slipstream.records import HiddenPack
from slipstream.transport.ends import HiddenSource, SourceStats
from slipstream.transport.layout import SlotLayout
from slipstream.transport.ledger import QueueDepth
from slipstream.transport.slots import DTYPES


class Widened:
    """A `HiddenSource` over one of e4m3 slots, owned from here on. `out_TKD` bf16 or fp32, on the slots' device."""

    def __init__(self, source: HiddenSource, *, out_TKD: torch.Tensor) -> None:
        self._source, self._out_TKD = source, out_TKD
        self._written: tuple[int, int] | None = None

    def take(self, pack_id: int) -> HiddenPack:
        """The pack in the buffer, its seal checked. Good until the next take of another pack.

        Contract: `HiddenSource.take`.
        """
        taken = self._source.take(pack_id)
        assert taken.scale_TK is not None, f"pack {pack_id} came without scales"
        identity = (taken.pack_id, taken.generation)
        if identity != self._written:
            dequantise(taken.hidden_TKD, scale_TK=taken.scale_TK, out_TKD=self._out_TKD)
            self._written = identity
        return replace(taken, hidden_TKD=self._out_TKD, scale_TK=None)

    def release(self, pack_id: int) -> None:
        """The last use is over: the slot may be written again."""
        self._source.release(pack_id)

    def stats(self) -> SourceStats:
        """Of the source below."""
        return self._source.stats()

    def depths(self) -> Mapping[int, QueueDepth]:
        """Of the source below."""
        return self._source.depths()

    def close(self) -> None:
        """Leave. May be called twice."""
        self._source.close()


def widened(source: HiddenSource, *, layout: SlotLayout, dtype: str, device: torch.device | str) -> HiddenSource:
    """The source itself, or, over e4m3 slots, one that gives packs as `dtype`, the target's own."""
    if not layout.is_scaled:
        return source
    with torch.inference_mode(False):  # a tensor born inside could not be saved for backward
        out_TKD = torch.zeros(
            layout.pack_tokens, layout.num_taps, layout.hidden_size, dtype=DTYPES[dtype], device=torch.device(device)
        )
    return Widened(source, out_TKD=out_TKD)
