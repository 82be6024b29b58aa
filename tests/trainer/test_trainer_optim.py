"""The flat AdamW against torch's, and steps that must change nothing."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from slipstream.config.recipe import OptimizerSection
from slipstream.errors import CheckpointError
from slipstream.trainer import optim
from slipstream.trainer.optim import FlatAdamW

SECTION = OptimizerSection(lr=1e-2, weight_decay=0.1, max_grad_norm=1.0)


class Small(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.gain = nn.Parameter(torch.ones(7, dtype=dtype))
        self.weight = nn.Parameter(torch.randn(5, 7, generator=generator).to(dtype))
        self.other = nn.Parameter(torch.randn(9, 5, generator=generator).to(dtype))

    def loss(self, seed: int, scale: float = 1.0) -> torch.Tensor:
        x = torch.randn(11, 7, generator=torch.Generator().manual_seed(seed)).to(self.gain.dtype)
        return (((x * self.gain) @ self.weight.T).tanh() @ self.other.T).square().sum().float() * scale


def torch_adamw(model: Small) -> torch.optim.AdamW:
    groups = [
        {"params": [model.weight, model.other], "weight_decay": SECTION.weight_decay},
        {"params": [model.gain], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=SECTION.lr, betas=(SECTION.beta1, SECTION.beta2), eps=SECTION.eps, foreach=False)


TRUE = torch.tensor(True)


@pytest.mark.parametrize("chunk", [64, 1 << 22])
@pytest.mark.parametrize("scale", [1e-4, 10.0])
def test_equals_torch_adamw(monkeypatch: pytest.MonkeyPatch, chunk: int, scale: float) -> None:
    monkeypatch.setattr(optim, "CHUNK_ELEMENTS", chunk)
    ours, theirs = Small(), Small()
    flat, oracle = FlatAdamW(ours, section=SECTION), torch_adamw(theirs)
    for step in range(20):
        rate = SECTION.lr * (1 - step / 40)
        for group in oracle.param_groups:
            group["lr"] = rate
        flat.zero_grad()
        oracle.zero_grad()
        for part in (0, 1):
            ours.loss(10 * step + part, scale).backward()
            theirs.loss(10 * step + part, scale).backward()
        expected_norm = nn.utils.clip_grad_norm_(theirs.parameters(), SECTION.max_grad_norm)
        norm, good = flat.step(learning_rate=rate, finite=TRUE)
        oracle.step()
        assert bool(good)
        torch.testing.assert_close(norm, expected_norm, rtol=1e-6, atol=0)
    for (name, mine), (_, other) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7, msg=name)
    assert int(flat.good_steps) == 20
    assert ours.gain.grad is None


def test_clipping_decides_between_the_two_scales() -> None:
    """The parametrised test above covers both sides of the clip only if the norms lie on both sides of 1."""
    for scale, clipped in ((1e-4, False), (10.0, True)):
        model = Small()
        flat = FlatAdamW(model, section=SECTION)
        model.loss(0, scale).backward()
        norm, _ = flat.step(learning_rate=1e-3, finite=TRUE)
        assert (float(norm) > SECTION.max_grad_norm) == clipped


def test_decay_reaches_matrices_only() -> None:
    model = Small()
    flat = FlatAdamW(model, section=SECTION)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    flat.step(learning_rate=0.5, finite=TRUE)
    assert torch.equal(model.gain, before["gain"])
    torch.testing.assert_close(model.weight, before["weight"] * (1 - 0.5 * 0.1))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bad_gradient_changes_nothing(bad: float, dtype: torch.dtype) -> None:
    model = Small(dtype)
    flat = FlatAdamW(model, section=SECTION)
    for seed in range(3):
        flat.zero_grad()
        model.loss(seed).backward()
        flat.step(learning_rate=1e-2, finite=TRUE)
    before, weights = flat.state(), [parameter.detach().clone() for parameter in model.parameters()]
    flat.zero_grad()
    model.loss(7).backward()
    flat.gradient[3] = bad
    _, good = flat.step(learning_rate=1e-2, finite=TRUE)
    assert not bool(good)
    assert_same_state(before, flat.state())
    assert all(torch.equal(old, new) for old, new in zip(weights, model.parameters(), strict=True))
    flat.zero_grad()
    model.loss(8).backward()
    _, good = flat.step(learning_rate=1e-2, finite=TRUE)
    assert bool(good)
    assert int(flat.good_steps) == 4
    assert torch.isfinite(flat.master).all()


def test_not_finite_elsewhere_changes_nothing() -> None:
    model = Small()
    flat = FlatAdamW(model, section=SECTION)
    before = flat.state()
    model.loss(0).backward()
    norm, good = flat.step(learning_rate=1e-2, finite=torch.tensor(False))
    assert not bool(good)
    assert bool(torch.isfinite(norm))
    assert_same_state(before, flat.state())


def test_bf16_weights_are_the_rounded_masters_and_small_steps_add_up() -> None:
    model = Small(torch.bfloat16)
    flat = FlatAdamW(model, section=OptimizerSection(max_grad_norm=1e9))
    start = flat.state().master["weight"]
    for _ in range(64):
        flat.zero_grad()
        flat.gradient.fill_(1.0)
        flat.step(learning_rate=1e-5, finite=TRUE)
    moved = flat.state().master["weight"] - start
    torch.testing.assert_close(moved, torch.full_like(moved, -64e-5), rtol=1e-2, atol=0)
    assert model.weight.dtype == torch.bfloat16
    assert torch.equal(model.weight, flat.state().master["weight"].to(torch.bfloat16))


def test_bf16_gradients_are_summed_in_fp32() -> None:
    model = Small(torch.bfloat16)
    flat = FlatAdamW(model, section=SECTION)
    for _ in range(256):
        (model.gain.sum() * 1.0).backward()
    (model.gain.sum() * 2**-7).backward()
    region = next(region for region in flat.regions if region.name == "gain")
    assert torch.equal(region.view(flat.gradient), torch.full((7,), 256 + 2**-7))


def test_padding_between_parameters_stays_out_of_it() -> None:
    model = Small()
    flat = FlatAdamW(model, section=SECTION, num_extra=3)
    assert all(region.start % optim.ALIGN_ELEMENTS == 0 for region in flat.regions)
    model.loss(0).backward()
    flat.extra.fill_(1e9)
    norm, _ = flat.step(learning_rate=1e-2, finite=TRUE)
    assert float(norm) < 1e9
    used = torch.zeros(len(flat.master), dtype=torch.bool)
    for region in flat.regions:
        used[region.start : region.stop] = True
    assert not flat.master[~used].any()
    assert flat.num_parameters == int(used.sum()) == 7 + 35 + 45


def test_state_round_trip_and_refusal() -> None:
    model, again = Small(), Small()
    flat, other = FlatAdamW(model, section=SECTION), FlatAdamW(again, section=SECTION)
    model.loss(0).backward()
    flat.step(learning_rate=1e-2, finite=TRUE)
    other.load_state(flat.state())
    assert_same_state(flat.state(), other.state())
    assert torch.equal(model.weight, again.weight)
    with pytest.raises(CheckpointError, match=r"weight: \(2, 2\) for \(5, 7\)"):
        other.load_weights({**flat.state().master, "weight": torch.zeros(2, 2)})
    with pytest.raises(CheckpointError, match="gain: None"):
        other.load_weights({"weight": model.weight, "other": model.other})


def test_state_is_a_copy() -> None:
    model = Small()
    flat = FlatAdamW(model, section=SECTION)
    state = flat.state()
    kept = state.master["weight"].clone()
    flat.master.add_(1)
    assert torch.equal(state.master["weight"], kept)


def assert_same_state(one: optim.OptimizerState, two: optim.OptimizerState) -> None:
    for part in ("master", "exp_avg", "exp_avg_sq"):
        mine, other = getattr(one, part), getattr(two, part)
        assert mine.keys() == other.keys()
        assert all(torch.equal(mine[name], other[name]) for name in mine), part
    assert torch.equal(one.good_steps, two.good_steps)
