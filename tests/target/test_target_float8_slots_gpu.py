"""On a GPU: a target's hooks round to eight bits what they would have copied, without waiting and without allocating."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_target_float8_slots import assert_same, poisoned_slot, rounded
from transformers import LlamaConfig, LlamaForCausalLM

from slipstream.config import read_target_info
from slipstream.target.huggingface import load_target
from slipstream.target.isolation import pack_documents

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

TOKENS, TAPS = 2048, (0, 1, 3)


def test_the_hook_rounds_what_it_would_have_copied(tmp_path):
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=512, hidden_size=320, intermediate_size=384, num_hidden_layers=5, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, initializer_range=0.08,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    target = load_target(
        info=read_target_info(str(tmp_path)), dtype="bfloat16", tap_layers=TAPS, device="cuda", pack_tokens=TOKENS
    )
    draw = np.random.default_rng(3)
    documents = [draw.integers(1, 512, size=length).astype(np.int32) for length in (130, 64, 1, 700, 257)]
    pack = pack_documents(documents, capacity_tokens=TOKENS)
    wide = torch.full((TOKENS, len(TAPS), 320), float("nan"), dtype=torch.bfloat16, device="cuda")
    target.capture(pack, hidden_TKD=wide)
    values, scale = (part.cuda() for part in poisoned_slot(*wide.shape))
    target.capture(pack, hidden_TKD=values, scale_TK=scale)
    assert_same((values.cpu(), scale.cpu()), rounded(wide.cpu()))
    assert int(target.bad_rows) == 0
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["num_device_alloc"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(10):
            target.capture(pack, hidden_TKD=values, scale_TK=scale)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["num_device_alloc"] == before
