"""The rebuilt layers compute what transformers' own do; the kernels are told the borders, and a detour is an error."""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from reference_kernels import convolution, delta_rule, reference_kernels
from test_target_huggingface import TAPS, capture, expected_states
from tiny_targets import KINDS, VOCAB, WINDOW, make_pack, save_target
from torch import nn
from transformers import Qwen2Config, Qwen2Model

from slipstream.device.finite import not_finite
from slipstream.errors import TargetError
from slipstream.records import Pack
from slipstream.target import elementwise, kernels
from slipstream.target.attention import attend_packed
from slipstream.target.engine import Engine
from slipstream.target.frame import ALIGNMENT, send_frame
from slipstream.target.fused import FusedLayer, can_fuse
from slipstream.target.huggingface import HuggingFaceTarget, load_target
from slipstream.target.isolation import perturb
from slipstream.target.layouts import Packing, chunk_indices, lay_out
from slipstream.target.loading import load_decoder

CLOSE = {"llama": 2e-6, "mistral": 2e-6, "qwen3": 2e-6, "hybrid": 2e-5}
"""Allowed in fp32, relative to a tap's maximum. A gated delta net norms what can be far smaller than its inputs, and their
rounding grows by as much; in fp64 the same comparison gives 2e-14."""


def engine_target(info, *, taps=TAPS, last_hidden=False, dtype="float32") -> HuggingFaceTarget:
    model = load_decoder(info=info, dtype=dtype, device="cpu", num_layers=None if last_hidden else taps[-1] + 1)
    target = HuggingFaceTarget(
        model=model, info=info, tap_layers=taps, last_hidden=last_hidden, fingerprint="tiny", kernels=reference_kernels()
    )
    target.packing = Packing.PACKED
    return target


def frame_of(pack: Pack, *, packing=Packing.PACKED):
    (forward,) = lay_out(pack, packing=packing)
    return send_frame(forward, num_tokens=pack.num_tokens, ring=None, compiled=False)


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def info(kind, tmp_path_factory):
    return save_target(tmp_path_factory.mktemp(kind), kind)


@pytest.fixture(scope="module")
def target(info):
    return engine_target(info)


@pytest.mark.parametrize("packing", list(Packing))
def test_fused_layers_give_the_models_own_hidden_states(target, info, kind, packing):
    pack = make_pack()
    assert all(isinstance(layer, FusedLayer) for layer in target._model.layers)
    slot = target.hidden_states(pack, packing=packing)
    expected = expected_states(info, pack)
    for tap in range(len(TAPS)):
        assert (slot[:, tap] - expected[:, tap]).abs().max() <= CLOSE[kind] * expected[:, tap].abs().max()
    assert not slot[pack.num_tokens :].any()
    assert target.bad_rows == 0


def test_transformers_layers_on_our_attention_function_give_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr("slipstream.target.engine.can_fuse", lambda layers: False)
    for kind in ("llama", "mistral", "qwen3"):
        info = save_target(tmp_path / kind, kind)
        target = engine_target(info)
        assert target.engine.layers == "transformers"
        pack = make_pack()
        states, expected = capture(target, pack), expected_states(info, pack)
        assert (states - expected).abs().max() <= 2e-6 * expected.abs().max()


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


def test_packs_a_b_a_give_a_its_bits_again(target):
    first, second = make_pack(), make_pack((64, 3, 29), seed=11)
    slot = torch.full((96, len(TAPS), 64), float("nan"))
    target.capture(first, hidden_TKD=slot)
    once = slot.clone()
    target.capture(second, hidden_TKD=slot)
    assert torch.equal(slot, target.hidden_states(second, packing=Packing.PACKED))
    target.capture(first, hidden_TKD=slot)
    assert torch.equal(slot, once)


def test_full_and_empty_packs(target):
    full = make_pack((50, 46), capacity=96)
    assert full.cu_seqlens().tolist() == [0, 50, 96]
    assert torch.isfinite(capture(target, full)).all()
    assert not capture(target, make_pack((), capacity=32)).any()


def test_last_hidden_states_go_through_the_models_norm(info, kind):
    plain = load_target(info=info, dtype="float32", tap_layers=TAPS, last_hidden=True)
    slots = [(torch.zeros(96, len(TAPS), 64), torch.full((96, 64), float("nan"))) for _ in range(2)]
    for runner, (hidden, last) in zip((plain, engine_target(info, last_hidden=True)), slots, strict=True):
        runner.capture(make_pack(), hidden_TKD=hidden, last_hidden_TD=last)
    (_, expected), (_, last) = slots
    assert (last - expected).abs().max() <= 2 * CLOSE[kind] * expected.abs().max()
    assert not last[make_pack().num_tokens :].any()


def test_rows_that_are_not_finite_are_kept_and_counted_and_padding_never_is(info, kind):
    target = engine_target(info, taps=(0, 1))
    pack = make_pack((20, 20), capacity=64)
    poisoned = int(pack.token_ids[30])
    assert poisoned not in (*pack.token_ids[:30], 0)
    clean = capture(target, pack)
    target._model.embed_tokens.weight[poisoned] = float("inf")
    states = capture(target, pack)
    assert torch.equal(states[:20], clean[:20]), "the reference kernels keep documents apart even for NaN"
    assert not torch.isfinite(states[30]).any()
    assert torch.isfinite(states[40:]).all()
    assert target.bad_rows == not_finite(states).sum() > 0


def test_a_slot_of_nan_or_of_zeros_ends_with_the_same_bits(target):
    pack = make_pack()
    slots = [torch.full((96, len(TAPS), 64), value, dtype=torch.bfloat16) for value in (float("nan"), 0.0)]
    for slot in slots:
        target.capture(pack, hidden_TKD=slot)
    assert torch.equal(*slots)


def test_merged_weights_are_the_originals_in_order(info, kind):
    before = load_decoder(info=info, dtype="float32", device="cpu").layers[3]
    layer = FusedLayer(before)
    assert torch.equal(layer.weight_gate_up_2FD, torch.cat((before.mlp.gate_proj.weight, before.mlp.up_proj.weight)))
    attention = before.self_attn
    names = ("q_proj", "k_proj", "v_proj")
    assert torch.equal(layer.mixer.weight_in_PD, torch.cat([getattr(attention, name).weight for name in names]))
    assert layer.mixer.gated == (kind == "hybrid")
    assert layer.mixer.window == (WINDOW if kind == "mistral" else None)
    if kind == "hybrid":
        net = load_decoder(info=info, dtype="float32", device="cpu").layers[0].linear_attn
        mixer = FusedLayer(load_decoder(info=info, dtype="float32", device="cpu").layers[0]).mixer
        assert len(mixer.weight_in_PD) % 128 == 0
        begin = 0
        for name in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"):
            weight = getattr(net, name).weight
            assert torch.equal(mixer.weight_in_PD[begin : begin + len(weight)], weight)
            begin += len(weight)
        assert not mixer.weight_in_PD[begin:].any()
        assert torch.equal(torch.cat((mixer.conv_q, mixer.conv_k, mixer.conv_v)), net.conv1d.weight[:, 0])


def test_chunk_indices_are_those_of_fla():
    lengths = np.array([1, 63, 64, 65, 128, 200, 7, 512])
    borders = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    expected = [[document, chunk] for document, length in enumerate(lengths) for chunk in range(-(-length // 64))]
    assert chunk_indices(borders).tolist() == expected
    if importlib.util.find_spec("fla") is None or importlib.util.find_spec("triton") is None:
        return
    from fla.ops.utils.index import prepare_chunk_indices

    assert chunk_indices(borders).tolist() == prepare_chunk_indices(torch.from_numpy(borders), 64).tolist()


def test_a_frame_says_what_its_pack_says_from_aligned_memory():
    pack = make_pack((30, 17, 25, 1, 9), capacity=96)
    frame = frame_of(pack)
    assert frame.token_ids_RL[0].tolist() == pack.token_ids.tolist()
    assert frame.position_ids_RL[0].tolist() == pack.position_ids.tolist()
    assert frame.cu_seqlens_M.tolist() == [0, 30, 47, 72, 73, 82, 96]
    assert frame.chunks_C2.tolist() == [[document, 0] for document in range(6)]
    assert (frame.num_tokens.tolist(), frame.longest) == ([82], 30)
    views = (frame.token_ids_RL, frame.position_ids_RL, frame.cu_seqlens_M, frame.chunks_C2, frame.num_tokens)
    assert all(view.dtype == torch.int32 and view.storage_offset() % ALIGNMENT == 0 for view in views)


def test_rows_of_other_packings_are_sequences_of_their_own():
    forwards = lay_out(make_pack((50, 20, 20, 3), capacity=96), packing=Packing.PADDED)
    assert [forward.cu_seqlens.tolist() for forward in forwards] == [[0, 50], [0, 20, 40, 60]]
    assert [forward.longest for forward in forwards] == [50, 20]


def test_a_layer_that_goes_around_the_kernels_is_an_error(info):
    target = engine_target(info)
    pack = make_pack()
    target._model.layers[1].forward = lambda hidden_states, **_: hidden_states
    with pytest.raises(TargetError, match=r"launched .* not"):
        capture(target, pack)


class PastTheCount:
    """Kernels for one mixer, which computes one of its kinds of product by another function, with the same values."""

    def __init__(self, counted, *, past) -> None:
        self._counted, self._past, self._rounds = counted, past, 0

    def convolve(self, rows_TD, weight_DW, *, frame):
        self._rounds += 1
        if self._past == "convolution" and self._rounds % 3 == 2:  # of the keys alone
            return convolution(rows_TD, weight_DW, frame)
        return self._counted.convolve(rows_TD, weight_DW, frame=frame)

    def mix(self, *tensors, frame):
        if self._past == "delta_rule":
            return delta_rule(*tensors, frame)
        return self._counted.mix(*tensors, frame=frame)


@pytest.mark.parametrize(("past", "launched"), [("convolution", (8, 3)), ("delta_rule", (9, 2))])
def test_a_delta_net_that_goes_around_one_kernel_is_an_error(tmp_path, past, launched):
    """Three layers of the four up to the last tap are delta nets; each convolves queries, keys and values."""
    info, pack = save_target(tmp_path, "hybrid"), make_pack()
    target = engine_target(info)
    states = capture(target, pack)
    assert target.engine._kernels.calls == {"attention": 1, "convolution": 9, "delta_rule": 3}
    mixer = target._model.layers[1].mixer
    plain = mixer.mix
    mixer.mix = lambda columns, *, frame, kernels, ops: plain(
        columns, frame=frame, kernels=PastTheCount(kernels, past=past), ops=ops
    )
    convolutions, rules = launched
    with pytest.raises(TargetError, match=rf"'convolution': {convolutions}, 'delta_rule': {rules}\b.* not .*'convolution': 9"):
        capture(target, pack)
    mixer.mix = plain
    assert torch.equal(capture(target, pack), states)


@pytest.mark.parametrize("asked", ["softcap", "s_aux"])
def test_attention_that_the_kernels_lack_is_refused(asked):
    states = torch.zeros(1, 2, 96, 16)
    given = {"frame": frame_of(make_pack()), "kernels": reference_kernels()}
    output, _ = attend_packed(nn.Identity(), states, states, states, None, **given)
    assert output.shape == (1, 96, 2, 16)
    with pytest.raises(TargetError, match=asked):
        attend_packed(nn.Identity(), states, states, states, None, **given, **{asked: 30.0})
    with pytest.raises(TargetError, match="mask"):
        attend_packed(nn.Identity(), states, states, states, torch.zeros(1), **given)


def test_layers_with_biases_or_of_other_classes_are_left_alone():
    model = Qwen2Model(
        Qwen2Config(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
        )
    )
    assert not can_fuse(model.layers)
    assert Engine(model.eval(), kernels=reference_kernels()).layers == "transformers"


def test_hybrids_without_a_fused_layer_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("slipstream.target.engine.can_fuse", lambda layers: False)
    with pytest.raises(TargetError, match="no packed kernels for a qwen3_5_text"):
        engine_target(save_target(tmp_path, "hybrid"))


def test_missing_kernels_are_refused_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "fla", None)
    with pytest.raises(TargetError, match=r"flash-linear-attention.*nothing slower"):
        kernels.cuda_kernels(hybrid=True)
    for lacking in (None, Operator(arguments=("query", "cum_seq_q"))):
        monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", lacking)
        with pytest.raises(TargetError, match="variable-length flash attention"):
            kernels.cuda_kernels(hybrid=False)


class Operator:
    """Stands in for an operator of torch: its schema, and what it was called with."""

    def __init__(self, *, arguments) -> None:
        self.default = self
        self.asked = []
        self._schema = SimpleNamespace(arguments=[SimpleNamespace(name=name) for name in arguments])

    def __call__(self, query, key, value, *others, **keys):
        self.asked.append((*others, keys))
        return query, None, None, None, None


def test_torch_has_the_operator_of_packed_attention():
    assert kernels.cuda_kernels(hybrid=False).attention is not None


def test_flash_attention_is_asked_for_causal_windows_inside_documents(monkeypatch):
    """In the words of `varlen_attn`, whose window of (-1, 0) is the causal flag."""
    known = [argument.name for argument in torch.ops.aten._flash_attention_forward.default._schema.arguments]
    operator = Operator(arguments=known)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", operator)
    made = kernels.cuda_kernels(hybrid=False)
    frame, states = frame_of(make_pack()), torch.zeros(96, 2, 16)
    for window in (None, 12, 30):
        assert made.attend(states, states, states, frame=frame, scale=0.5, window=window) is states
    borders = [0, 30, 47, 72, 73, 82, 96]
    for (cu_q, cu_k, *numbers, keys), left in zip(operator.asked, (-1, 11, -1), strict=True):
        assert (cu_q.tolist(), cu_k is cu_q, numbers) == (borders, True, [30, 30, 0.0, left == -1, False])
        assert keys == {"scale": 0.5, "window_size_left": left, "window_size_right": 0}
    assert made.calls["attention"] == 3


def test_compiled_elementwise_equals_the_plain_functions():
    """Traced whole, in inference mode, slots written through views: what Inductor is given on a GPU."""
    torch.manual_seed(0)
    heads, gates, scale = torch.randn(8, 4, 16), torch.randn(8, 4, 16), torch.rand(16)
    cos, sin = torch.randn(8, 8), torch.randn(8, 8)
    cases = {
        "rms_norm": (torch.randn(8, 16), scale, 1e-6),
        "swiglu": (torch.randn(8, 32),),
        "rotate_both": (
            torch.randn(8, 80)[:, 16:].unflatten(1, (4, 16)),
            torch.randn(8, 2, 16),
            cos,
            sin,
            scale,
            None,
            1e-6,
        ),
        "gate_heads": (heads, gates),
        "delta_gates": (torch.randn(8, 4), torch.randn(8, 4), torch.rand(4), torch.rand(4)),
        "gated_norm": (heads, gates, scale, 1e-6),
    }
    with torch.inference_mode():
        for name, arguments in cases.items():
            plain = getattr(elementwise.EAGER, name)
            traced = torch.compile(plain, fullgraph=True, dynamic=False, backend="aot_eager")
            for left, right in zip(_tuple(plain(*arguments)), _tuple(traced(*arguments)), strict=True):
                assert torch.equal(left, right)
                assert left.is_contiguous()
        hidden = torch.randn(8, 16)
        hidden[2, 3], hidden[6, 0] = float("nan"), float("inf")
        traced = torch.compile(elementwise.keep_rows, fullgraph=True, dynamic=False, backend="aot_eager")
        slot, bad = torch.full((8, 3, 16), float("nan")), torch.zeros(8, dtype=torch.bool)
        for tap in range(3):
            traced(hidden, slot[:, tap], bad, torch.tensor([6], dtype=torch.int32))
    assert torch.equal(slot[:6].nan_to_num(7.0), hidden[:6, None].expand(-1, 3, -1).nan_to_num(7.0)), "as they are"
    assert not slot[6:].any()
    assert bad.tolist() == [row == 2 for row in range(8)], "padding never counts"


def _tuple(value):
    return value if isinstance(value, tuple) else (value,)
