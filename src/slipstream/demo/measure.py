"""Acceptance of the demo's exported drafter on the held-out prompts: the real decode loop, and the path found without it.

Waits for: an exported folder. Everything in fp32 at batch 1, the target whole first, cut after the last tap afterwards.

Shape letters: T context tokens · K tapped layers · D hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from slipstream.config import TargetInfo
from slipstream.corpus.chat import ChatEncoder
from slipstream.corpus.sources import read_conversations
from slipstream.drafter import build_drafter
from slipstream.evaluate.measure import AnswerLimits, SetReport, decode_set, report_set, simulate_set
from slipstream.evaluate.prompts import make_prompt_set
from slipstream.evaluate.session import TargetSession
from slipstream.export.dflash_format import read_dflash
from slipstream.records import Pack
from slipstream.target.ends import load_frozen_ends
from slipstream.target.huggingface import load_full, load_target


def measure_export(
    *, folder: Path, info: TargetInfo, prompts: Path, max_new_tokens: int, on_answer: Callable[[int, int], None]
) -> SetReport:
    """All figures of an exported drafter on one prompt file; `on_answer(done, total)` after each prompt."""
    encoder = ChatEncoder(info.folder)
    prompt_set = make_prompt_set(
        name="held-out",
        conversations=(conversation.messages for conversation in read_conversations([prompts])),
        encode=encoder.encode_prompt,
        limit=None,
        max_prompt_tokens=info.max_position_embeddings - max_new_tokens,
    )
    shape, state = read_dflash(folder)
    drafter = build_drafter(shape=shape, dtype="float32", device="cpu", seed=None, attention="sdpa")
    drafter.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    total, done = len(prompt_set.prompts), 0

    def answered() -> None:
        nonlocal done
        done += 1
        on_answer(done, total)

    session = TargetSession(load_full(info=info, dtype="float32", device="cpu"), tap_layers=shape.tap_layers)
    limits = AnswerLimits(max_new_tokens=max_new_tokens, stop_token_ids=encoder.stop_token_ids)
    decoded = decode_set(prompt_set, session=session, drafter=drafter, limits=limits, on_answer=answered)
    del session

    runner = load_target(info=info, dtype="float32", tap_layers=shape.tap_layers, device="cpu")

    def capture(pack: Pack) -> torch.Tensor:
        hidden_TKD = torch.empty(pack.capacity_tokens, shape.num_taps, shape.hidden_size)
        runner.capture(pack, hidden_TKD=hidden_TKD)
        return hidden_TKD

    paths = simulate_set(
        prompt_set,
        answers=[answer.token_ids for answer in decoded.plain],
        max_new_tokens=max_new_tokens,
        capture=capture,
        drafter=drafter,
        ends=load_frozen_ends(info=info, dtype="float32", device="cpu"),
        shape=shape,
    )
    return report_set(prompt_set, decoded=decoded, simulated=paths, block_size=shape.block_size, bf16_agreement=None)
