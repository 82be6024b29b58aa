"""A small drafter shape, its target's info, and a random state."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slipstream.config import DrafterShape, TargetInfo
from slipstream.drafter import build_drafter

HIDDEN, VOCAB, LAYERS = 32, 96, 8


def make_shape(**changes):
    fields = {
        "num_layers": 2,
        "block_size": 8,
        "mask_token_id": 3,
        "tap_layers": (1, 3, 5),
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "max_position_embeddings": 512,
        "layer_types": ("full", "full"),
        "sliding_window": None,
        "num_target_layers": LAYERS,
        "initializer_range": 0.05,
    }
    return DrafterShape(**(fields | changes))


def make_info(**changes):
    fields = {
        "folder": Path("some/target"),
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": 64,
        "num_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "layer_types": ("full_attention",) * LAYERS,
        "sliding_window": None,
        "bos_token_id": 1,
        "eos_token_ids": (2,),
        "pad_token_id": None,
    }
    return TargetInfo(**(fields | changes))


@pytest.fixture
def shape():
    return make_shape()


@pytest.fixture
def info():
    return make_info()


@pytest.fixture
def shape_with():
    return make_shape


@pytest.fixture
def info_with():
    return make_info


@pytest.fixture
def state_of():
    def state(shape, *, seed=0):
        return build_drafter(shape=shape, dtype="float32", device="cpu", seed=seed, attention="sdpa").state_dict()

    return state


@pytest.fixture
def ends():
    generator = torch.Generator().manual_seed(8)
    return {
        "embedding_VD": torch.randn(VOCAB, HIDDEN, generator=generator),
        "head_VD": torch.randn(VOCAB, HIDDEN, generator=generator),
    }
