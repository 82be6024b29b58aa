"""Captured states are the model's own, whatever shares the pack; each trap of packing is a test."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_targets import HIDDEN, KINDS, LAYERS, VOCAB, WINDOW, make_pack, save_target
from torch import nn
from transformers import AutoModelForCausalLM

from slipstream.device.finite import not_finite
from slipstream.errors import TargetError
from slipstream.target.huggingface import load_target
from slipstream.target.isolation import measure_leak, pack_documents, perturb
from slipstream.target.layouts import Packing, lay_out

TAPS = (0, 2, 3)


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def info(kind, tmp_path_factory):
    return save_target(tmp_path_factory.mktemp(kind), kind)


@pytest.fixture(scope="module")
def target(info):
    return load_target(info=info, dtype="float32", tap_layers=TAPS)


def capture(target, pack, *, dtype=torch.float32):
    slot = torch.full((pack.capacity_tokens, target.num_taps, HIDDEN), float("nan"), dtype=dtype)
    assert target.capture(pack, hidden_TKD=slot) == pack.num_tokens
    return slot


def expected_states(info, pack):
    """Each document alone through the untouched model, as transformers reports its hidden states."""
    model = AutoModelForCausalLM.from_pretrained(info.folder, dtype=torch.float32).eval()
    states = torch.zeros(pack.capacity_tokens, len(TAPS), HIDDEN)
    for begin, end in zip(pack.starts[:-1], pack.starts[1:], strict=True):
        ids = torch.from_numpy(pack.token_ids[begin:end]).long()[None]
        with torch.no_grad():
            hidden = model(input_ids=ids, output_hidden_states=True).hidden_states
        for tap, layer in enumerate(TAPS):
            states[begin:end, tap] = hidden[layer + 1][0]
    return states


def test_capture_equals_the_models_own_hidden_states(target, info):
    pack = make_pack()
    states, expected = capture(target, pack), expected_states(info, pack)
    for tap in range(len(TAPS)):
        assert (states[:, tap] - expected[:, tap]).abs().max() <= 2e-6 * expected[:, tap].abs().max()
    assert target.bad_rows == 0
    assert not states[pack.num_tokens :].any()


def test_auto_packs_what_may_be_packed_and_pads_the_hybrid(target, kind):
    assert target.packing is (Packing.PADDED if kind == "hybrid" else Packing.PACKED)


@pytest.mark.parametrize("packing", ["padded", "alone"])
def test_every_packing_gives_the_same_states(target, info, packing):
    pack = make_pack()
    other = load_target(info=info, dtype="float32", tap_layers=TAPS, packing=packing)
    assert other.packing.value == packing
    expected = capture(target, pack)
    assert (capture(other, pack) - expected).abs().max() <= 2e-6 * expected.abs().max()


def test_perturbing_a_document_changes_no_bit_of_the_others(target):
    pack = make_pack()
    base = capture(target, pack)
    for document in range(pack.num_documents):
        begin, end = int(pack.starts[document]), int(pack.starts[document + 1])
        moved = capture(target, perturb(pack, begin=begin, end=end, vocab_size=VOCAB))
        changed = (moved != base).any(dim=2).any(dim=1)
        assert changed[begin:end].all()
        assert not changed[:begin].any()
        assert not changed[end : end + 8].any(), "the next document's first tokens, where a convolution leaks"
        assert not changed[end:].any()


def test_the_padding_reaches_nobody(target):
    pack = make_pack()
    noisy = perturb(pack, begin=pack.num_tokens, end=pack.capacity_tokens, vocab_size=VOCAB)
    assert torch.equal(capture(target, noisy), capture(target, pack))


def test_packed_hybrid_is_refused_with_the_measured_leak(info, kind):
    if kind != "hybrid":
        assert load_target(info=info, dtype="float32", tap_layers=TAPS, packing="packed").packing is Packing.PACKED
        return
    with pytest.raises(TargetError, match="linear-attention") as caught:
        load_target(info=info, dtype="float32", tap_layers=TAPS, packing="packed")
    assert (caught.value.key, caught.value.value) == ("target.packing", "packed")
    assert "auto" in caught.value.hint


def test_hybrid_leak_through_a_packed_row_is_seen_in_the_first_tokens(target, kind):
    leak = target.leak(packing=Packing.PACKED)
    assert leak.own > 0
    if kind == "hybrid":
        assert leak.next_first > 1e-3
    else:
        assert leak.others == 0
        assert leak.isolated


def test_truncated_model_has_no_later_layers_and_no_head(target):
    names = [name for name, _ in target._model.named_parameters()]
    assert len(target._model.layers) == TAPS[-1] + 1 < LAYERS
    assert isinstance(target._model.norm, nn.Identity)
    assert not [name for name in names if "lm_head" in name or f"layers.{TAPS[-1] + 1}." in name]
    assert not any(weight.requires_grad for weight in target._model.parameters())
    assert not target._model.training


def test_same_pack_same_bits_whatever_ran_before(target, info):
    pack, other = make_pack(), make_pack((40, 40), seed=9)
    first = capture(target, pack)
    capture(target, other)
    assert torch.equal(capture(target, pack), first)
    fresh = load_target(info=info, dtype="float32", tap_layers=TAPS)
    capture(fresh, other)
    assert torch.equal(capture(fresh, pack), first)


def test_slots_of_another_type_hold_the_rounded_states(target):
    pack = make_pack()
    assert torch.equal(capture(target, pack, dtype=torch.bfloat16), capture(target, pack).to(torch.bfloat16))


def test_slots_can_be_saved_for_backward(target):
    pack = make_pack()
    weight = torch.ones(HIDDEN, requires_grad=True)
    (capture(target, pack) * weight).sum().backward()
    assert weight.grad is not None


def test_last_hidden_is_the_whole_models_normed_output(info):
    pack = make_pack()
    target = load_target(info=info, dtype="float32", tap_layers=TAPS, last_hidden=True)
    assert len(target._model.layers) == LAYERS
    slot, last = torch.zeros(pack.capacity_tokens, len(TAPS), HIDDEN), torch.full((pack.capacity_tokens, HIDDEN), float("nan"))
    target.capture(pack, hidden_TKD=slot, last_hidden_TD=last)
    model = AutoModelForCausalLM.from_pretrained(info.folder, dtype=torch.float32).eval()
    begin, end = int(pack.starts[1]), int(pack.starts[2])
    with torch.no_grad():
        ids = torch.from_numpy(pack.token_ids[begin:end]).long()[None]
        expected = model(input_ids=ids, output_hidden_states=True).hidden_states[-1][0]
    assert (last[begin:end] - expected).abs().max() <= 2e-6 * expected.abs().max()
    assert not last[pack.num_tokens :].any()
    assert torch.equal(slot, capture(load_target(info=info, dtype="float32", tap_layers=TAPS), pack))


def test_sliding_window_counts_within_a_document(tmp_path):
    info = save_target(tmp_path, "mistral")
    target = load_target(info=info, dtype="float32", tap_layers=(0,))
    pack = make_pack((WINDOW - 2, 3 * WINDOW))
    begin = int(pack.starts[1])
    base = capture(target, pack)
    moved = capture(target, perturb(pack, begin=begin, end=begin + 1, vocab_size=VOCAB))
    changed = (moved != base).any(dim=2).any(dim=1)[begin:]
    assert changed[:WINDOW].all()
    assert not changed[WINDOW:].any()


@pytest.mark.parametrize("packing", ["packed", "padded"])
def test_rows_that_are_not_finite_are_kept_and_counted(tmp_path, packing):
    target = load_target(info=save_target(tmp_path, "llama"), dtype="float32", tap_layers=(0, 1), packing=packing)
    pack = make_pack((20, 20), capacity=64)
    poisoned, clean = int(pack.token_ids[30]), capture(target, pack)
    assert poisoned not in pack.token_ids[:30]
    target._model.embed_tokens.weight[poisoned] = float("inf")
    states = capture(target, pack)
    assert not torch.isfinite(states[30]).any()
    assert not states[40:].any()
    if packing == "padded":
        assert torch.equal(states[:20], clean[:20]), "the other document"
        assert 0 < target.bad_rows <= 20
    before = int(target.bad_rows)
    assert before == not_finite(states).sum()
    assert torch.isfinite(target.hidden_states(pack, packing=target.packing)).all(), "proofs tell it by the count"
    target.bad_rows.fill_(before)
    capture(target, pack)
    assert target.bad_rows == 2 * before, "counted over all captures"


def test_one_bad_value_stays_alone_in_the_slot(tmp_path):
    target = load_target(info=save_target(tmp_path, "llama"), dtype="float32", tap_layers=(0, 3))
    pack = make_pack()
    clean = capture(target, pack)
    target._model.layers[3].mlp.down_proj.register_forward_hook(
        lambda module, given, output: output.index_fill_(2, torch.tensor([5]), float("nan"))
    )
    states = capture(target, pack)
    assert states[: pack.num_tokens, 1, 5].isnan().all()
    states[:, 1, 5] = clean[:, 1, 5]
    assert torch.equal(states, clean)
    assert target.bad_rows == pack.num_tokens


@pytest.mark.parametrize("taps", [(), (2, 1), (1, 1), (-1,), (0, LAYERS - 1)])
def test_taps_must_ascend_below_the_last_layer(tmp_path, taps):
    info = save_target(tmp_path, "llama")
    with pytest.raises(TargetError, match="ascending ids from 0 to 3"):
        load_target(info=info, dtype="float32", tap_layers=taps)


def test_missing_weights_are_refused_not_made_up(tmp_path):
    from safetensors.torch import load_file, save_file

    info = save_target(tmp_path, "llama")
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TargetError, match=r"1 weights are missing, such as layers\.1\.mlp\.up_proj"):
        load_target(info=info, dtype="float32", tap_layers=(2,))
    assert load_target(info=info, dtype="float32", tap_layers=(0,)).num_taps == 1, "layers above the last tap are not read"


def test_multi_modal_folders_give_their_language_model(tmp_path):
    import json

    from safetensors.torch import load_file, save_file

    plain = save_target(tmp_path / "plain", "hybrid")
    weights = load_file(tmp_path / "plain" / "model.safetensors")
    (tmp_path / "multi").mkdir()
    renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in weights.items()}
    save_file(renamed, tmp_path / "multi" / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((tmp_path / "plain" / "config.json").read_text())
    config = {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text}
    (tmp_path / "multi" / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    from slipstream.config import read_target_info

    multi = read_target_info(str(tmp_path / "multi"))
    pack = make_pack()
    left, right = (load_target(info=info, dtype="float32", tap_layers=TAPS) for info in (plain, multi))
    assert torch.equal(capture(left, pack), capture(right, pack))


def test_rotary_embeddings_with_a_history_refuse_long_documents(tmp_path):
    import json

    save_target(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"] = {
        "rope_type": "dynamic",
        "factor": 2.0,
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 32,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    from slipstream.config import read_target_info

    info = read_target_info(str(tmp_path))
    target = load_target(info=info, dtype="float32", tap_layers=(0,), packing="alone")
    capture(target, make_pack((32, 20)))
    with pytest.raises(TargetError, match="beyond 32 tokens") as caught:
        capture(target, make_pack((33, 20)))
    assert caught.value.value == 33


def test_padded_forwards_stay_within_the_packs_own_size():
    pack = make_pack((50, 20, 20, 3), capacity=96)
    forwards = lay_out(pack, packing=Packing.PADDED)
    assert all(forward.token_ids.size <= pack.capacity_tokens for forward in forwards)
    spans = sorted((span.start, span.length) for forward in forwards for span in forward.spans)
    assert spans == [(0, 50), (50, 20), (70, 20), (90, 3)]
    assert [len(forward.spans) for forward in forwards] == [1, 3]


def test_a_leak_is_found_where_there_is_one():
    class Neighbour:
        """Each token sees the one before it in the row, document borders or not."""

        def hidden_states(self, pack, *, packing):
            ids = torch.from_numpy(pack.token_ids).float()
            return (ids + ids.roll(1))[:, None, None]

    class Blind:
        def hidden_states(self, pack, *, packing):
            return torch.ones(pack.capacity_tokens, 1, 1)

    pack = pack_documents([np.arange(10, dtype=np.int32), np.arange(10, dtype=np.int32)], capacity_tokens=20)
    leak = measure_leak(Neighbour(), pack=pack, packing=Packing.PACKED, vocab_size=VOCAB)
    assert leak.next_first > 0
    assert not leak.isolated
    assert not measure_leak(Blind(), pack=pack, packing=Packing.PACKED, vocab_size=VOCAB).isolated
