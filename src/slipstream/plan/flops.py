"""Useful floating-point operations of the stages: what a model must compute, however it is computed. No torch."""

from __future__ import annotations

from slipstream.config import DrafterShape


def target_flops(
    *, matrix_parameters: int, tokens: float, attention_layers: int, attention_width: int, squared_tokens: float
) -> float:
    """A forward over packed documents: 2 x matrix parameters x tokens, and for each attention layer 2 x width x L x L.

    `tokens` are real tokens, `squared_tokens` the sum of L x L over documents of L tokens, `attention_width` heads x head
    size. That is the causal half of both products of attention. Linear attention's recurrence, convolutions and all that is
    elementwise count as nothing.
    """
    return 2.0 * matrix_parameters * tokens + 2.0 * attention_layers * attention_width * squared_tokens


def drafter_flops(*, shape: DrafterShape, tokens: int, anchors: int, visible_pairs: float, rows: int) -> float:
    """Forward and backward over one use: multiply-adds twice, backward as twice forward.

    All layers on all N B slots and the keys and values of `tokens` context tokens (3 x forward), fusion without the gradient
    of its input (2 x), the frozen head on `rows` supervised rows (2 x), attention's two products on visible pairs alone
    (3 x). What a trick leaves out still counts; what is computed twice counts once.
    """
    hidden, width = shape.hidden_size, shape.head_dim
    key_value = 2 * hidden * shape.num_key_value_heads * width
    per_slot = 2 * hidden * shape.num_attention_heads * width + key_value + 3 * hidden * shape.intermediate_size
    attention = 2 * visible_pairs * shape.num_attention_heads * width
    layers = shape.num_layers * (anchors * shape.block_size * per_slot + tokens * key_value + attention)
    fusion = tokens * shape.num_taps * hidden * hidden
    head = rows * hidden * shape.vocab_size
    return 2.0 * (3 * layers + 2 * fusion + 2 * head)
