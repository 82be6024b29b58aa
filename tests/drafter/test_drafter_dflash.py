"""The drafter's laws: train-time blocks equal decode-time blocks, nothing at or after an anchor is seen, padding is neutral."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from block_cases import MASK_TOKEN, Case, make_case, make_embedding, make_shape

from slipstream.config import DrafterShape
from slipstream.config.recipe import LayerType
from slipstream.drafter import DFlashDrafter, build_drafter

LAYERS: list[tuple[Sequence[LayerType], int | None]] = [
    (("full", "full"), None),
    (("sliding", "sliding"), 6),
    (("sliding", "full", "sliding"), 3),
]


def build(shape: DrafterShape, *, dtype: str = "float32", attention: str = "auto") -> DFlashDrafter:
    return build_drafter(shape=shape, dtype=dtype, device="cpu", seed=1, attention=attention)


def run(drafter: DFlashDrafter, case: Case, hidden_TKD: torch.Tensor | None = None) -> torch.Tensor:
    """All blocks `[N, B, D]`."""
    hidden_TKD = case.hidden_TKD if hidden_TKD is None else hidden_TKD
    return drafter(hidden_TKD=hidden_TKD, batch=case.batch, embedding_VD=make_embedding().to(drafter.dtype))


@pytest.mark.parametrize(("layers", "window"), LAYERS)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-6), ("bfloat16", 5e-2)])
def test_train_mode_equals_decode_mode(layers: Sequence[LayerType], window: int | None, dtype: str, tolerance: float) -> None:
    drafter = build(make_shape(layer_types=layers, window=window), dtype=dtype)
    case = make_case()
    blocks = run(drafter, case).detach()
    embedding = make_embedding().to(drafter.dtype)
    for number in range(case.pack.num_documents):
        first, last = case.pack.starts[number : number + 2].tolist()
        context = drafter.new_context()
        for n, anchor in enumerate(case.use.anchors.tolist()):
            if not case.use.anchor_valid[n] or not first <= anchor < last:
                continue
            start = anchor - first
            # what accepted tokens add, in pieces of any size, as a server adds them
            drafter.extend_context(context, case.hidden_TKD[first + context.length : anchor], context.length)
            tokens = torch.tensor([int(case.pack.token_ids[anchor])] + [MASK_TOKEN] * 3)
            drafted = drafter.draft(context, tokens, start, embedding)
            assert context.length == start
            torch.testing.assert_close(drafted, blocks[n], rtol=tolerance, atol=tolerance)


def test_a_draft_leaves_the_context_as_it_was_and_reads_none_after_its_anchor() -> None:
    drafter, case, embedding = build(make_shape()), make_case(), make_embedding()
    tokens = torch.tensor([9, MASK_TOKEN, MASK_TOKEN, MASK_TOKEN])
    context = drafter.new_context()
    drafter.extend_context(context, case.hidden_TKD[:20], 0)
    first = drafter.draft(context, tokens, 20, embedding)
    assert torch.equal(drafter.draft(context, tokens, 20, embedding), first)
    drafter.extend_context(context, case.hidden_TKD[20:30], 20)
    assert torch.equal(drafter.draft(context, tokens, 20, embedding), first)
    drafter.extend_context(context, case.hidden_TKD[40:45], 20)
    assert context.length == 25
    assert torch.equal(drafter.draft(context, tokens, 20, embedding), first)
    with pytest.raises(AssertionError, match="before the anchor"):
        drafter.draft(context, tokens, 26, embedding)
    with pytest.raises(AssertionError, match="without gaps"):
        drafter.extend_context(context, case.hidden_TKD[:5], 26)


def test_a_context_that_grows_in_pieces_is_the_context_added_at_once() -> None:
    drafter, embedding = build(make_shape()), make_embedding()
    hidden = torch.randn(300, 2, 32, generator=torch.Generator().manual_seed(2))
    tokens = torch.tensor([9, MASK_TOKEN, MASK_TOKEN, MASK_TOKEN])
    whole, pieces = drafter.new_context(), drafter.new_context()
    drafter.extend_context(whole, hidden, 0)
    for start in range(0, 300, 7):
        drafter.extend_context(pieces, hidden[start : start + 7], start)
    assert pieces.length == 300
    torch.testing.assert_close(
        drafter.draft(pieces, tokens, 300, embedding), drafter.draft(whole, tokens, 300, embedding), rtol=1e-5, atol=1e-6
    )


def test_a_block_cut_short_and_a_block_without_context() -> None:
    drafter, case, embedding = build(make_shape(layer_types=("sliding",), window=8)), make_case(), make_embedding()
    context = drafter.new_context()
    alone = drafter.draft(context, torch.tensor([9, MASK_TOKEN]), 0, embedding)
    assert alone.shape == (2, 32)
    drafter.extend_context(context, case.hidden_TKD[:12], 0)
    whole = drafter.draft(context, torch.tensor([9, MASK_TOKEN, MASK_TOKEN, MASK_TOKEN]), 12, embedding)
    cut = drafter.draft(context, torch.tensor([9, MASK_TOKEN]), 12, embedding)
    torch.testing.assert_close(cut, whole[:2])  # slots of a causal layer do not see later ones


@pytest.mark.parametrize(("layers", "window"), LAYERS)
def test_only_the_document_before_the_anchor_is_seen(layers: Sequence[LayerType], window: int | None) -> None:
    drafter, case = build(make_shape(layer_types=layers, window=window)), make_case()
    blocks = run(drafter, case).detach()
    document = case.pack.document_of_token()
    anchors = case.use.anchors[case.use.anchor_valid]
    for position in (0, 12, 38, 40, 52, 64, 65, 80, 101):
        hidden = case.hidden_TKD.clone()
        hidden[position] += 1.0
        changed = (run(drafter, case, hidden).detach() != blocks).flatten(1).any(dim=1)
        for n, anchor in enumerate(anchors.tolist()):
            before = document[anchor] == document[position] and position < anchor
            reach = window is None or "full" in layers or anchor - position < window
            assert bool(changed[n]) == bool(before and reach), (position, anchor)
        assert not changed[len(anchors) :].any(), "an empty anchor slot sees its own block alone"


def test_tokens_after_the_anchor_are_not_seen_and_overlapping_blocks_do_not_see_each_other() -> None:
    drafter, case = build(make_shape()), make_case(lengths=(60,), num_anchors=30)
    anchors = case.use.anchors[:30]
    assert (anchors[1:] - anchors[:-1] < 4).any(), "blocks overlap"
    blocks = run(drafter, case).detach()
    tokens = case.batch.block_token_ids_NB.clone()
    tokens[11, 0] = (tokens[11, 0] + 1) % MASK_TOKEN
    other = dataclasses.replace(case, batch=dataclasses.replace(case.batch, block_token_ids_NB=tokens))
    changed = (run(drafter, other).detach() != blocks).flatten(1).any(dim=1)
    assert torch.nonzero(changed)[:, 0].tolist() == [11]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("layers", "window"), LAYERS)
def test_rows_that_nobody_sees_are_neutral_whatever_they_hold(
    layers: Sequence[LayerType], window: int | None, dtype: str
) -> None:
    case = make_case()
    padding = case.pack.num_tokens
    results = []
    for filler in (0.0, float("nan"), float("inf")):
        drafter = build(make_shape(layer_types=layers, window=window), dtype=dtype)
        hidden = case.hidden_TKD.clone()
        hidden[padding:] = filler
        output = run(drafter, case, hidden)
        output.float().square().sum().backward()
        results.append([output.detach(), *(weight.grad for weight in drafter.parameters())])
    for other in results[1:]:
        for mine, reference in zip(other, results[0], strict=True):
            assert torch.equal(mine, reference)
            assert torch.isfinite(mine).all()


def test_a_row_that_is_seen_and_not_finite_shows() -> None:
    case = make_case()
    hidden = case.hidden_TKD.clone()
    hidden[5] = float("nan")
    output = run(build(make_shape()), case, hidden)
    later = [n for n, anchor in enumerate(case.use.anchors.tolist()) if 5 < anchor < 40 and case.use.anchor_valid[n]]
    assert later
    assert torch.isnan(output[later]).all()


def test_an_empty_pack_trains_nothing_and_stays_finite() -> None:
    drafter = build(make_shape(layer_types=("sliding", "full"), window=4))
    case = make_case(num_anchors=0)
    output = run(drafter, case, torch.full_like(case.hidden_TKD, float("nan")))
    assert torch.isfinite(output).all()
    torch.where(case.batch.supervised_NB[..., None], output, torch.zeros(())).sum().backward()
    assert all(weight.grad is not None and not weight.grad.any() for weight in drafter.parameters())


@pytest.mark.parametrize(("layers", "window"), LAYERS)
def test_flex_forward_equals_sdpa(layers: Sequence[LayerType], window: int | None) -> None:
    shape, case = make_shape(layer_types=layers, window=window), make_case()
    with torch.no_grad():
        outputs = [run(build(shape, attention=name), case) for name in ("sdpa", "flex")]
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-5, atol=1e-5)


def test_masks_made_beforehand_give_the_same_blocks() -> None:
    drafter, case = build(make_shape()), make_case()
    masks = drafter.make_masks(case.batch)
    given = drafter(hidden_TKD=case.hidden_TKD, batch=case.batch, embedding_VD=make_embedding(), masks=masks)
    assert torch.equal(given, run(drafter, case))


def test_tensor_names_and_count_are_those_that_servers_read() -> None:
    shape = make_shape()
    state = build(shape).state_dict()
    layer = {f"self_attn.{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")}
    layer |= {f"mlp.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj")}
    layer |= {"input_layernorm.weight", "post_attention_layernorm.weight"}
    names = {f"layers.{i}.{name}" for i in range(2) for name in layer}
    assert set(state) == names | {"fc.weight", "hidden_norm.weight", "norm.weight"}
    assert sum(tensor.numel() for tensor in state.values()) == shape.num_parameters
    assert state["fc.weight"].shape == (32, 64)


def test_initial_weights_follow_from_the_seed_alone() -> None:
    shape = make_shape()
    torch.manual_seed(0)
    state = build(shape).state_dict()
    rng = torch.get_rng_state()
    torch.manual_seed(99)
    again = build(shape, dtype="bfloat16").state_dict()
    other = build_drafter(shape=shape, dtype="float32", device="cpu", seed=2, attention="auto").state_dict()
    torch.manual_seed(0)
    assert torch.equal(torch.get_rng_state(), rng), "the global generator is left alone"
    for name, weight in state.items():
        assert torch.equal(weight.bfloat16(), again[name])
        if weight.dim() == 1:
            assert torch.equal(weight, torch.ones_like(weight))
        else:
            assert not torch.equal(weight, other[name])
            assert abs(float(weight.std()) / shape.initializer_range - 1) < 0.2
