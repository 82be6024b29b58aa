"""The CUDA path's algorithm in bf16, on a CPU: each step, from the modules' weights, gives the modules' loss and gradient."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from followed_run import Apart, Leader, Way, lead
from model_lanes import CountedWork, ModelLanes
from tape_recorder import RecordingLanes

from slipstream.drafter import DFlashDrafter, elementwise, fused
from slipstream.drafter.dflash import PASSES
from slipstream.trainer.build import Gpu

FUSED = Way(device="cpu", passes="cuda", attention="sdpa")
STAGED = Way(device="cpu", passes="cuda", attention="sdpa", gpu=lambda: Gpu(lanes=ModelLanes(), work=CountedWork()))
REPLAYED = Way(
    device="cpu", passes="cuda", attention="sdpa", graphs="on", gpu=lambda: Gpu(lanes=RecordingLanes(), work=CountedWork())
)


@pytest.fixture(scope="module", params=["decay", "dpace"])
def leader(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Leader:
    return lead(tmp_path_factory.mktemp(request.param), objective={"weight": request.param})


def test_modules_that_follow_are_the_leader_bit_for_bit(tmp_path: Path, leader: Leader, monkeypatch) -> None:
    """So whatever another way deviates by is its own, and nothing is lost between two steps."""
    way = Way(device="cpu", passes="cpu", attention="sdpa")
    _, apart = leader.follow(tmp_path, way, monkeypatch=monkeypatch)
    assert apart == Apart(steps=50, loss=0.0, gradient_norm=0.0, gradient=0.0)
    first, *_, last = leader.run.lines("train")
    assert last["loss"] < first["loss"] / 10, "it learns what hidden states say"


@pytest.mark.parametrize("way", [FUSED, STAGED, REPLAYED], ids=["fused", "staged", "replayed"])
def test_fused_steps_are_the_modules(tmp_path: Path, leader: Leader, monkeypatch, way: Way) -> None:
    run, apart = leader.follow(tmp_path, way, monkeypatch=monkeypatch)
    assert [line["cuda_graphs"]["used"] for line in run.lines("warm_up")] == ([way.graphs == "on"] if way.gpu else [])
    assert apart.steps >= 50
    assert apart.too_far == []
    assert apart.gradient > 0, "another order of roundings"


def rounded_once(function: Callable[..., Any], *arguments: Any) -> Any:
    """`elementwise.run` as a compiler for GPUs makes it: what lies between reading and writing stays in fp32."""
    given = [argument.detach() if isinstance(argument, torch.Tensor) else argument for argument in arguments]
    wide = [_type(argument, torch.bfloat16, torch.float32) for argument in given]
    with torch.no_grad():
        found = function(*wide)
    for argument, changed in zip(given, wide, strict=True):
        if changed is not argument and changed._version:
            argument.copy_(changed)  # the function wrote into it
    if isinstance(found, tuple):
        return tuple(_type(each, torch.float32, torch.bfloat16) for each in found)
    return _type(found, torch.float32, torch.bfloat16)


def _type(value: Any, of: torch.dtype, to: torch.dtype) -> Any:
    return value.to(to) if isinstance(value, torch.Tensor) and value.dtype == of else value


def test_fused_steps_with_the_roundings_of_compiled_functions_are_the_modules(
    tmp_path: Path, leader: Leader, monkeypatch
) -> None:
    monkeypatch.setattr(elementwise, "run", rounded_once)
    _, apart = leader.follow(tmp_path, FUSED, monkeypatch=monkeypatch)
    assert apart.too_far == []


def test_hidden_states_of_the_row_before_are_seen(tmp_path: Path, leader: Leader, monkeypatch) -> None:
    def shifted(drafter: DFlashDrafter, hidden_TKD: torch.Tensor, *others: Any) -> torch.Tensor:
        return DFlashDrafter.fused_pass(drafter, hidden_TKD.roll(1, 0), *others)

    monkeypatch.setitem(PASSES, "cuda", shifted)  # type: ignore[arg-type]
    _, apart = leader.follow(tmp_path, FUSED, monkeypatch=monkeypatch)
    assert apart.too_far == ["loss", "gradient_norm", "gradient"]


def test_a_gradient_that_is_a_fifth_too_large_is_seen(tmp_path: Path, leader: Leader, monkeypatch) -> None:
    """Of the output projections alone, in a backward pass whose forward is right."""
    plain = fused._OutputAndMlp.backward

    def enlarged(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_x, grad_seen, grad_wo, *others = plain(ctx, grad)
        return grad_x, grad_seen, grad_wo * 1.2, *others

    monkeypatch.setattr(fused._OutputAndMlp, "backward", staticmethod(enlarged))
    _, apart = leader.follow(tmp_path, FUSED, monkeypatch=monkeypatch)
    assert apart.too_far == ["gradient_norm", "gradient"]
