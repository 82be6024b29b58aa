"""What a target's own files say of it, read without torch or transformers: `config.json` and `tokenizer.json`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from slipstream.errors import PreflightError

MASK_TOKENS: Mapping[str, int] = {
    "qwen3": 151669,
    "qwen3_moe": 151669,
    "qwen3_5": 248070,
    "qwen3_5_text": 248070,
    "qwen3_5_moe": 248070,
    "minimax_m2": 200054,
}
"""Mask tokens that published DFlash drafters use, by the target's `model_type`; others must be given in the recipe."""


GATED = ("qwen3_5", "qwen3_next")
"""Beginnings of the `model_type` of targets whose attention gates its output."""


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """Dimensions of a hybrid target's linear attention: heads of queries and keys, heads of values, their widths, conv taps."""

    num_key_heads: int
    num_value_heads: int
    key_size: int
    value_size: int
    conv_taps: int

    @property
    def keys(self) -> int:
        """Width of all queries, or of all keys."""
        return self.num_key_heads * self.key_size

    @property
    def values(self) -> int:
        """Width of all values."""
        return self.num_value_heads * self.value_size

    @property
    def columns(self) -> int:
        """Columns of its input projections: query, key, value, output gate, strength, step."""
        return 2 * self.keys + 2 * self.values + 2 * self.num_value_heads


@dataclass(frozen=True, slots=True)
class TargetInfo:
    """Dimensions and token ids of a target. Sizes in units of weights, `rope_theta` as the target rotates.

    `weights` "random": they are made up when they are needed, whatever the folder holds.
    """

    folder: Path
    model_type: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    layer_types: tuple[str, ...]
    sliding_window: int | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    weights: Literal["saved", "random"] = "saved"
    delta_net: DeltaNet | None = None
    """Of its linear-attention layers, where there are any and `config.json` gives their dimensions."""
    attention_gate: bool = False
    """Whether attention gates its output, by a second half of the query projection."""

    @property
    def is_hybrid(self) -> bool:
        """Whether some layers carry a recurrent state (linear attention): such layers leak across packed documents."""
        return any(kind not in ("full_attention", "sliding_attention", "chunked_attention") for kind in self.layer_types)


def spread_taps(*, num_layers: int, num_taps: int) -> tuple[int, ...]:
    """Evenly spread tap layers, 0-based: `round(1 + i (N - 4) / (K - 1))`, and `N // 2` for one (DFlash, arXiv 2602.06036)."""
    if num_taps == 1:
        return (num_layers // 2,)
    span = num_layers - 4
    return tuple(round(1 + i * span / (num_taps - 1)) for i in range(num_taps))


def find_target(model: str) -> Path:
    """The local folder of a target: a path, or the newest snapshot of a hub id in the local Hugging Face cache.

    Raises `PreflightError` when neither is there; nothing is downloaded.
    """
    path = Path(model).expanduser()
    if (path / "config.json").is_file():
        return path
    hub = Path(os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME") or "~/.cache/huggingface") / "hub")
    snapshots = hub.expanduser() / f"models--{model.replace('/', '--')}" / "snapshots"
    found = sorted(snapshots.glob("*/config.json"), key=lambda file: file.stat().st_mtime)
    if found:
        return found[-1].parent
    raise PreflightError(
        key="target.model",
        value=model,
        rule="is neither a folder with a config.json nor a model in the local Hugging Face cache",
        hint="give a local folder, or download it first (hf download)",
    )


def read_target_info(model: str, *, weights: Literal["saved", "random"] = "saved") -> TargetInfo:
    """Read a target's `config.json`. Raises `PreflightError` for what is missing or malformed, with the file and the key."""
    folder = find_target(model)
    file = folder / "config.json"
    try:
        raw = json.loads(file.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise PreflightError(key="target.model", value=str(file), rule=f"cannot be read as JSON: {error}") from error
    text: dict[str, Any] = {**raw, **raw.get("text_config", {})}
    try:
        info = _info(folder=folder, text=text, tied=bool(raw.get("tie_word_embeddings", text.get("tie_word_embeddings", True))))
    except KeyError as error:
        raise PreflightError(
            key="target.model", value=str(file), rule=f"has no {error.args[0]}", hint="a decoder-only language model is needed"
        ) from error
    return replace(info, weights=weights)


def _info(*, folder: Path, text: dict[str, Any], tied: bool) -> TargetInfo:
    heads, layers = int(text["num_attention_heads"]), int(text["num_hidden_layers"])
    rope = text.get("rope_parameters") or {}
    theta = rope.get("rope_theta", rope.get("full_attention", {}).get("rope_theta", text.get("rope_theta", 10000.0)))
    window = text.get("sliding_window") if text.get("use_sliding_window", True) else None
    default_kind = "sliding_attention" if window and text.get("model_type") == "mistral" else "full_attention"
    generation = folder / "generation_config.json"
    eos = json.loads(generation.read_text()).get("eos_token_id") if generation.is_file() else None
    eos = text.get("eos_token_id") if eos is None else eos
    return TargetInfo(
        folder=folder,
        model_type=str(text["model_type"]),
        hidden_size=int(text["hidden_size"]),
        intermediate_size=int(text["intermediate_size"]),
        num_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=int(text.get("num_key_value_heads") or heads),
        head_dim=int(text.get("head_dim") or text["hidden_size"] // heads),
        vocab_size=int(text["vocab_size"]),
        rms_norm_eps=float(text.get("rms_norm_eps", 1e-6)),
        rope_theta=float(theta),
        max_position_embeddings=int(text.get("max_position_embeddings", 32768)),
        tie_word_embeddings=tied,
        layer_types=tuple(text.get("layer_types") or [default_kind] * layers),
        sliding_window=window,
        bos_token_id=text.get("bos_token_id"),
        eos_token_ids=tuple([eos] if isinstance(eos, int) else eos or []),
        pad_token_id=text.get("pad_token_id"),
        delta_net=delta_net_of(text),
        attention_gate=bool(text.get("attn_output_gate", str(text["model_type"]).startswith(GATED))),
    )


def delta_net_of(text: Mapping[str, Any]) -> DeltaNet | None:
    """The dimensions of linear attention that a config gives, in the words of Qwen3.5's; none where it gives none."""
    if "linear_num_value_heads" not in text:
        return None
    return DeltaNet(
        num_key_heads=int(text["linear_num_key_heads"]),
        num_value_heads=int(text["linear_num_value_heads"]),
        key_size=int(text["linear_key_head_dim"]),
        value_size=int(text["linear_value_head_dim"]),
        conv_taps=int(text.get("linear_conv_kernel_dim", 4)),
    )


def resolve_taps(*, taps: str | tuple[int, ...], num_taps: int, info: TargetInfo) -> tuple[int, ...]:
    """The tapped layers of a recipe for this target. Raises `PreflightError` when one is outside `0 … num_layers - 2`."""
    if isinstance(taps, str):
        if num_taps > 1 and info.num_layers - 4 < num_taps - 1:
            raise PreflightError(
                key="target.num_taps",
                value=num_taps,
                rule=f"too many to spread over {info.num_layers} layers",
                hint=f"at most {max(1, info.num_layers - 3)}, or list target.tap_layers",
            )
        return spread_taps(num_layers=info.num_layers, num_taps=num_taps)
    if taps[-1] > info.num_layers - 2:
        raise PreflightError(
            key="target.tap_layers",
            value=list(taps),
            rule=f"layer {taps[-1]} is not below the last of {info.num_layers} layers, whose output servers cannot tap",
            hint=f"use ids from 0 to {info.num_layers - 2}",
        )
    return taps


def resolve_mask_token(*, mask_token_id: int | None, info: TargetInfo) -> int:
    """The mask token of a recipe for this target. Raises `PreflightError` when it is unknown or outside the vocabulary."""
    token = MASK_TOKENS.get(info.model_type) if mask_token_id is None else mask_token_id
    if token is None:
        raise PreflightError(
            key="drafter.mask_token_id",
            value=None,
            rule=f"is required: no mask token is known for targets of type {info.model_type}",
            hint="name a token that no conversation contains, for example a reserved special token",
        )
    if token >= info.vocab_size:
        raise PreflightError(
            key="drafter.mask_token_id",
            value=token,
            rule=f"is outside the target's vocabulary of {info.vocab_size}",
            hint="servers do not resize target embeddings: take a token that has an embedding row",
        )
    return token
