"""The overlapped sum: parts begin while the last backward runs, hold whole gradients then, and come in one order."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch
from built_run import SHAPE, Built, make_recipe
from torch import nn

from slipstream.config.recipe import OptimizerSection
from slipstream.drafter import build_drafter
from slipstream.drafter.dflash import PASSES
from slipstream.trainer.optim import FlatAdamW
from slipstream.trainer.reduction import GradientSum, parts_in_order


class Doubling:
    """A group whose other rank always has the same gradients. Notes what each sum began with, and when."""

    def __init__(self, optimizer: FlatAdamW) -> None:
        self.optimizer = optimizer
        self.began: list[tuple[int, int, torch.Tensor]] = []
        self.waited: list[object] = []

    def start_sum(self, flat: torch.Tensor) -> object:
        self.began.append((flat.storage_offset(), flat.numel(), flat.clone()))
        return (flat, flat.mul_(2))

    def wait(self, work: object) -> None:
        self.waited.append(work)


def built(folder: Path, *, columns: int = 3) -> tuple[Built, Doubling]:
    run = Built(folder, make_recipe(plan={"packs_per_step": columns}))
    group = Doubling(run.trainer.optimizer)
    return run, group


@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_parts_are_whole_when_their_sum_begins(tmp_path: Path, kind: str, stale: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PASSES, "cpu", PASSES[kind])  # type: ignore[arg-type]
    alone, _ = built(tmp_path / "alone")
    expected = alone.trainer.train_step(alone.trainer.prepare(0))
    gradient = alone.trainer.optimizer.reduced.clone()
    run, group = built(tmp_path / "ours")
    optimizer = run.trainer.optimizer
    if stale:  # as on CUDA: the first gradient of a step overwrites the sum of the step before
        optimizer._stale = set()
        for region in optimizer.regions:
            region.view(optimizer.gradient).fill_(float("nan"))
    summed = GradientSum(run.drafter, optimizer=optimizer, group=group)
    early: list[int] = []
    finish = summed.finish

    def noted_finish() -> None:
        early.append(len(group.began))
        finish()

    monkeypatch.setattr(summed, "finish", noted_finish)
    monkeypatch.setattr(run.trainer, "_group", summed)
    result = run.trainer.train_step(run.trainer.prepare(0))
    parts = parts_in_order(optimizer.regions, size=len(optimizer.reduced))
    assert early == [len(parts) - 1], "all but the last part are on their way when the backward pass has ended"
    assert [(at, size) for at, size, _ in group.began] == [(part.start, part.stop - part.start) for part in parts]
    assert len(group.waited) == len(parts)
    for at, size, seen in group.began:
        torch.testing.assert_close(seen, gradient[at : at + size], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(optimizer.reduced, 2 * gradient, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(result.gradient_norm, 2 * expected.gradient_norm, rtol=1e-5, atol=0)
    assert float(result.anchors) == 2 * float(expected.anchors)


def test_a_rehearsal_that_uses_one_column_twice_is_summed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, group = built(tmp_path)
    trainer = run.trainer
    summed = GradientSum(run.drafter, optimizer=trainer.optimizer, group=group)
    monkeypatch.setattr(trainer, "_group", summed)
    step = trainer.prepare(0)
    trainer.rehearse(dataclasses.replace(step, columns=step.columns[:1] * 2), source=run.source)
    assert len(group.began) == len(group.waited) == len(summed._parts)


def test_the_parts_cover_the_buffer_from_the_last_layer_down() -> None:
    drafter = build_drafter(shape=SHAPE, dtype="bfloat16", device="cpu", seed=0, attention="sdpa")
    optimizer = FlatAdamW(drafter, section=OptimizerSection(), num_extra=5)
    parts = parts_in_order(optimizer.regions, size=len(optimizer.reduced))
    spans = sorted((part.start, part.stop) for part in parts)
    assert spans[0][0] == 0
    assert spans[-1][1] == len(optimizer.reduced)
    assert all(left[1] == right[0] for left, right in itertools.pairwise(spans))
    layers = [{name.split(".")[1] for name in part.names if name.startswith("layers")} for part in parts]
    assert layers == [{"1"}, {"0"}, set(), {"0", "1"}]
    assert parts[2].names == {"fc.weight"}
    assert {"norm.weight", "hidden_norm.weight"} < parts[3].names
    assert frozenset().union(*(part.names for part in parts)) == {name for name, _ in drafter.named_parameters()}


def test_a_gradient_that_does_not_come_holds_nobody_up() -> None:
    """The order stays that of the other ranks, and what came in no backward pass is summed as zeros."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)])
            self.norm = nn.Parameter(torch.ones(3))

    module = Two()
    optimizer = FlatAdamW(module, section=OptimizerSection(), num_extra=2)
    optimizer._stale = set()
    first, second, norm = (region.view(optimizer.gradient) for region in optimizer.regions)
    optimizer.gradient.fill_(7.0)
    group = Doubling(optimizer)
    summed = GradientSum(module, optimizer=optimizer, group=group)
    for _ in range(2):
        optimizer.zero_grad()
        summed.begin_last()
        (module.layers[0](torch.ones(1, 3)) * module.norm).sum().backward()
        assert group.began == [], "the sum of the upper layer comes first on every rank"
        summed.finish()
        assert len(group.began) == 3
        assert torch.equal(first, torch.full((3, 3), 2.0))
        assert torch.equal(second, torch.zeros(3, 3))
        assert torch.equal(norm, 2 * module.layers[0].weight.sum(1))
        group.began.clear()
