"""What preflight looks at, made of files alone: no model is needed to be refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from slipstream.config import Recipe, make_recipe
from slipstream.corpus.meta import CorpusMeta, template_fingerprint, tokenizer_fingerprint
from slipstream.corpus.store import write_store
from slipstream.launch.preflight import preflight

VOCAB = 256
CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
EXPORT = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "num_target_layers": 8,
    "dflash_config": {"block_size": 4, "mask_token_id": 3, "target_layer_ids": [1, 3, 5]},
}


def write_ground(root: Path) -> None:
    """A target by its files alone, a corpus, prompts, and an exported drafter."""
    target, rng = root / "target", np.random.default_rng(0)
    target.mkdir(parents=True)
    (target / "config.json").write_text(json.dumps(CONFIG))
    (target / "tokenizer.json").write_text("{}")
    save_file({"model.embed_tokens.weight": np.zeros((VOCAB, 64), np.float32)}, target / "model.safetensors")
    write_corpus(root, lengths=rng.integers(10, 120, 20).tolist())
    (root / "prompts.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "hello"}]}) + "\n")
    drafter = root / "drafter"
    drafter.mkdir()
    (drafter / "config.json").write_text(json.dumps(EXPORT))
    shape = preflight(recipe_of(root)).shape
    save_file({"fc.weight": np.zeros(shape.num_parameters, np.float16)}, drafter / "model.safetensors")


def write_corpus(root: Path, *, lengths: list[int], answer: bool = True, high: int = VOCAB) -> None:
    rng, target = np.random.default_rng(1), root / "target"
    documents = [
        {"token_ids": rng.integers(10, high, length).tolist(), "loss_mask": [False] * 5 + [answer] * (length - 5)}
        for length in lengths
    ]
    meta = CorpusMeta(
        target=str(target),
        tokenizer_fingerprint=tokenizer_fingerprint(target),
        template_fingerprint=template_fingerprint(target),
    )
    shutil.rmtree(root / "corpus", ignore_errors=True)
    write_store(root / "corpus", documents, meta)


def recipe_of(root: Path, **changes: Any) -> Recipe:
    """A recipe that can run; `changes` are `section__key=value`."""
    raw: dict[str, Any] = {
        "name": "tiny",
        "runs": str(root / "runs"),
        "target": {"model": str(root / "target"), "num_taps": 3},
        "corpus": {"path": str(root / "corpus")},
        "plan": {"pack_tokens": 128, "pack_anchors": 32, "packs_per_step": 2, "epochs": 2},
        "drafter": {"mask_token_id": 3, "num_layers": 1, "block_size": 4},
        "placement": {"device": "cpu", "host_memory_gb": 0.5},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        if name:
            raw.setdefault(section, {})[name] = value
        else:
            raw[section] = value
    return make_recipe(raw)


def listing(root: Path) -> list[tuple[str, int]]:
    return sorted((str(path.relative_to(root)), path.lstat().st_mtime_ns) for path in root.rglob("*"))


def rewrite(file: Path, **changes: Any) -> None:
    """Change keys of a JSON file; None takes one out."""
    content = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
