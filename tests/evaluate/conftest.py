"""Tiny random targets and drafters. The vocabulary has eight tokens, so that random drafts stand now and then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB, HIDDEN, LAYERS, TAPS, BLOCK, MASK = 8, 32, 4, (0, 2), 5, 7


def make_target(kind: str, *, seed: int = 0, vocab_size: int = VOCAB) -> PreTrainedModel:
    """A random target in fp32 whose weights are large enough for its answers not to be one token for ever."""
    common: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    torch.manual_seed(seed)
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**common)).eval()
    if kind == "sliding":
        return MistralForCausalLM(MistralConfig(**common, sliding_window=6)).eval()
    if kind == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**common)).eval()
    assert kind == "hybrid"
    linear = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
    types = ["linear_attention", "full_attention"] * (LAYERS // 2)
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**common, **linear, layer_types=types)).eval()


class ReferenceDrafter:
    """The `dflash` package's drafter behind our decode interface: an independent drafter for the loop's tests."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def new_context(self) -> dict[str, Any]:
        return {"cache": DynamicCache(config=self.model.config), "new": [], "start": 0}

    def extend_context(self, context: dict[str, Any], hidden_SKD: Tensor, start_position: int) -> None:
        if not context["new"]:
            context["start"] = start_position
        context["new"].append(hidden_SKD.flatten(1))

    def draft(self, context: dict[str, Any], token_ids_B: Tensor, start_position: int, embedding_VD: Tensor) -> Tensor:
        new = torch.cat(context["new"])
        context["new"] = []
        assert context["start"] + len(new) == start_position, "the context ends where the block starts"
        positions = torch.arange(context["start"], start_position + len(token_ids_B))
        context["cache"].activate_past_recording()
        hidden = self.model(
            target_hidden=new[None],
            noise_embedding=embedding_VD[token_ids_B][None],
            position_ids=positions[None],
            past_key_values=context["cache"],
            use_cache=True,
        )[0]
        context["cache"].crop(-len(token_ids_B))
        return hidden[-len(token_ids_B) :]


def make_reference(*, seed: int = 0, layer_types: tuple[str, ...] = ("full_attention",) * 2) -> Any:
    """A random drafter of the `dflash` package."""
    from dflash.model import DFlashDraftModel

    slides = "sliding_attention" in layer_types
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=len(layer_types),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.3,
        max_position_embeddings=256,
        layer_types=list(layer_types),
        use_sliding_window=slides,
        sliding_window=6 if slides else None,
    )
    config.num_target_layers = LAYERS
    config.dflash_config = {"target_layer_ids": list(TAPS), "block_size": BLOCK, "mask_token_id": MASK}
    torch.manual_seed(1000 + seed)
    return DFlashDraftModel(config).eval()


@pytest.fixture
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, VOCAB - 1, (length,), generator=generator).tolist() for length in (1, 3, 9, 17)]


@pytest.fixture
def tiny_target() -> Callable[..., PreTrainedModel]:
    return make_target


@pytest.fixture
def reference() -> Callable[..., Any]:
    return make_reference


@pytest.fixture
def reference_drafter() -> type[ReferenceDrafter]:
    return ReferenceDrafter
