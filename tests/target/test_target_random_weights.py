"""Targets with made-up weights: the same in every process, cut or whole, and priced from their config alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_targets import KINDS, make_model, make_pack
from transformers import AutoModel

from slipstream.config import TargetInfo, read_target_info
from slipstream.launch.bench.target import qwen3_8b, qwen36_27b
from slipstream.plan.weights import count_by_config, count_target_weights
from slipstream.target.ends import load_frozen_ends
from slipstream.target.fingerprint import fingerprint_target
from slipstream.target.huggingface import load_target
from slipstream.target.loading import load_decoder, load_full

TAPS = (0, 2)


def config_only(folder: Path, kind: str, *, tied: bool = False) -> TargetInfo:
    """A folder with a config and nothing else."""
    folder.mkdir()
    make_model(kind, tied=tied).config.save_pretrained(folder)
    return read_target_info(str(folder), weights="random")


def random_target(info: TargetInfo, *, dtype: str = "float32"):
    return load_target(info=info, dtype=dtype, tap_layers=TAPS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_cut_target_and_another_process_s_whole_one_hold_the_same_weights(tmp_path: Path, kind: str) -> None:
    info = config_only(tmp_path / kind, kind)
    cut = dict(load_decoder(info=info, dtype="float32", device="cpu", num_layers=3).named_parameters())
    torch.manual_seed(5)  # another process has drawn other numbers by now
    before = torch.get_rng_state()
    whole = {name.removeprefix("model."): w for name, w in load_full(info=info, dtype="float32").named_parameters()}
    assert torch.equal(torch.get_rng_state(), before)
    assert [name for name, weight in cut.items() if not torch.equal(weight, whole[name])] == []
    assert len(cut) > 20
    matrices = [weight for weight in cut.values() if weight.dim() >= 2]
    assert all(0.015 < float(weight.std()) < 0.025 for weight in matrices if weight.numel() > 1000)
    assert len({float(weight.view(-1)[0]) for weight in matrices}) == len(matrices)


@pytest.mark.parametrize("kind", KINDS)
def test_it_captures_finite_states_that_differ_from_layer_to_layer(tmp_path: Path, kind: str) -> None:
    info = config_only(tmp_path / kind, kind)
    target, pack = random_target(info), make_pack()
    hidden_TKD = torch.zeros(pack.capacity_tokens, len(TAPS), info.hidden_size)
    assert target.capture(pack, hidden_TKD=hidden_TKD) == pack.num_tokens
    assert torch.isfinite(hidden_TKD).all()
    assert int(target.bad_rows) == 0
    assert not torch.equal(hidden_TKD[:, 0], hidden_TKD[:, 1])
    again = torch.zeros_like(hidden_TKD)
    random_target(info).capture(pack, hidden_TKD=again)
    assert torch.equal(again, hidden_TKD)


@pytest.mark.parametrize("tied", [False, True])
def test_ends_are_those_of_the_model(tmp_path: Path, tied: bool) -> None:
    info = config_only(tmp_path / "t", "qwen3", tied=tied)
    ends, model = load_frozen_ends(info=info, dtype="float32"), load_full(info=info, dtype="float32")
    assert torch.equal(ends.embedding_VD, model.get_input_embeddings().weight)
    assert torch.equal(ends.head_VD, model.get_output_embeddings().weight)
    assert (ends.embedding_VD is ends.head_VD) == tied
    rounded = load_frozen_ends(info=info, dtype="bfloat16")
    assert torch.equal(rounded.head_VD, ends.head_VD.to(torch.bfloat16))


def test_the_fingerprint_tells_them_apart(tmp_path: Path) -> None:
    info = config_only(tmp_path / "t", "llama")
    make_model("llama").save_pretrained(info.folder)
    saved, first = fingerprint_target(replace(info, weights="saved")), fingerprint_target(info)
    assert saved != first
    assert fingerprint_target(info) == first
    config = json.loads((info.folder / "config.json").read_text())
    (info.folder / "config.json").write_text(json.dumps({**config, "rope_theta": 5.0}))
    assert fingerprint_target(info) != first


@pytest.mark.parametrize("make", [qwen36_27b, qwen3_8b])
def test_weights_are_counted_from_the_config(tmp_path: Path, make) -> None:
    config = make()
    config.save_pretrained(tmp_path)
    counted = count_target_weights(read_target_info(str(tmp_path), weights="random"))
    config.num_hidden_layers = 4
    config.layer_types = config.layer_types[:4]
    with torch.device("meta"):
        model = AutoModel.from_config(config)
    actual = [sum(weight.numel() for weight in layer.parameters()) for layer in model.layers]
    assert list(counted.layers[:4]) == pytest.approx(actual, rel=1e-4)
    assert (counted.embedding, counted.source) == (config.vocab_size * config.hidden_size, "config.json")


def test_experts_are_not_counted(tmp_path: Path) -> None:
    info = config_only(tmp_path / "t", "llama")
    config = json.loads((info.folder / "config.json").read_text())
    (info.folder / "config.json").write_text(json.dumps({**config, "num_experts": 8}))
    assert count_by_config(info) is None
