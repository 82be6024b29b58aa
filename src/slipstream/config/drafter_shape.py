"""The drafter's dimensions once the recipe's gaps are filled from the target's. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.config.recipe import LayerType, Recipe
from slipstream.config.target_info import TargetInfo, resolve_mask_token, resolve_taps
from slipstream.errors import PreflightError


@dataclass(frozen=True, slots=True)
class DrafterShape:
    """Everything that fixes the drafter's tensors, masks and export. `tap_layers` are 0-based ids of layer outputs."""

    num_layers: int
    block_size: int
    mask_token_id: int
    tap_layers: tuple[int, ...]
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    layer_types: tuple[LayerType, ...]
    sliding_window: int | None
    num_target_layers: int
    initializer_range: float

    @property
    def num_taps(self) -> int:
        """K, the captured layers."""
        return len(self.tap_layers)

    @property
    def num_parameters(self) -> int:
        """Trained weights: fusion, norms and layers; the embedding and the head are the target's."""
        hidden, head = self.hidden_size, self.head_dim
        attention = hidden * head * (2 * self.num_attention_heads + 2 * self.num_key_value_heads) + 2 * head
        layer = attention + 3 * hidden * self.intermediate_size + 2 * hidden
        return self.num_layers * layer + self.num_taps * hidden * hidden + 2 * hidden


def resolve_drafter(*, recipe: Recipe, info: TargetInfo) -> DrafterShape:
    """The drafter that a recipe asks for on this target. Raises `PreflightError` when the two do not fit."""
    section = recipe.drafter
    heads = section.num_attention_heads or info.num_attention_heads
    kv_heads = section.num_key_value_heads or info.num_key_value_heads
    if heads % kv_heads:
        raise PreflightError(
            key="drafter.num_key_value_heads", value=kv_heads, rule=f"must divide the number of query heads, {heads}"
        )
    head_dim = section.head_dim or info.head_dim
    if head_dim % 2:
        raise PreflightError(key="drafter.head_dim", value=head_dim, rule="must be even, since RoPE rotates pairs")
    return DrafterShape(
        num_layers=section.num_layers,
        block_size=section.block_size,
        mask_token_id=resolve_mask_token(mask_token_id=section.mask_token_id, info=info),
        tap_layers=resolve_taps(taps=recipe.target.tap_layers, num_taps=recipe.target.num_taps, info=info),
        hidden_size=info.hidden_size,
        intermediate_size=section.intermediate_size or info.intermediate_size,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=info.vocab_size,
        rms_norm_eps=info.rms_norm_eps,
        rope_theta=info.rope_theta,
        max_position_embeddings=info.max_position_embeddings,
        layer_types=section.layer_types_list(),
        sliding_window=section.sliding_window,
        num_target_layers=info.num_layers,
        initializer_range=section.initializer_range,
    )
