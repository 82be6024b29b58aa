"""Equality with the `dflash` package, the served behaviour: our weights in its model, block for block and step for step."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from block_cases import MASK_TOKEN, make_case, make_embedding, make_shape
from dflash.model import DFlashDraftModel, _make_cache
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, Qwen3RotaryEmbedding, apply_rotary_pos_emb

from slipstream.config import DrafterShape
from slipstream.config.recipe import LayerType
from slipstream.drafter import DFlashDrafter, build_drafter
from slipstream.drafter.layers import RMSNorm, rope_tables, rotate

LAYERS: list[tuple[Sequence[LayerType], int | None]] = [
    (("full", "full"), None),
    (("sliding", "sliding"), 6),
    (("sliding", "sliding"), 2),
    (("sliding", "full", "sliding"), 9),
]


def served_model(drafter: DFlashDrafter) -> DFlashDraftModel:
    """The package's model with our weights."""
    shape: DrafterShape = drafter.shape
    config = Qwen3Config(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab_size,
        rms_norm_eps=shape.rms_norm_eps,
        max_position_embeddings=shape.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        layer_types=[f"{kind}_attention" for kind in shape.layer_types],
        use_sliding_window=shape.sliding_window is not None,
        sliding_window=shape.sliding_window,
        attention_bias=False,
        num_target_layers=shape.num_target_layers,
        dflash_config={
            "mask_token_id": shape.mask_token_id,
            "target_layer_ids": list(shape.tap_layers),
            "block_size": shape.block_size,
        },
    )
    model = DFlashDraftModel(config).to(drafter.dtype).eval()
    missing, unexpected = model.load_state_dict(drafter.state_dict(), strict=False)
    assert not missing
    assert not unexpected
    return model


def build(layers: Sequence[LayerType], window: int | None, dtype: str) -> DFlashDrafter:
    shape = make_shape(layer_types=layers, window=window, block=5)
    drafter = build_drafter(shape=shape, dtype=dtype, device="cpu", seed=1, attention="auto")
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for weight in drafter.parameters():
            if weight.dim() == 1:
                weight.copy_(1 + 0.3 * torch.randn(weight.shape, generator=generator))
    return drafter


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours.float() - theirs.float()).norm() / theirs.float().norm())


@torch.no_grad()
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 2e-2)])
@pytest.mark.parametrize(("layers", "window"), LAYERS)
def test_training_blocks_are_the_served_blocks(
    layers: Sequence[LayerType], window: int | None, dtype: str, tolerance: float
) -> None:
    drafter = build(layers, window, dtype)
    model, embedding = served_model(drafter), make_embedding().to(drafter.dtype)
    case = make_case(block=5)
    blocks = drafter(hidden_TKD=case.hidden_TKD, batch=case.batch, embedding_VD=embedding)
    for n in range(int(case.use.anchor_valid.sum())):
        anchor, first = int(case.batch.anchors_N[n]), int(case.batch.anchor_start_N[n])
        served = model(
            position_ids=torch.arange(anchor - first + 5)[None],
            noise_embedding=embedding[case.batch.block_token_ids_NB[n]][None],
            target_hidden=case.hidden_TKD[first:anchor].flatten(1)[None].to(drafter.dtype),
        )[0]
        assert relative_error(blocks[n], served) < tolerance, (n, anchor)


@torch.no_grad()
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 2e-2)])
@pytest.mark.parametrize(("layers", "window"), LAYERS)
def test_decode_mode_follows_the_served_loop(
    layers: Sequence[LayerType], window: int | None, dtype: str, tolerance: float
) -> None:
    drafter = build(layers, window, dtype)
    model, embedding = served_model(drafter), make_embedding().to(drafter.dtype)
    hidden = make_case().hidden_TKD.to(drafter.dtype)
    tokens = torch.tensor([17] + [MASK_TOKEN] * 4)
    cache, context, start = _make_cache(model.config), drafter.new_context(), 0
    for produced in (11, 1, 5, 3, 1, 5):
        new = hidden[start : start + produced]
        served = model(
            position_ids=torch.arange(start, start + produced + 5)[None],
            noise_embedding=embedding[tokens][None],
            target_hidden=new.flatten(1)[None],
            past_key_values=cache,
            use_cache=True,
        )[0]
        cache.crop(-5)
        drafter.extend_context(context, new, start)
        start += produced
        ours = drafter.draft(context, tokens, start, embedding)
        assert relative_error(ours, served) < tolerance, start


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rope_and_norm_are_qwen3s_to_the_bit(dtype: torch.dtype) -> None:
    config = Qwen3Config(head_dim=64, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    positions = torch.tensor([0, 1, 7, 300, 8191, 40000])
    x = torch.randn(6, 3, 64, generator=torch.Generator().manual_seed(8)).to(dtype)
    cos, sin = Qwen3RotaryEmbedding(config)(x, positions[None])
    ours = rope_tables(positions_R=positions, head_dim=64, theta=1e6, dtype=dtype)
    assert torch.equal(ours[0], cos[0])
    assert torch.equal(ours[1], sin[0])
    wanted, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)
    assert torch.equal(rotate(x, ours), wanted[0].transpose(0, 1))
    norm, reference = RMSNorm(size=64, eps=1e-6, dtype=dtype), Qwen3RMSNorm(64, eps=1e-6).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(64))
        reference.weight.copy_(norm.weight)
    torch.testing.assert_close(norm(x), reference(x), rtol=1e-6 if dtype == torch.float32 else 8e-3, atol=0)
