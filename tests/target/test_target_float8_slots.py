"""Capture into eight-bit slots: what the hook rounds is what rounding the bf16 capture gives, whichever way the model runs."""

from __future__ import annotations

import pytest
import torch
from test_target_engine import CLOSE, TAPS, engine_target
from tiny_targets import VOCAB, make_pack, save_target

from slipstream.device.finite import not_finite
from slipstream.device.float8 import DTYPE, dequantise, quantise_rows
from slipstream.target.fake import FakeTarget
from slipstream.target.huggingface import load_target


def poisoned_slot(tokens: int, taps: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    values = torch.full((tokens, taps, width), 0x7F, dtype=torch.uint8).view(DTYPE)
    return values, torch.full((tokens, taps), float("nan"))


def rounded(states_TKD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values, scale = poisoned_slot(*states_TKD.shape)
    bad = torch.zeros(len(states_TKD), dtype=torch.bool)
    for tap in range(states_TKD.shape[1]):
        quantise_rows(states_TKD[:, tap], values_RD=values[:, tap], scale_R=scale[:, tap], bad_R=bad)
    return values, scale


def assert_same(left: tuple[torch.Tensor, torch.Tensor], right: tuple[torch.Tensor, torch.Tensor]) -> None:
    assert torch.equal(left[0].view(torch.uint8), right[0].view(torch.uint8))
    assert torch.equal(left[1], right[1])


@pytest.fixture(scope="module", params=sorted(CLOSE))
def info(request, tmp_path_factory):
    return save_target(tmp_path_factory.mktemp(request.param), request.param)


@pytest.mark.parametrize("engine", [False, True], ids=["rows", "frame"])
def test_the_hook_rounds_what_it_would_have_copied(info, engine):
    target = engine_target(info) if engine else load_target(info=info, dtype="float32", tap_layers=TAPS)
    pack = make_pack()
    wide = torch.full((pack.capacity_tokens, len(TAPS), 64), float("nan"))
    target.capture(pack, hidden_TKD=wide)
    slots = [poisoned_slot(*wide.shape), rounded(torch.zeros_like(wide))]
    for values, scale in slots:
        assert target.capture(pack, hidden_TKD=values, scale_TK=scale) == pack.num_tokens
        assert_same((values, scale), rounded(wide))
    assert not slots[0][1][pack.num_tokens :].any()
    assert target.bad_rows == 0


def test_rows_that_are_not_finite_are_counted_and_stay_so(info):
    target = engine_target(info, taps=(0, 1))
    pack = make_pack((20, 20), capacity=64)
    target._model.embed_tokens.weight[int(pack.token_ids[30])] = float("inf")
    values, scale = poisoned_slot(64, 2, 64)
    target.capture(pack, hidden_TKD=values, scale_TK=scale)
    states = torch.empty(values.shape)
    dequantise(values, scale_TK=scale, out_TKD=states)
    assert torch.isfinite(states).all(dim=2).equal(torch.isfinite(scale)), "a whole row, or nothing of it"
    assert not torch.isfinite(states[30]).any()
    assert target.bad_rows == not_finite(states).sum() > 0


def test_scales_and_eight_bits_go_together(info):
    target = load_target(info=info, dtype="float32", tap_layers=TAPS)
    values, scale = poisoned_slot(96, len(TAPS), 64)
    with pytest.raises(AssertionError, match="scales go with e4m3"):
        target.capture(make_pack(), hidden_TKD=values)
    with pytest.raises(AssertionError, match="scales go with e4m3"):
        target.capture(make_pack(), hidden_TKD=torch.zeros(values.shape), scale_TK=scale)


def test_the_fake_target_rounds_too():
    fake = FakeTarget(seed=1, num_taps=2, hidden_size=8, vocab_size=VOCAB)
    wide = torch.zeros(96, 2, 8)
    fake.capture(make_pack(), hidden_TKD=wide)
    slot = poisoned_slot(96, 2, 8)
    fake.capture(make_pack(), hidden_TKD=slot[0], scale_TK=slot[1])
    assert_same(slot, rounded(wide))
