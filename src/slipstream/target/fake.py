"""A target for tests: the same interface, no model. Hidden states follow from the document's own last tokens and a seed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from slipstream.device.finite import not_finite
from slipstream.device.float8 import quantise_rows
from slipstream.records import Pack
from slipstream.target.dtypes import DTYPES
from slipstream.target.ends import FrozenEnds

MEMORY_TOKENS: Final = 16
DECAY: Final = 0.6


class FakeTarget:
    """Hidden state of a token: the decayed sum of seeded embeddings of it and the 15 before it in its document.

    `delay_seconds`, given a pack id, says how long a capture waits first, to disturb the order of arrival.
    """

    def __init__(
        self,
        *,
        seed: int,
        num_taps: int,
        hidden_size: int,
        vocab_size: int,
        delay_seconds: Callable[[int], float] | None = None,
    ) -> None:
        self.num_taps, self.hidden_size = num_taps, hidden_size
        self.fingerprint = f"fake-{seed}-{num_taps}-{hidden_size}-{vocab_size}"
        self.bad_rows = torch.zeros((), dtype=torch.int64)
        self._delay_seconds = delay_seconds
        generator = torch.Generator().manual_seed(seed)
        self._table_VKD = torch.randn(vocab_size, num_taps, hidden_size, generator=generator)
        self._ends_VD = torch.randn(vocab_size, hidden_size, generator=generator) * hidden_size**-0.5

    def capture(
        self, pack: Pack, *, hidden_TKD: Tensor, last_hidden_TD: Tensor | None = None, scale_TK: Tensor | None = None
    ) -> int:
        """Write states into the slot `[T, K, D]`, padding 0, and the last tap into `last_hidden_TD`; returns the real rows.

        A slot of e4m3 values takes their scales in `scale_TK` `[T, K]`.
        """
        if self._delay_seconds is not None:
            time.sleep(self._delay_seconds(pack.pack_id))
        num_tokens = pack.num_tokens
        embedded_TKD = self._table_VKD[torch.from_numpy(pack.token_ids[:num_tokens]).long()]
        positions_T = torch.from_numpy(pack.position_ids[:num_tokens])
        states_TKD = torch.zeros_like(embedded_TKD)
        for back in range(min(MEMORY_TOKENS, num_tokens)):
            seen_T = positions_T[back:] >= back
            states_TKD[back:] += seen_T[:, None, None] * embedded_TKD[: num_tokens - back] * DECAY**back
        self.bad_rows += not_finite(states_TKD).sum()
        kept_TKD = torch.zeros(hidden_TKD.shape)
        kept_TKD[:num_tokens] = states_TKD
        if scale_TK is None:
            hidden_TKD.copy_(kept_TKD)
        else:
            unflagged_T = torch.zeros(len(kept_TKD), dtype=torch.bool)
            for tap in range(self.num_taps):
                quantise_rows(kept_TKD[:, tap], values_RD=hidden_TKD[:, tap], scale_R=scale_TK[:, tap], bad_R=unflagged_T)
        if last_hidden_TD is not None:
            last_hidden_TD.copy_(kept_TKD[:, -1])
        return num_tokens

    def ends(self, *, dtype: str = "float32") -> FrozenEnds:
        """A seeded embedding, tied to the head, in the fake target's dimensions."""
        converted_VD = self._ends_VD.to(DTYPES[dtype])
        return FrozenEnds(embedding_VD=converted_VD, head_VD=converted_VD)
