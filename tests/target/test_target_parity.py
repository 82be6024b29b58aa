"""`check_target` holds on sound targets and fails, in the right proof, on broken ones."""

from __future__ import annotations

import pytest
import torch
from tiny_targets import KINDS, make_pack, save_target
from torch import nn

from slipstream.errors import TargetError
from slipstream.target import huggingface, parity
from slipstream.target.layouts import Packing
from slipstream.target.parity import CheckResult, check_target

TAPS = (0, 2, 3)
NAMES = ["taps", "isolation", "isolation, next 8", "finite", "capture, layer 0", "capture, layer 2", "capture, layer 3"]


def failures(results):
    return [result.name for result in results if not result.passed]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sound_targets_pass_every_proof(tmp_path, kind, dtype):
    info = save_target(tmp_path, kind)
    results = check_target(info=info, dtype=dtype, tap_layers=TAPS, pack=make_pack())
    how = "padded" if kind == "hybrid" else "packed"
    assert [result.name for result in results] == [*NAMES, f"{how} against alone"]
    assert failures(results) == []
    assert [result.measured for result in results if result.name.startswith("capture")] == [0, 0, 0]


def test_block_parity_gets_the_captured_states_and_its_verdict_counts(tmp_path):
    info, pack, seen = save_target(tmp_path, "llama"), make_pack(), []

    def compare(hidden_TKD):
        seen.append(hidden_TKD)
        return CheckResult("blocks", False, 1.0, 0.5, "")

    results = check_target(info=info, dtype="float32", tap_layers=TAPS, pack=pack, block_parity=compare)
    assert failures(results) == ["blocks"]
    assert seen[0].shape == (pack.capacity_tokens, 3, info.hidden_size)


def test_a_tap_that_is_off_by_one_fails(tmp_path, monkeypatch):
    real = huggingface.decoder_layers
    monkeypatch.setattr(
        huggingface, "decoder_layers", lambda model, *, count: nn.ModuleList(reversed(real(model, count=count)))
    )
    results = check_target(info=save_target(tmp_path, "llama"), dtype="float32", tap_layers=TAPS, pack=make_pack())
    assert failures(results) == ["capture, layer 0", "capture, layer 2", "capture, layer 3", "packed against alone"]


def test_a_leak_that_the_loader_let_pass_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface, "_settle_packing", lambda target, *, asked, pack_tokens: Packing.PACKED)
    results = check_target(info=save_target(tmp_path, "hybrid"), dtype="float32", tap_layers=TAPS, pack=make_pack())
    assert failures(results) == ["isolation", "isolation, next 8", "packed against alone"]


def test_states_that_are_not_finite_fail(tmp_path, monkeypatch):
    real = huggingface.load_decoder

    def poisoned(**given):
        model = real(**given)
        model.layers[2].mlp.down_proj.weight[3] = float("nan")
        return model

    monkeypatch.setattr(huggingface, "load_decoder", poisoned)
    monkeypatch.setattr(parity, "load_decoder", real)
    results = check_target(
        info=save_target(tmp_path, "llama"), dtype="float32", tap_layers=TAPS, pack=make_pack(), packing="alone"
    )
    assert "finite" in failures(results)
    assert "capture, layer 0" not in failures(results)


def test_one_document_proves_no_isolation(tmp_path):
    with pytest.raises(TargetError, match="two documents"):
        check_target(info=save_target(tmp_path, "llama"), dtype="float32", tap_layers=TAPS, pack=make_pack((20,)))


def test_differences_are_relative_to_each_taps_own_maximum():
    right = torch.ones(4, 2, 3)
    right[:, 1] = 1000
    left = right.clone()
    left[1, 0, 0] += 0.5
    left[2, 1, 1] += 0.5
    assert parity.relative_difference(left, right).tolist() == pytest.approx([0.5, 0.0005])
