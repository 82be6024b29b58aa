"""Float8 targets on the CPU, with products that compute what e4m3 rows and weights stand for: rounding, wiring and refusals."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from reference_kernels import exact_product, reference_kernels
from test_target_engine import CLOSE, engine_target
from test_target_huggingface import TAPS, capture
from tiny_targets import KINDS, VOCAB, make_model, make_pack
from transformers import Qwen2Config, Qwen2Model

from slipstream.config import read_target_info
from slipstream.device.finite import not_finite
from slipstream.errors import TargetError
from slipstream.target import float8, float8_elementwise, parity
from slipstream.target.delta_net import DeltaNetMixer
from slipstream.target.dtypes import DTYPES
from slipstream.target.fingerprint import fingerprint_target
from slipstream.target.float8 import E4M3_MAX, Float8Weight, check_device, cuda_product, norm_step, round_weight
from slipstream.target.float8_elementwise import EAGER, rounded
from slipstream.target.float8_layers import Float8Layer, quantise_decoder
from slipstream.target.fused import FusedLayer
from slipstream.target.huggingface import HuggingFaceTarget, load_target
from slipstream.target.isolation import perturb
from slipstream.target.layouts import Packing
from slipstream.target.loading import load_decoder
from slipstream.target.parity import check_target, row_error

COSTS = {"llama": 0.15, "mistral": 0.15, "qwen3": 0.15, "hybrid": 0.35}
"""Errors that float8 may cause in these random models; a delta net norms small differences of what was rounded."""
HALF_STEP = 2**-4
"""Largest relative error of rounding to three bits behind the leading one."""
SMALLEST_STEP = 2**-10
"""Half the distance of e4m3's values around 0."""


def float8_target(info, *, dtype="float32", taps=TAPS) -> HuggingFaceTarget:
    model = load_decoder(info=info, dtype=dtype, device="cpu", num_layers=TAPS[-1] + 1)
    quantise_decoder(model, device="cpu")
    kernels = replace(reference_kernels(), product=lambda *given: exact_product(*given).to(DTYPES[dtype]))
    target = HuggingFaceTarget(model=model, info=info, tap_layers=taps, last_hidden=False, fingerprint="tiny", kernels=kernels)
    target.packing = Packing.PACKED
    return target


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def info(kind, tmp_path_factory):
    """A target whose norms have weights, as they go into the columns of what reads them, and whose attention is not sharp: that
    would turn a rounding of its logits into other values."""
    folder, model = tmp_path_factory.mktemp(kind), make_model(kind)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight += torch.rand_like(weight) - 0.5
            elif "proj" in name:
                weight *= 0.4
    model.save_pretrained(folder)
    return read_target_info(str(folder))


@pytest.fixture(scope="module")
def target(info):
    return float8_target(info)


def layer_of(target, index) -> Float8Layer:
    return target._model.layers[index]


def test_without_rounding_the_layers_are_the_fused_ones(info, kind, monkeypatch):
    """Scales, splits, folded norms and the residual stream: fp32 in the place of e4m3 leaves nothing of the difference."""
    monkeypatch.setattr(float8, "E4M3", torch.float32)
    monkeypatch.setattr(float8_elementwise, "E4M3", torch.float32)
    pack = make_pack()
    states, expected = capture(float8_target(info), pack), capture(engine_target(info), pack)
    for tap in range(len(TAPS)):
        assert (states[:, tap] - expected[:, tap]).abs().max() <= 5 * CLOSE[kind] * expected[:, tap].abs().max()


def test_rounding_costs_what_e4m3_costs(target, info, kind):
    pack = make_pack()
    errors = row_error(capture(target, pack), capture(engine_target(info), pack)).tolist()
    assert all(0.01 < error < COSTS[kind] for error in errors), errors
    assert target.engine.layers == "fused, float8"
    assert int(target.bad_rows) == 0


def test_bfloat16_between_the_products(info, kind):
    pack = make_pack()
    states, expected = capture(float8_target(info, dtype="bfloat16"), pack), capture(float8_target(info), pack)
    error = row_error(states, expected).max()
    assert error < 0.8 * COSTS[kind], "bf16 moves what e4m3 rounds to, so it is not close to bf16's own error"


def test_a_perturbed_document_moves_no_bit_of_the_others(target):
    pack = make_pack()
    base = capture(target, pack)
    for document in range(pack.num_documents):
        begin, end = int(pack.starts[document]), int(pack.starts[document + 1])
        moved = capture(target, perturb(pack, begin=begin, end=end, vocab_size=VOCAB))
        changed = (moved != base).any(dim=2).any(dim=1)
        assert changed[begin:end].all()
        assert not changed[:begin].any()
        assert not changed[end:].any()


def test_a_row_that_is_not_finite_is_counted_and_costs_no_other_document(info):
    target, pack = float8_target(info), make_pack((20, 20), capacity=64)
    poisoned = int(pack.token_ids[30])
    assert poisoned not in (*pack.token_ids[:30], 0)
    clean = capture(target, pack)
    target._model.embed_tokens.weight[poisoned] = float("inf")
    states = capture(target, pack)
    assert torch.equal(states[:20], clean[:20])
    assert not torch.isfinite(states[30]).any()
    assert target.bad_rows == not_finite(states).sum() > 0


def test_large_matrices_are_one_byte_a_weight_and_gates_are_not_rounded(target, info, kind):
    fused = engine_target(info)._model.layers
    for index in range(TAPS[-1] + 1):
        layer, before = layer_of(target, index), fused[index]
        weights = {name: part for name, part in layer.named_modules() if isinstance(part, Float8Weight)}
        assert sorted(weights) == ["down", "gate_up", "mixer_in", "mixer_out"]
        delta = isinstance(layer.mixer, DeltaNetMixer)
        inputs = sum(layer.mixer.widths[:4]) if delta else len(before.mixer.weight_in_PD)
        assert weights["mixer_in"].weight_PD.shape == (inputs, 64)
        assert weights["mixer_out"].weight_PD.shape == before.mixer.weight_out_DP.shape
        assert weights["gate_up"].weight_PD.shape == before.weight_gate_up_2FD.shape
        assert weights["down"].weight_PD.shape == before.weight_down_DF.shape
        for name, weight in weights.items():
            assert weight.weight_PD.dtype == torch.float8_e4m3fn
            assert weight.weight_step.shape == weight.row_step.shape == (1,)
            assert float(weight.row_step) == pytest.approx(norm_step(64) if name in ("mixer_in", "gate_up") else 1.0)
        if delta:
            assert torch.equal(layer.weight_gates_PD, before.mixer.weight_in_PD[inputs:])
        matrices = [
            part for part in (*layer.parameters(), *layer.buffers()) if part.ndim == 2 and part.dtype != torch.float8_e4m3fn
        ]
        assert sum(part.numel() for part in matrices) <= (64 * 128 + 3 * 64 * 4 if delta else 0), "nothing large is left"
    assert (kind == "hybrid") == any(isinstance(layer.mixer, DeltaNetMixer) for layer in target._model.layers)


def test_layers_that_were_fused_before_become_the_same(info, target):
    model = engine_target(info)._model
    assert all(isinstance(layer, FusedLayer) for layer in model.layers)
    quantise_decoder(model, device="cpu")
    for layer, expected in zip(model.layers, target._model.layers, strict=True):
        for name, value in expected.state_dict().items():
            assert torch.equal(layer.state_dict()[name].float(), value.float()), name


def test_the_engine_counts_its_products(target, info):
    pack = make_pack()
    before = target.engine._kernels.calls["float8 product"]
    capture(target, pack)
    assert target.engine._kernels.calls["float8 product"] - before == 4 * (TAPS[-1] + 1)
    detour = float8_target(info)
    layer_of(detour, 1).forward = lambda hidden_states, **_: hidden_states
    with pytest.raises(TargetError, match=r"launched .* not"):
        capture(detour, pack)


@pytest.mark.parametrize("spread", [0.02, 30.0])
def test_weights_keep_their_largest_and_round_all_others_by_half_a_step(spread):
    torch.manual_seed(0)
    weight, scale = torch.randn(48, 32) * spread, torch.rand(32) + 0.5
    for column_scale, wide in ((None, weight), (scale, weight * scale)):
        rounded_PD, step = round_weight(weight, column_scale_D=column_scale)
        assert float(step) == pytest.approx(float(wide.abs().max()) / E4M3_MAX)
        error = (rounded_PD.float() * step - wide).abs()
        assert (error <= torch.maximum(wide.abs() * HALF_STEP, step * SMALLEST_STEP) * 1.0001).all()
        assert float((rounded_PD.float() * step).abs().max()) == pytest.approx(float(wide.abs().max()))


def test_weights_are_rounded_the_same_in_chunks_and_zeros_stay(monkeypatch):
    weight = torch.randn(48, 32)
    whole, step = round_weight(weight)
    monkeypatch.setattr(float8, "_CHUNK_ROWS", 7)
    parts, step_of_parts = round_weight(weight)
    assert torch.equal(whole.float(), parts.float())
    assert torch.equal(step, step_of_parts)
    nothing, step = round_weight(torch.zeros(16, 16))
    assert not nothing.float().any()
    assert torch.isfinite(step).all()


def test_rows_are_rounded_each_by_its_own_largest():
    torch.manual_seed(1)
    rows = torch.randn(6, 40) * torch.tensor([1e-4, 1.0, 300.0, 1e5, 0.0, 1.0])[:, None]
    rows[5, 3] = float("inf")
    values, step = rounded(rows)
    assert (values.dtype, values.shape, step.shape) == (torch.float8_e4m3fn, (6, 40), (6,))
    back = values.float() * step[:, None]
    finite = rows[:5]
    bound = torch.maximum(finite.abs() * HALF_STEP, step[:5, None] * SMALLEST_STEP) * 1.0001
    assert ((back[:5] - finite).abs() <= bound).all()
    assert values[:4].float().abs().amax(dim=1).tolist() == [E4M3_MAX] * 4
    assert not torch.isfinite(back[5]).all()
    alone, _ = rounded(rows[2:3])
    assert torch.equal(alone.float(), values[2:3].float())


@pytest.mark.parametrize("size", [64, 576, 5120])
def test_a_norm_cannot_overflow(size):
    rows = torch.zeros(3, size)
    rows[0, 5], rows[1] = 1e6, torch.randn(size)
    values = EAGER.norm(rows, 1e-6).float()
    assert float(values[0].max()) == E4M3_MAX
    assert not values[2].any()
    wide = rows[1] / rows[1].pow(2).mean().sqrt()
    assert (
        (values[1] * norm_step(size) - wide).abs() <= torch.clamp(wide.abs() * HALF_STEP, min=norm_step(size) / 1024) * 1.001
    ).all()


def test_a_rounded_product_is_off_by_a_few_hundredths_of_its_norm():
    """Both operands are off by rounding to three bits, 0.026 of their norm each; errors of a sum are independent."""
    torch.manual_seed(2)
    rows, weight = torch.randn(64, 1024), torch.randn(96, 1024) * 0.02
    rounded_rows, step = rounded(rows)
    quantised = Float8Weight(weight)
    product = exact_product(rounded_rows, quantised.weight_PD, quantised.row_step, quantised.weight_step) * step[:, None]
    expected = rows @ weight.T
    error = float((product - expected).norm() / expected.norm())
    assert 0.03 < error < 0.045


def test_the_product_that_a_gpu_is_asked_for():
    """torch computes it on a CPU too, slowly: the arguments are those it takes, and the result is what they stand for."""
    torch.manual_seed(4)
    values, _ = rounded(torch.randn(32, 128))
    weight = Float8Weight(torch.randn(64, 128), row_step=0.5)
    operands = values, weight.weight_PD, weight.row_step, weight.weight_step
    product, expected = cuda_product()(*operands), exact_product(*operands)
    assert (product.dtype, product.shape) == (torch.bfloat16, (32, 64))
    assert (product.float() - expected).norm() <= 2**-8 * expected.norm()


def test_scales_that_were_left_out_come_back_with_the_residual():
    residual, product, step = torch.randn(4, 8), torch.randn(4, 8), torch.rand(4)
    expected = residual + product * step[:, None]
    EAGER.add_rows(residual, product, step)
    torch.testing.assert_close(residual, expected)


def test_compiled_functions_equal_the_plain_ones():
    """Traced whole, in inference mode: what Inductor is given on a GPU."""
    torch.manual_seed(3)
    heads, gates, scale = torch.randn(8, 4, 16), torch.randn(8, 4, 16), torch.rand(16)
    cases = {
        "norm": (torch.randn(8, 64), 1e-6),
        "norm_twice": (torch.randn(8, 64), torch.rand(64), 1e-6),
        "swiglu": (torch.randn(8, 64),),
        "gate_heads": (heads, gates),
        "gated_norm": (heads, gates, scale, 1e-6),
        "rounded": (torch.randn(8, 64),),
    }
    with torch.inference_mode():
        for name, arguments in cases.items():
            plain = getattr(EAGER, name)
            traced = torch.compile(plain, fullgraph=True, dynamic=False, backend="aot_eager")
            for left, right in zip(_tuple(plain(*arguments)), _tuple(traced(*arguments)), strict=True):
                assert torch.equal(left.float(), right.float())
                assert left.is_contiguous()
        traced = torch.compile(EAGER.add_rows, fullgraph=True, dynamic=False, backend="aot_eager")
        residuals = [torch.zeros(8, 16), torch.zeros(8, 16)]
        product, step = torch.randn(8, 16), torch.rand(8)
        EAGER.add_rows(residuals[0], product, step)
        traced(residuals[1], product, step)
        assert torch.equal(*residuals)


def test_devices_that_cannot_multiply_float8_are_refused(info, kind, monkeypatch):
    with pytest.raises(TargetError, match=r"compute capability 8\.9 or more, and this is the CPU") as refusal:
        load_target(info=info, dtype="float8", tap_layers=TAPS)
    assert (refusal.value.key, refusal.value.value) == ("target.dtype", "float8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(TargetError, match=r"this is a GPU of compute capability 8\.6"):
        check_device("cuda:0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    check_device("cuda:0")


def test_layers_without_float8_and_odd_sizes_are_refused():
    config = Qwen2Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1
    )
    with pytest.raises(TargetError, match="no float8 layers for a qwen2"):
        quantise_decoder(Qwen2Model(config).eval(), device="cpu")
    with pytest.raises(TargetError, match=r"multiples of 16, and one is \[24, 32\]"):
        Float8Weight(torch.zeros(24, 32))


def test_check_measures_the_error_of_each_tap_against_bfloat16(info, kind, monkeypatch):
    if kind == "hybrid":
        pytest.skip("random delta nets make more of it than is allowed")
    monkeypatch.setattr(parity, "load_target", lambda **given: float8_target(info, dtype="bfloat16"))
    results = {result.name: result for result in check_target(info=info, dtype="float8", tap_layers=TAPS, pack=make_pack())}
    errors = [results.pop(f"float8, layer {tap}") for tap in TAPS]
    assert all(error.passed and 0.01 < error.measured < COSTS[kind] for error in errors)
    assert sorted(results) == ["finite", "isolation", "isolation, next 8", "taps"]
    assert all(result.passed for result in results.values())
    monkeypatch.setattr(parity, "load_target", lambda **given: float8_target(info, dtype="bfloat16", taps=(0, 1, 3)))
    results = check_target(info=info, dtype="float8", tap_layers=TAPS, pack=make_pack())
    assert [result.name for result in results if not result.passed] == ["float8, layer 2"], "states of another layer"


def test_float8_states_have_a_fingerprint_of_their_own(info):
    assert fingerprint_target(info, dtype="float8") != fingerprint_target(info)
    assert fingerprint_target(info, dtype="float32") == fingerprint_target(info, dtype="bfloat16") == fingerprint_target(info)


def test_errors_are_means_over_tokens_of_relative_norms():
    right = torch.ones(4, 2, 9)
    right[3] = 0
    right[2, 1] = 1000
    left = right.clone()
    left[0, 0, 0] += 3.0
    left[2, 1] *= 1.5
    assert row_error(left, right).tolist() == pytest.approx([1 / 3, 0.5 / 3])
    assert math.isfinite(float(row_error(right[3:], right[3:]).sum()))


def _tuple(value):
    return value if isinstance(value, tuple) else (value,)
