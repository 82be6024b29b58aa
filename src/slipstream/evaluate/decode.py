"""The real decode loop at batch 1: draft a block, verify it with the target, keep what stands.

The steps are those of `dflash_generate` (`dflash` 0.1.0), so greedy acceptance lengths are equal, list for list; unlike it,
the loop is lossless on targets with recurrent layers, because `TargetSession` rolls those back. `greedy_plain` is the same
loop without a drafter, for the tokens-per-second comparison and for losslessness.

Shape letters: S tokens · B block size · K tapped layers · D hidden · V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.evaluate.sampling import Chooser, Greedy
from slipstream.evaluate.session import TargetSession
from slipstream.evaluate.summary import AcceptancePath


class BlockDrafter(Protocol):
    """What the loop needs of a drafter; `DFlashDrafter` is one."""

    def new_context(self) -> Any:
        """Empty memory of an answer."""

    def extend_context(self, context: Any, hidden_SKD: Tensor, start_position: int) -> None:
        """Add the hidden states of the tokens from `start_position` on."""

    def draft(self, context: Any, token_ids_B: Tensor, start_position: int, embedding_VD: Tensor) -> Tensor:
        """Hidden states `[B, D]` of a block whose anchor is at `start_position`, after the final norm."""


@dataclass(frozen=True, slots=True)
class DecodedAnswer:
    """An answer (stop token included), its path, and the time it took: prompt, then the loop. `num_replays`: blocks whose
    accepted tokens the target had to run again."""

    token_ids: tuple[int, ...]
    path: AcceptancePath
    prefill_seconds: float
    decode_seconds: float
    num_replays: int

    @property
    def decode_tokens(self) -> int:
        """Tokens that the loop gave: all but the first."""
        return max(0, len(self.token_ids) - 1)


@torch.no_grad()
def speculative_decode(
    session: TargetSession,
    *,
    drafter: BlockDrafter,
    block_size: int,
    mask_token_id: int,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    stop_token_ids: Sequence[int],
    chooser: Chooser | None = None,
) -> DecodedAnswer:
    """Answer one prompt with the drafter's help: at most `max_new_tokens`, ended by the first stop token.

    `chooser` is greedy by default. Blocks are cut so that nothing beyond `max_new_tokens` is drafted.
    Raises `TargetError` when the target gave NaN or Inf.
    """
    chooser = chooser or Greedy()
    clock = _Clock(session.device)
    prefilled = session.prefill(prompt_ids)
    context = drafter.new_context()
    hidden_SKD, written = prefilled.hidden_SKD, 0
    answer = [chooser.first(prefilled.logits_SV[-1])]
    prefill_seconds = clock.lap()
    lengths, accepted = [], []
    start, end = len(prompt_ids), len(prompt_ids) + max_new_tokens
    while start + 1 < end and answer[-1] not in stop_token_ids:
        drafter.extend_context(context, hidden_SKD, written)
        written = start
        slots = min(block_size, end - start)
        block = torch.full((slots,), mask_token_id, dtype=torch.long, device=session.device)
        block[0] = answer[-1]
        hidden_BD = drafter.draft(context, block, start, session.embedding_VD)
        draft = chooser.draft(_logits(hidden_BD[1:], session.head_VD))
        block = torch.cat((block[:1], draft.tokens))
        verdict = chooser.verify(draft=draft, logits_BV=session.verify(block))
        new = [*block[1 : verdict.accepted + 1].tolist(), verdict.next_token][: end - start - 1]
        new = _through_stop(new, stop_token_ids)
        hidden_SKD = session.keep(len(new))
        answer += new
        lengths.append(len(new))
        accepted.append(min(verdict.accepted, len(new)))
        start += len(new)
    session.check_finite()
    return DecodedAnswer(
        token_ids=tuple(answer),
        path=AcceptancePath(lengths=tuple(lengths), accepted=tuple(accepted)),
        prefill_seconds=prefill_seconds,
        decode_seconds=clock.lap(),
        num_replays=session.num_replays,
    )


@torch.no_grad()
def greedy_plain(
    session: TargetSession, *, prompt_ids: Sequence[int], max_new_tokens: int, stop_token_ids: Sequence[int]
) -> DecodedAnswer:
    """The target's own greedy answer, one token a pass; its path is all ones. Raises as `speculative_decode` does."""
    chooser = Greedy()
    clock = _Clock(session.device)
    answer = [chooser.first(session.prefill(prompt_ids, rollback=False).logits_SV[-1])]
    prefill_seconds = clock.lap()
    while len(answer) < max_new_tokens and answer[-1] not in stop_token_ids:
        answer.append(chooser.first(session.step(answer[-1])))
    session.check_finite()
    return DecodedAnswer(
        token_ids=tuple(answer),
        path=AcceptancePath(lengths=(1,) * (len(answer) - 1), accepted=(0,) * (len(answer) - 1)),
        prefill_seconds=prefill_seconds,
        decode_seconds=clock.lap(),
        num_replays=0,
    )


def _logits(hidden_BD: Tensor, head_VD: Tensor) -> Tensor:
    return F.linear(hidden_BD.to(head_VD.dtype), head_VD)


def _through_stop(token_ids: list[int], stop_token_ids: Sequence[int]) -> list[int]:
    for place, token in enumerate(token_ids):
        if token in stop_token_ids:
            return token_ids[: place + 1]
    return token_ids


class _Clock:
    """Seconds between two calls; on CUDA it waits for the device, so the figures are of work done."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last = self._now()

    def lap(self) -> float:
        now = self._now()
        seconds, self._last = now - self._last, now
        return seconds

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
