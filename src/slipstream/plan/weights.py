"""How many bytes of weights a target has, from the headers of its safetensors files; no tensor is read, no torch needed."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from slipstream.config import TargetInfo

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_LONGEST_HEADER_BYTES = 2**28
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys of a `config.json` that name experts."""
_EMBEDDING = re.compile(r"(?:^|\.)embed_tokens\.weight$")
_NOT_LOADED = re.compile(r"visual|vision|audio|mtp")
"""Towers for images or drafting heads, which have layers of their own."""
_STORED = {"bfloat16": "BF16", "float32": "F32"}
"""What a file's header calls a type."""


@dataclass(frozen=True, slots=True)
class TargetWeights:
    """Numbers of weights. `layers[i]` of layer i; `head` is 0 where it is the embedding; `source` says how they were found."""

    layers: tuple[int, ...]
    embedding: int
    head: int
    source: str


@dataclass(frozen=True, slots=True)
class Converted:
    """Numbers of weights whose file has another type than they are loaded in. `decoder` has the embedding among them."""

    decoder: int
    embedding: int


def count_target_weights(info: TargetInfo) -> TargetWeights:
    """Count by the file headers where they can be read and hold every layer, else by the dense formula of the dimensions.

    The formula knows no experts; `source` names what was taken. Random weights: `count_by_config`.
    """
    embedding = info.vocab_size * info.hidden_size
    head = 0 if info.tie_word_embeddings else embedding
    if info.weights == "random":
        layers = count_by_config(info)
        assert layers is not None, "preflight refuses experts of random weights"
        return TargetWeights(layers=layers, embedding=embedding, head=head, source="config.json")
    counted = _count_by_headers(info)
    if counted is not None:
        return TargetWeights(layers=counted, embedding=embedding, head=head, source="file headers")
    layers = tuple(_by_formula(info, layer) for layer in range(info.num_layers))
    return TargetWeights(layers=layers, embedding=embedding, head=head, source="dense formula")


def count_by_config(info: TargetInfo) -> tuple[int, ...] | None:
    """Weights of each layer by the dimensions in `config.json` alone; None where there are experts, which they do not give."""
    raw = json.loads((info.folder / "config.json").read_text(encoding="utf-8"))
    text = {**raw, **raw.get("text_config", {})}
    if any((text.get(key) or 0) > 1 for key in _EXPERTS):
        return None
    return tuple(_by_formula(info, layer) for layer in range(info.num_layers))


def count_converted(info: TargetInfo, *, dtype: str, depth: int) -> Converted:
    """Of the embedding and layers 0 to `depth` - 1, loaded as `dtype`. None of them where there are no files to look at."""
    decoder = embedding = 0
    for file in sorted(info.folder.glob("*.safetensors")):
        for name, entry in _header(file).items():
            layer = _LAYER.search(name)
            if entry["dtype"] == _STORED[dtype] or _NOT_LOADED.search(name):
                continue
            if _EMBEDDING.search(name):
                embedding += math.prod(entry["shape"])
            elif layer and int(layer[1]) < depth:
                decoder += math.prod(entry["shape"])
    return Converted(decoder=decoder + embedding, embedding=embedding)


def is_delta_net(info: TargetInfo, layer: int) -> bool:
    """Whether a layer is linear attention whose dimensions are known."""
    return info.delta_net is not None and layer < len(info.layer_types) and info.layer_types[layer] == "linear_attention"


def _by_formula(info: TargetInfo, layer: int) -> int:
    """Weights of a layer with a gated MLP and either attention or, as Qwen3.5's, a gated delta net."""
    mlp = 3 * info.hidden_size * info.intermediate_size + 2 * info.hidden_size
    net = info.delta_net
    if net is not None and is_delta_net(info, layer):
        rest = (2 * net.keys + net.values) * net.conv_taps + 2 * net.num_value_heads + net.value_size
        return mlp + info.hidden_size * (net.columns + net.values) + rest
    heads, shared = info.num_attention_heads * info.head_dim, info.num_key_value_heads * info.head_dim
    return mlp + info.hidden_size * ((3 if info.attention_gate else 2) * heads + 2 * shared)


def _count_by_headers(info: TargetInfo) -> tuple[int, ...] | None:
    totals = [0] * info.num_layers
    for file in sorted(info.folder.glob("*.safetensors")):
        for name, entry in _header(file).items():
            match = _LAYER.search(name)
            if match and int(match[1]) < info.num_layers and not _NOT_LOADED.search(name):
                totals[int(match[1])] += math.prod(entry["shape"])
    return tuple(totals) if all(totals) else None


def _header(file: Path) -> Mapping[str, dict[str, Any]]:
    """Type and shape of each tensor of a file; nothing where it cannot be read. A file that did not change is read once."""
    found = file.stat()
    return _read_header(file, found.st_mtime_ns, found.st_size)


@lru_cache(maxsize=256)
def _read_header(file: Path, _changed_ns: int, _size: int) -> Mapping[str, dict[str, Any]]:
    with file.open("rb") as stream:
        prefix = stream.read(8)
        if len(prefix) < 8:
            return {}
        (length,) = struct.unpack("<Q", prefix)
        if length > _LONGEST_HEADER_BYTES:
            return {}
        try:
            header = json.loads(stream.read(length))
        except ValueError:
            return {}
    return {name: entry for name, entry in header.items() if name != "__metadata__"}
