"""How many bytes of weights a target has, from the headers of its safetensors files; no tensor is read, no torch needed."""

from __future__ import annotations

import json
import math
import re
import struct
from dataclasses import dataclass
from pathlib import Path

from slipstream.config import TargetInfo

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_LONGEST_HEADER_BYTES = 2**28


@dataclass(frozen=True, slots=True)
class TargetWeights:
    """Numbers of weights. `layers[i]` of layer i; `head` is 0 where it is the embedding; `source` says how they were found."""

    layers: tuple[int, ...]
    embedding: int
    head: int
    source: str


def count_target_weights(info: TargetInfo) -> TargetWeights:
    """Count by the file headers where they can be read and hold every layer, else by the dense formula of the dimensions.

    The formula knows neither experts nor linear attention; `source` names which of the two was taken.
    """
    embedding = info.vocab_size * info.hidden_size
    head = 0 if info.tie_word_embeddings else embedding
    counted = _count_by_headers(info)
    if counted is not None:
        return TargetWeights(layers=counted, embedding=embedding, head=head, source="file headers")
    attention = info.hidden_size * info.head_dim * (2 * info.num_attention_heads + 2 * info.num_key_value_heads)
    layer = attention + 3 * info.hidden_size * info.intermediate_size + 2 * info.hidden_size
    return TargetWeights(layers=(layer,) * info.num_layers, embedding=embedding, head=head, source="dense formula")


def _count_by_headers(info: TargetInfo) -> tuple[int, ...] | None:
    totals = [0] * info.num_layers
    for file in sorted(info.folder.glob("*.safetensors")):
        for name, size in _sizes(file).items():
            match = _LAYER.search(name)
            # Towers for images or drafting heads have layers of their own, which are not loaded.
            if match and int(match[1]) < info.num_layers and not re.search(r"visual|vision|audio|mtp", name):
                totals[int(match[1])] += size
    return tuple(totals) if all(totals) else None


def _sizes(file: Path) -> dict[str, int]:
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
    return {name: math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
