"""A whole run in small: a random Llama with its own tokenizer and template, a corpus, and a recipe for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from slipstream.config import Recipe, make_recipe

NUM_WORDS = 200
SPECIALS = ("<unk>", "<|im_start|>", "<|im_end|>", "<|mask|>")
MASK_TOKEN = 3
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|> ' + m['role'] + ' ' + m['content'] + ' <|im_end|> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|> assistant ' }}{% endif %}"
)


def write_target(folder: Path, *, seed: int = 0, spread: float = 0.02) -> Path:
    """A random Llama of six layers, with tokenizer and chat template, as a Hugging Face folder.

    `spread` is the standard deviation of its weights: large ones make answers that do not repeat themselves at once.
    """
    words = [*SPECIALS, "user", "assistant", *(f"w{i}" for i in range(NUM_WORDS))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in SPECIALS])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<unk>", unk_token="<unk>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=len(words),
        max_position_embeddings=512,
        eos_token_id=2,
        bos_token_id=None,
        pad_token_id=0,
        tie_word_embeddings=True,
        initializer_range=spread,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def write_conversations(path: Path, *, count: int, seed: int) -> Path:
    """Random conversations of one or two turns, as JSON lines."""
    rng = np.random.default_rng(seed)

    def words(low: int, high: int) -> str:
        return " ".join(f"w{i}" for i in rng.integers(0, NUM_WORDS, rng.integers(low, high)))

    rows = []
    for _ in range(count):
        messages = []
        for _ in range(int(rng.integers(1, 3))):
            messages += [{"role": "user", "content": words(2, 8)}, {"role": "assistant", "content": words(4, 30)}]
        rows.append({"messages": messages})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def tiny_recipe(material: dict[str, str], runs: Path, *, name: str, **changes: Any) -> Recipe:
    """A recipe of a dozen steps for the tiny target; `changes` are `section__key=value`."""
    raw: dict[str, Any] = {
        "name": name,
        "runs": str(runs),
        "target": {"model": material["target"], "dtype": "float32", "num_taps": 2},
        "corpus": {"path": material["corpus"]},
        "plan": {"pack_tokens": 128, "pack_anchors": 32, "packs_per_step": 2, "epochs": 2, "window": 16},
        "drafter": {"num_layers": 1, "block_size": 4, "mask_token_id": MASK_TOKEN, "dtype": "float32"},
        "optimizer": {"lr": 1e-2, "warmup_ratio": 0.1},
        "checkpoint": {"every_steps": 1000, "keep": 2},
        "placement": {"mode": "split", "device": "cpu", "target_threads": 1, "drafter_threads": 1, "host_memory_gb": 0.5},
        "observe": {"sinks": ["jsonl"]},
    }
    for key, value in changes.items():
        section, _, name_of_key = key.partition("__")
        raw.setdefault(section, {})[name_of_key] = value
    return make_recipe(raw)
