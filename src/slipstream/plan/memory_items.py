"""Parts of a process's memory by name, and the moments in which each is held. Bytes; a GiB is 2**30."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

GIB = 2**30
MIB = 2**20
BYTES = {"bfloat16": 2, "float32": 4, "float8": 2, "float8_e4m3": 1}
"""Of an element of hidden states, by type. A target in "float8" has bfloat16 ones: only its matrices are smaller."""
FP32 = 4
ALIGNMENT_BYTES = 128

Moment = Literal[
    "loading",
    "tuning",
    "reading prompts",
    "answering",
    "target's attention",
    "target's delta rule",
    "target's MLP",
    "forward",
    "loss",
    "gradient of the loss",
    "gradients of an MLP",
    "gradients of an attention",
    "gradients of the context",
    "validation",
    "training",
]
"""Stretches of a process's life between which what it holds differs."""

BEFORE_TRAINING: tuple[Moment, ...] = ("loading", "tuning", "reading prompts", "answering")
"""Moments that are over when step 1 begins."""
DRAFTING: tuple[Moment, ...] = (
    "forward",
    "loss",
    "gradient of the loss",
    "gradients of an MLP",
    "gradients of an attention",
    "gradients of the context",
)
"""Moments of a pass of the drafter, forward and backward."""


@dataclass(frozen=True, slots=True)
class MemoryItem:
    """One thing that takes memory. `formula` says how the bytes follow, `key` which key of the recipe makes it smaller.

    It is held in `moments`; in all of them if there are none.
    """

    name: str
    nbytes: int
    formula: str
    key: str = ""
    moments: tuple[Moment, ...] = ()

    def held(self, moment: Moment) -> bool:
        """Whether it takes memory then."""
        return not self.moments or moment in self.moments


class HeldParts:
    """What has parts, some of which are held in some moments only."""

    __slots__ = ()
    items: tuple[MemoryItem, ...]

    @property
    def peak_moment(self) -> Moment:
        """When most is held."""
        return peak_moment(self.items)[0]

    @property
    def peak_bytes(self) -> int:
        """What is held then: at the most, loading and warm-up included."""
        return peak_moment(self.items)[1]

    def at_peak(self) -> tuple[MemoryItem, ...]:
        """The parts that are held then, the largest first."""
        held = [item for item in self.items if item.held(self.peak_moment) and item.nbytes]
        return tuple(sorted(held, key=lambda item: -item.nbytes))


def peak_moment(items: Sequence[MemoryItem], *, without: Sequence[Moment] = ()) -> tuple[Moment, int]:
    """The moment in which most is held, and how much; `without` some moments."""
    moments = [moment for moment in get_args(Moment) if moment not in without and any(moment in item.moments for item in items)]
    sums = [(sum(item.nbytes for item in items if item.held(moment)), moment) for moment in moments or ["loading"]]
    nbytes, moment = max(sums, key=lambda entry: entry[0])
    return moment, nbytes


def aligned(nbytes: int) -> int:
    """Rounded up to where slots and arrays begin."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def slot_bytes(*, pack_tokens: int, num_taps: int, hidden_size: int, dtype: str, last_hidden: bool = False) -> int:
    """Bytes of one slot: hidden `[T, K, D]` and, if asked for, last hidden `[T, D]`, each rounded up to 128.

    In e4m3 there are fp32 scales `[T, K]` besides, and last hidden is bf16.
    """
    states = pack_tokens * hidden_size
    scales = pack_tokens * num_taps * FP32 if dtype == "float8_e4m3" else 0
    last = states * max(BYTES[dtype], BYTES["bfloat16"]) if last_hidden else 0
    return aligned(states * num_taps * BYTES[dtype]) + aligned(scales) + aligned(last)
