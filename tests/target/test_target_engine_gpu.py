"""The target on a GPU: states as transformers has them, documents apart to the bit, no waiting, no growing, the right kernels.

The hybrid has the delta heads of the 27B shape (16 and 48 of 128): FLA's kernels are compiled and tuned by head counts. That
is what its first test waits for.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.qwen3_5 import modeling_qwen3_5

from slipstream.config import read_target_info
from slipstream.device.finite import not_finite
from slipstream.errors import TargetError
from slipstream.target.graphs import run_crowded
from slipstream.target.huggingface import load_target
from slipstream.target.isolation import pack_documents, perturb
from slipstream.target.layouts import Packing, chunk_indices

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

VOCAB, HIDDEN, WINDOW = 512, 256, 40
TAPS = (0, 2, 3)
PACK_TOKENS = 2048
LENGTHS = (130, 64, 1, 700, 257, 3, 500)
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 384,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "initializer_range": 0.08,
    "tie_word_embeddings": False,
}
DELTA = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention", "linear_attention"],
}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**COMMON)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**COMMON, sliding_window=WINDOW)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**COMMON)),
    "hybrid": lambda: Qwen3_5ForCausalLM(Qwen3_5TextConfig(**{**COMMON, "head_dim": 256, **DELTA})),
}


@pytest.fixture(scope="module", params=list(MODELS))
def kind(request):
    torch._dynamo.reset()
    return request.param


@pytest.fixture(scope="module")
def info(kind, tmp_path_factory):
    folder = tmp_path_factory.mktemp(kind)
    torch.manual_seed(5)
    MODELS[kind]().to(torch.bfloat16).save_pretrained(folder)
    return read_target_info(str(folder))


@pytest.fixture(scope="module")
def target(info):
    return load_target(info=info, dtype="bfloat16", tap_layers=TAPS, device="cuda", pack_tokens=PACK_TOKENS)


def make_pack(lengths=LENGTHS, capacity=PACK_TOKENS, *, seed=1):
    generator = np.random.default_rng(seed)
    documents = [generator.integers(1, VOCAB, size=length).astype(np.int32) for length in lengths]
    return pack_documents(documents, capacity_tokens=capacity)


def empty_slot(pack, value=float("nan")):
    return torch.full((pack.capacity_tokens, len(TAPS), HIDDEN), value, dtype=torch.bfloat16, device="cuda")


def capture(target, pack):
    slot = empty_slot(pack)
    assert target.capture(pack, hidden_TKD=slot) == pack.num_tokens
    return slot


@contextmanager
def torch_only():
    """transformers' own torch functions of the delta net: where FLA is installed it would call FLA, which knows no CPU."""
    names = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", "causal_conv1d_fn", "causal_conv1d_update")
    before = {name: getattr(modeling_qwen3_5, name) for name in names}
    for name, function in before.items():
        setattr(modeling_qwen3_5, name, function.__wrapped__)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(modeling_qwen3_5, name, function)


def expected_states(info, pack, *, dtype=torch.float32):
    """Every document alone, on the CPU; in fp32 the truth that bf16 rounds."""
    model = AutoModelForCausalLM.from_pretrained(info.folder, dtype=dtype).eval()
    states = torch.zeros(pack.capacity_tokens, len(TAPS), HIDDEN)
    for begin, end in zip(pack.starts[:-1], pack.starts[1:], strict=True):
        with torch.inference_mode(), torch_only():
            ids = torch.from_numpy(pack.token_ids[begin:end]).long()[None]
            hidden = model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
        for tap, layer in enumerate(TAPS):
            states[begin:end, tap] = hidden[layer + 1][0].float()
    return states


def changed_rows(left, right):
    return (left != right).any(dim=2).any(dim=1)


def test_every_kind_is_packed_and_fused(target):
    assert target.packing is Packing.PACKED
    assert target.engine.layers == "fused"


@pytest.mark.parametrize("capacity", [PACK_TOKENS, 896])
def test_states_are_the_models_own(target, info, capacity):
    """As near to fp32 as transformers' own bf16. 896 tokens run the plain elementwise functions, 2,048 the compiled ones."""
    lengths = LENGTHS if capacity == PACK_TOKENS else (130, 64, 1, 300, 257, 3)
    pack = make_pack(lengths, capacity)
    states, expected = capture(target, pack).float().cpu(), expected_states(info, pack)
    rounded = expected_states(info, pack, dtype=torch.bfloat16)
    for tap in range(len(TAPS)):
        error, allowed = ((given[:, tap] - expected[:, tap]).norm() / expected[:, tap].norm() for given in (states, rounded))
        assert error <= 1.25 * allowed + 1e-3, f"tap {tap}: {allowed} is what transformers rounds"
    assert not states[pack.num_tokens :].any()
    assert int(target.bad_rows) == 0


def test_a_perturbed_document_moves_no_bit_of_the_others(target):
    pack = make_pack()
    base = capture(target, pack)
    for document in range(pack.num_documents):
        begin, end = int(pack.starts[document]), int(pack.starts[document + 1])
        changed = changed_rows(capture(target, perturb(pack, begin=begin, end=end, vocab_size=VOCAB)), base)
        assert changed[begin:end].all()
        assert not changed[end : end + 8].any(), "where a convolution leaks"
        assert not changed[:begin].any()
        assert not changed[end:].any()
    noisy = perturb(pack, begin=pack.num_tokens, end=PACK_TOKENS, vocab_size=VOCAB)
    assert torch.equal(capture(target, noisy), base)


def test_packed_gives_what_alone_gives(target):
    pack = make_pack()
    packed, alone = (target.hidden_states(pack, packing=packing).float() for packing in (Packing.PACKED, Packing.ALONE))
    assert (packed - alone).norm() <= 2e-2 * alone.norm()


def test_packs_a_b_a_through_one_slot_give_a_its_bits_again(target, info):
    first, second = make_pack(), make_pack((900, 20, 64, 65), seed=2)
    slot = empty_slot(first)
    results = []
    for pack in (first, second, first):
        target.capture(pack, hidden_TKD=slot)
        results.append(slot.clone())
    assert torch.equal(results[0], results[2])
    fresh = load_target(info=info, dtype="bfloat16", tap_layers=TAPS, device="cuda", pack_tokens=PACK_TOKENS)
    assert torch.equal(capture(fresh, second), results[1])


def test_a_slot_of_nan_and_one_of_zeros_end_with_the_same_bits(target):
    pack = make_pack()
    slots = [empty_slot(pack, value) for value in (float("nan"), 0.0)]
    for slot in slots:
        target.capture(pack, hidden_TKD=slot)
    assert torch.equal(*slots)


def test_a_bad_document_costs_itself_alone(info, kind):
    target = load_target(info=info, dtype="bfloat16", tap_layers=TAPS, device="cuda", pack_tokens=PACK_TOKENS)
    pack = make_pack()
    begin, end = int(pack.starts[3]), int(pack.starts[4])
    ids = np.minimum(pack.token_ids, VOCAB - 2)
    ids[begin + 5] = VOCAB - 1
    pack = replace(pack, token_ids=ids)
    clean = capture(target, pack)
    target._model.embed_tokens.weight[VOCAB - 1] = float("inf")
    states = capture(target, pack)
    assert not changed_rows(states, clean)[:begin].any()
    assert not changed_rows(states, clean)[end:].any()
    assert int(target.bad_rows) == int(not_finite(states).sum()) > 0


def test_a_capture_never_waits_and_nothing_grows(target):
    """Four captures ahead of the device, which is what a loop's slots allow."""
    packs = [make_pack(seed=seed) for seed in range(2)] + [
        make_pack((900, 20, 64, 65), seed=7),
        make_pack((PACK_TOKENS,), seed=8),
    ]
    slot = empty_slot(packs[0])

    def capture_all():
        for pack in packs:
            target.capture(pack, hidden_TKD=slot)

    for _ in range(2):
        capture_all()
        torch.cuda.synchronize()
    before = allocated()
    for _ in range(5):
        torch.cuda.set_sync_debug_mode("error")
        try:
            capture_all()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
    assert allocated() == before


def test_after_the_most_crowded_pack_no_other_needs_more(target):
    """Whatever a pack's documents, what was allocated for the one with most chunks is enough: the driver is not asked again."""
    rng = np.random.default_rng(9)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    run_crowded(target, num_documents=41, pack_tokens=PACK_TOKENS, slot_dtype=torch.bfloat16)
    packs = []
    for number in range(1, 41, 3):
        borders = np.sort(rng.choice(np.arange(1, PACK_TOKENS - 7), size=number, replace=False))
        packs.append(make_pack(np.diff(np.array([0, *borders])), seed=number))
    slot = empty_slot(packs[0])
    target.capture(packs[0], hidden_TKD=slot)
    before = allocated()
    for pack in packs:
        target.capture(pack, hidden_TKD=slot)
        torch.cuda.synchronize()
    assert allocated() == before


def allocated():
    """How often the driver was asked for memory on the device, and for page-locked memory."""
    return torch.cuda.memory_stats()["num_device_alloc"], torch.cuda.host_memory_stats()["num_host_alloc"]


def test_the_kernels_are_those_we_meant(target, kind):
    pack = make_pack()
    capture(target, pack)
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        capture(target, pack)
        torch.cuda.synchronize()
    names = " ".join(event.key for event in trace.key_averages())
    wanted = ["causal_conv1d_fwd", "chunk_gated_delta_rule_fwd", "flash_fwd"] if kind == "hybrid" else ["flash_fwd"]
    assert [name for name in wanted if name not in names] == []
    assert "conv_depthwise" not in names


def test_sliding_windows_count_inside_a_document(target, info, kind):
    pack = make_pack((WINDOW - 2, 6 * WINDOW), 512)
    begin = int(pack.starts[1])
    one = load_target(info=info, dtype="bfloat16", tap_layers=(0, 3), device="cuda", pack_tokens=PACK_TOKENS)
    states = [
        one.hidden_states(each, packing=Packing.PACKED)[:, 0]
        for each in (pack, perturb(pack, begin=begin, end=begin + 1, vocab_size=VOCAB))
    ]
    changed = (states[0] != states[1]).any(dim=1)[begin:]
    assert changed[:3].all()
    if kind == "mistral":
        assert not changed[WINDOW:].any()
        assert changed[: WINDOW - 1].float().mean() > 0.25


def test_without_its_kernels_a_target_is_refused(info, kind, monkeypatch):
    monkeypatch.setitem(sys.modules, "fla", None)
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", None)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", None)
    with pytest.raises(TargetError, match="nothing slower takes its place"):
        load_target(info=info, dtype="bfloat16", tap_layers=TAPS, device="cuda")


def test_float32_runs_as_transformers_has_it(info, kind):
    if kind == "hybrid":
        pytest.skip("transformers would take FLA's kernels, and tune them for fp32: a minute for a path that is not ours")
    target = load_target(info=info, dtype="float32", tap_layers=TAPS, device="cuda", packing="alone")
    assert target.engine is None
    pack = make_pack((60, 30), 128)
    slot = torch.zeros(128, len(TAPS), HIDDEN, device="cuda")
    target.capture(pack, hidden_TKD=slot)
    expected = expected_states(info, pack)
    assert (slot.cpu() - expected).norm() <= 1e-3 * expected.norm()


def test_chunk_indices_are_those_of_fla():
    from fla.ops.utils.index import prepare_chunk_indices

    borders = np.cumsum([0, 1, 63, 64, 65, 128, 200, 7, 512]).astype(np.int32)
    on_device = prepare_chunk_indices(torch.from_numpy(borders).cuda(), 64)
    assert chunk_indices(borders).tolist() == on_device.tolist()
