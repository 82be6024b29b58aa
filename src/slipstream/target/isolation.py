"""Proof by perturbation that documents of a pack do not see each other: change one, and no bit of the others may change.

Exactly 0 is asked for, not closeness: residual streams reach 2e4, where a leak hides in any tolerance, and some leaks are only
as wide as a convolution (three tokens), so the first tokens of the next document are looked at on their own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from slipstream.records import Int32Array, Pack
from slipstream.target.layouts import Packing

FIRST_TOKENS = 8
PROBE_LENGTHS = (40, 24, 33)
PROBE_CAPACITY = 128


@dataclass(frozen=True, slots=True)
class Leak:
    """Largest changes of hidden states, relative to the tap's maximum, after every token of one document was changed.

    `own` in the document itself (0 would mean that the probe proves nothing); `others` in all other documents; `next_first` in
    the first 8 tokens of the document after it.
    """

    own: float
    others: float
    next_first: float

    @property
    def isolated(self) -> bool:
        """Whether the perturbation was felt at home and nowhere else."""
        return self.own > 0 and self.others == 0 and self.next_first == 0


class Capturing(Protocol):
    """What the probe needs of a target: hidden states `[T, K, D]` of a pack under a given packing."""

    def hidden_states(self, pack: Pack, *, packing: Packing) -> Tensor:
        """Hidden states in the target's own type, non-finite values as 0."""


def measure_leak(target: Capturing, *, pack: Pack, packing: Packing, vocab_size: int) -> Leak:
    """The worst leak over perturbing each document of a pack in turn. The pack needs two documents or more."""
    assert pack.num_documents > 1, "one document cannot leak into another"
    base_TKD = target.hidden_states(pack, packing=packing).float()
    scale_K = base_TKD.abs().amax(dim=(0, 2)).clamp(min=torch.finfo(torch.float32).tiny)
    own, others, next_first = float("inf"), 0.0, 0.0
    for document in range(pack.num_documents):
        begin, end = int(pack.starts[document]), int(pack.starts[document + 1])
        changed = perturb(pack, begin=begin, end=end, vocab_size=vocab_size)
        moved_TKD = (target.hidden_states(changed, packing=packing).float() - base_TKD).abs()
        moved_T = (moved_TKD.amax(dim=2) / scale_K).amax(dim=1)
        own = min(own, float(moved_T[begin:end].max()))
        others = max(others, float(torch.cat((moved_T[:begin], moved_T[end:])).max()))
        following = moved_T[end : min(end + FIRST_TOKENS, pack.num_tokens)]
        next_first = max(next_first, float(following.max()) if len(following) else 0.0)
    return Leak(own=own, others=others, next_first=next_first)


def perturb(pack: Pack, *, begin: int, end: int, vocab_size: int) -> Pack:
    """The pack with every token from `begin` to `end` replaced by another one of the vocabulary."""
    token_ids = pack.token_ids.copy()
    token_ids[begin:end] = (token_ids[begin:end] + 1 + vocab_size // 3) % vocab_size
    return replace(pack, token_ids=token_ids)


def probe_pack(*, vocab_size: int, capacity_tokens: int = PROBE_CAPACITY) -> Pack:
    """Three documents of random tokens, and padding: the pack that is tried when a target is loaded."""
    generator = np.random.default_rng(0)
    lengths = [length * capacity_tokens // PROBE_CAPACITY for length in PROBE_LENGTHS]
    documents = [generator.integers(0, vocab_size, size=length).astype(np.int32) for length in lengths]
    return pack_documents(documents, capacity_tokens=capacity_tokens)


def pack_documents(documents: list[Int32Array], *, capacity_tokens: int, loss_masks: list[np.ndarray] | None = None) -> Pack:
    """A pack of the documents in the given order, outside of any plan (pack id 0). They must fit."""
    lengths = [len(document) for document in documents]
    num_tokens = sum(lengths)
    assert num_tokens <= capacity_tokens, "the documents must fit the pack"
    padding = capacity_tokens - num_tokens
    token_ids = np.concatenate([*documents, np.zeros(padding, dtype=np.int32)]).astype(np.int32)
    positions = np.concatenate([np.arange(length, dtype=np.int32) for length in (*lengths, padding)])
    masks = loss_masks or [np.zeros(length, dtype=np.bool_) for length in lengths]
    return Pack(
        pack_id=0,
        epoch=0,
        column=0,
        slot=0,
        document_ids=np.arange(len(documents), dtype=np.int64),
        starts=np.cumsum([0, *lengths], dtype=np.int32),
        token_ids=token_ids,
        position_ids=positions,
        loss_mask=np.concatenate([*masks, np.zeros(padding, dtype=np.bool_)]),
    )
