"""Drafters at the shapes of published targets: five layers, blocks of 16, five taps."""

from __future__ import annotations

from collections.abc import Mapping

from slipstream.config import DrafterShape
from slipstream.config.target_info import spread_taps


def _shape(
    *,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    intermediate: int,
    vocab: int,
    layers: int,
    mask: int,
    theta: float,
) -> DrafterShape:
    return DrafterShape(
        num_layers=5,
        block_size=16,
        mask_token_id=mask,
        tap_layers=spread_taps(num_layers=layers, num_taps=5),
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        rms_norm_eps=1e-6,
        rope_theta=theta,
        max_position_embeddings=40960,
        layer_types=("full",) * 5,
        sliding_window=None,
        num_target_layers=layers,
        initializer_range=0.02,
    )


SHAPES: Mapping[str, DrafterShape] = {
    "qwen3.6-27b": _shape(
        hidden=5120, heads=32, kv_heads=8, head_dim=128, intermediate=17408, vocab=248320, layers=64, mask=248070, theta=1e7
    ),
    "qwen3-8b": _shape(
        hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=12288, vocab=151936, layers=36, mask=151669, theta=1e6
    ),
    "smollm2": _shape(
        hidden=576, heads=9, kv_heads=3, head_dim=64, intermediate=1536, vocab=49152, layers=30, mask=49151, theta=1e5
    ),
}
"""By the name that `slipstream bench --shape` takes."""
