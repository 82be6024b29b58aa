"""Warm-up: every mode and shape that training will meet, the biggest first, before step 1.

What is compiled, tuned or allocated for the first time stops the GPU; here nobody waits for it. Two rounds: the first
compiles, the second allocates what stays, after the first one's leftovers were given back. Nothing that is trained changes.

Shape letters: T context tokens · N anchors · B block size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from slipstream.device.graph_choice import GraphReport
from slipstream.records import HiddenPack, Pack, Use

ROUNDS = 2


@dataclass(frozen=True, slots=True)
class Mode:
    """One way in which training uses the device."""

    name: str
    run: Callable[[], object]


@dataclass(frozen=True, slots=True)
class WarmUpReport:
    """How long warm-up took, and the first run of each mode; what was decided on recordings, where they were thought of."""

    seconds: float
    modes: Mapping[str, float]
    graphs: GraphReport | None = None


def warm_up(
    modes: Sequence[Mode],
    *,
    then: Sequence[Mode],
    finish: Callable[[], None],
    give_back: Callable[[], None],
    between: Callable[[], None] = lambda: None,
) -> WarmUpReport:
    """Run all `modes`, the biggest first, in two rounds; then those of `then`, which are long and compile little, once.

    `finish` waits for the device, `give_back` frees what is cached and unused. `between` the rounds all is compiled.
    """
    began = time.perf_counter()
    first: dict[str, float] = {}
    for number in range(ROUNDS):
        if number == ROUNDS - 1:
            between()
        give_back()
        for mode in (*modes, *then) if number == ROUNDS - 1 else modes:
            since = time.perf_counter()
            mode.run()
            finish()
            first.setdefault(mode.name, time.perf_counter() - since)
    return WarmUpReport(seconds=time.perf_counter() - began, modes=first)


def made_up_use(*, pack_tokens: int, pack_anchors: int, block_size: int, num_valid: int, step: int) -> tuple[Pack, Use]:
    """One document that fills a pack, and `num_valid` anchors in it whose blocks are supervised throughout.

    With all N valid no real use is larger, in any array.
    """
    anchors = np.zeros(pack_anchors, dtype=np.int32)
    anchors[:num_valid] = np.linspace(1, pack_tokens - block_size, num=num_valid).astype(np.int32)
    supervised = np.full(block_size, num_valid, dtype=np.int64)
    supervised[0] = 0
    pack = Pack(
        pack_id=0,
        epoch=0,
        column=0,
        slot=0,
        document_ids=np.zeros(1, dtype=np.int64),
        starts=np.array([0, pack_tokens], dtype=np.int32),
        token_ids=np.zeros(pack_tokens, dtype=np.int32),
        position_ids=np.arange(pack_tokens, dtype=np.int32),
        loss_mask=np.ones(pack_tokens, dtype=np.bool_),
    )
    use = Use(
        step=step,
        pack_id=0,
        use_number=0,
        anchors=anchors,
        anchor_valid=np.arange(pack_anchors) < num_valid,
        supervised_per_slot=supervised,
        is_last=False,
    )
    return pack, use


class MadeUpSource:
    """A source whose every pack is the same tensor, of the slots' type and shape."""

    def __init__(self, hidden_TKD: Tensor, *, target_fingerprint: str) -> None:
        self._hidden_TKD, self._target_fingerprint = hidden_TKD, target_fingerprint

    def take(self, pack_id: int) -> HiddenPack:
        """The tensor under that id."""
        return HiddenPack(
            pack_id=pack_id,
            slot=0,
            generation=0,
            hidden_TKD=self._hidden_TKD,
            last_hidden_TD=None,
            seal=0,
            target_fingerprint=self._target_fingerprint,
        )

    def release(self, pack_id: int) -> None:
        """Nothing is held."""
