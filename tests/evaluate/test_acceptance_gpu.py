"""On CUDA: the paths of a pack are the CPU's, and to measure them again allocates nothing, however busy the GPU is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from test_acceptance import tiny_shape

from slipstream.device.sender import BatchSender
from slipstream.drafter import build_drafter
from slipstream.drafter.blocks import to_device
from slipstream.evaluate.acceptance import simulate_pack
from slipstream.evaluate.prompts import answered_document
from slipstream.plan.evaluation import plan_validation
from slipstream.target.ends import FrozenEnds

pytestmark = pytest.mark.gpu
VOCAB, NEW = 8, 60
BUSY_CYCLES = 200_000_000
"""About a tenth of a second."""


def measured(device: str, *, busy: int = 0, send: BatchSender | None = None) -> list[object]:
    """The path of each of six answers, most of which end at the limit, in two packs; the GPU is kept busy before each."""
    shape = replace(tiny_shape(), block_size=8, hidden_size=64, head_dim=16, vocab_size=VOCAB)
    drafter = build_drafter(shape=shape, dtype="float32", device=device, seed=3, attention="auto")
    generator = np.random.default_rng(0)
    documents = [
        answered_document(
            document_id=number,
            prompt_ids=generator.integers(0, VOCAB - 1, 20).tolist(),
            answer_ids=generator.integers(0, 3, NEW - number % 2).tolist(),
        )
        for number in range(6)
    ]
    planned = plan_validation(documents=documents, pack_tokens=256, pack_anchors=128, block_size=8)
    assert len(planned) > 1
    table = torch.randn(VOCAB, 64, generator=torch.Generator().manual_seed(1)).to(device)
    states = torch.randn(VOCAB, shape.num_taps, 64, generator=torch.Generator().manual_seed(2))
    found = []
    for pack, uses in planned:
        hidden_TKD = states[torch.from_numpy(pack.token_ids).long()].to(device)
        if busy:
            torch.cuda._sleep(busy)
        found += simulate_pack(
            drafter=drafter,
            ends=FrozenEnds(embedding_VD=table, head_VD=table),
            shape=shape,
            hidden_TKD=hidden_TKD,
            pack=pack,
            uses=uses,
            max_lengths=dict.fromkeys(range(6), 20 + NEW),
            send=send,
        )
    return found


def test_paths_are_the_cpus() -> None:
    torch.compiler.reset()
    assert measured("cuda") == measured("cpu")


def test_measuring_again_allocates_nothing_however_busy_the_gpu_is(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    send = BatchSender(torch.device("cuda"))
    wanted = measured("cuda", send=send)
    before = torch.cuda.host_memory_stats()["num_host_alloc"]
    assert measured("cuda", send=send, busy=BUSY_CYCLES) == wanted
    assert torch.cuda.host_memory_stats()["num_host_alloc"] == before
    # and the way that it was done before does: a block for each tensor, and none back while the GPU is busy
    monkeypatch.setattr(BatchSender, "__call__", lambda self, tensor: to_device(tensor, device="cuda"))
    measured("cuda", send=send, busy=BUSY_CYCLES)
    assert torch.cuda.host_memory_stats()["num_host_alloc"] > before
