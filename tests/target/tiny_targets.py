"""Tiny random targets on disk, one for each kind of architecture, and packs to run through them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from slipstream.config import TargetInfo, read_target_info
from slipstream.records import Pack
from slipstream.target.isolation import pack_documents

VOCAB, HIDDEN, LAYERS = 256, 64, 5
WINDOW = 12
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
KINDS = ("llama", "mistral", "qwen3", "hybrid")


def make_model(kind: str, *, tied: bool = False):
    """A random model of a kind, larger weights than usual, so that layers differ and answers vary."""
    torch.manual_seed(7)
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**COMMON, tie_word_embeddings=tied))
    if kind == "mistral":
        return MistralForCausalLM(MistralConfig(**COMMON, sliding_window=WINDOW, tie_word_embeddings=tied))
    if kind == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**COMMON, tie_word_embeddings=tied))
    config = Qwen3_5TextConfig(
        **COMMON,
        tie_word_embeddings=tied,
        layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention", "linear_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_conv_kernel_dim=4,
    )
    return Qwen3_5ForCausalLM(config)


def save_target(folder: Path, kind: str, *, tied: bool = False, dtype: torch.dtype = torch.float32) -> TargetInfo:
    """Write a random target to a folder and read back what its config says."""
    make_model(kind, tied=tied).to(dtype).save_pretrained(folder)
    return read_target_info(str(folder))


def make_pack(lengths=(30, 17, 25, 1, 9), capacity=96, *, seed=3) -> Pack:
    """A pack of random documents with padding."""
    generator = np.random.default_rng(seed)
    documents = [generator.integers(3, VOCAB, size=length).astype(np.int32) for length in lengths]
    return pack_documents(documents, capacity_tokens=capacity)
