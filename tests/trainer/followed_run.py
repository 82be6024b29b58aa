"""A run of which every step starts from another run's weights and moments, so that each is compared by itself.

The leader trains on the CPU, by modules and SDPA. A follower has the same plan and the same packs and computes the same
steps another way; what its own updates leave is overwritten before the next one. All in bf16: drafter, ends and slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from built_run import GPU_SHAPE, Built, make_recipe

from slipstream.drafter.dflash import PASSES
from slipstream.trainer.build import Gpu
from slipstream.trainer.hooks import Hook
from slipstream.trainer.optim import OptimizerState

TOLERANCES = {"loss": 1e-2, "gradient_norm": 2e-2, "gradient": 7e-2}
"""Of the loss: the project's bar. A gradient goes through some thirty roundings to bf16 on either side, each up to 2 ** -8
off: if they are independent the two are about sqrt(2 * 30 / 3) * 2 ** -8 = 1.7 % apart. The furthest of fifty steps are 2.3 %
apart on a CPU, 3.7 % with the roundings of compiled functions and of attention on a GPU; 7 % is twice that. A norm is never
further off than its gradient, and less where their difference has no direction: 0.5 % and 0.9 %."""


@dataclass(frozen=True, slots=True)
class Way:
    """How a follower computes. `passes` is a key of `drafter.dflash.PASSES`, `gpu` stands for a GPU where there is none."""

    device: str
    passes: str
    attention: str
    graphs: str = "off"
    gpu: Callable[[], Gpu] | None = None


@dataclass(frozen=True, slots=True)
class Apart:
    """The largest deviations of a follower's steps, relative to the leader's, and the number of steps.

    `gradient` is the norm of the difference of all gradients over the leader's norm.
    """

    steps: int
    loss: float
    gradient_norm: float
    gradient: float

    @property
    def too_far(self) -> list[str]:
        """What is further off than it may be; a deviation that is not a number is."""
        return [name for name, tolerance in TOLERANCES.items() if not getattr(self, name) <= tolerance]


class Steps(Hook):
    """Takes over what a leader began each step with, if there is one; keeps that, and the gradient that each step found.

    Masters, moments and their count are taken over; compute weights come from the masters.
    """

    def __init__(self, run: Built, *, leader: Sequence[OptimizerState] | None = None) -> None:
        self._optimizer, self._leader = run.trainer.optimizer, leader
        self.states: list[OptimizerState] = []
        self.gradients: list[torch.Tensor] = []

    def before_step(self, step: int) -> None:
        if self._leader is not None:
            self._optimizer.load_state(self._leader[step])
        self.states.append(self._optimizer.state())

    def after_step(self, step: int, records: Sequence[object]) -> None:
        self.gradients.append(self._optimizer.gradient.to("cpu", copy=True))


@dataclass(frozen=True, slots=True)
class Leader:
    """A finished run, what its steps began with, and the sections of its recipe that are its own."""

    run: Built
    steps: Steps
    sections: dict[str, dict]

    def follow(self, folder: Path, way: Way, *, monkeypatch: pytest.MonkeyPatch) -> tuple[Built, Apart]:
        """The same steps another way: the run, and how far its steps are from the leader's."""
        with monkeypatch.context() as patch:
            patch.setitem(PASSES, way.device, PASSES[way.passes])  # type: ignore[arg-type]
            run = _built(folder, way, self.sections)
            assert run.schedule.digest == self.run.schedule.digest
            steps = _fit(run, leader=self.steps.states)
        ours, theirs = run.lines("train"), self.run.lines("train")
        for name in ("step", "total_anchors", "supervised_tokens", "total_skipped_steps"):
            assert [line[name] for line in ours] == [line[name] for line in theirs], name
        pairs = list(zip(steps.gradients, self.steps.gradients, strict=True))
        apart = Apart(
            steps=len(ours),
            loss=_furthest(ours, theirs, "loss"),
            gradient_norm=_furthest(ours, theirs, "gradient_norm"),
            gradient=float(torch.stack([(one - other).norm() / other.norm() for one, other in pairs]).max()),
        )
        fell = f"the leader's loss fell from {theirs[0]['loss']:.3f} to {theirs[-1]['loss']:.3f}"
        print(f"pass of {way.passes} on {way.device}, {way.attention}, graphs {way.graphs}: {apart}; {fell}")
        return run, apart


def lead(folder: Path, **sections: dict) -> Leader:
    """Train on the CPU, by modules and SDPA."""
    run = _built(folder, Way(device="cpu", passes="cpu", attention="sdpa"), sections)
    return Leader(run=run, steps=_fit(run), sections=sections)


def _fit(run: Built, *, leader: Sequence[OptimizerState] | None = None) -> Steps:
    steps = Steps(run, leader=leader)
    run.trainer.hooks = (*run.trainer.hooks, steps)
    assert run.fit().status == "finished"
    return steps


def _furthest(ours: list[dict], theirs: list[dict], name: str) -> float:
    apart = [abs(one[name] - other[name]) / abs(other[name]) for one, other in zip(ours, theirs, strict=True)]
    return float(torch.tensor(apart, dtype=torch.float64).max())


def _built(folder: Path, way: Way, sections: dict[str, dict]) -> Built:
    base = {
        "target": {"dtype": "bfloat16"},
        "drafter": {"dtype": "bfloat16"},
        "plan": {"epochs": 8},
        "validation": {"every_steps": 1000},
        "checkpoint": {"every_steps": 1000},
        "placement": {"cuda_graphs": way.graphs},
    }
    recipe = make_recipe(**{key: {**base.get(key, {}), **sections.get(key, {})} for key in base.keys() | sections.keys()})
    gpu = way.gpu() if way.gpu is not None else None
    run = Built(folder, recipe, shape=GPU_SHAPE, device=way.device, attention=way.attention, gpu=gpu)
    assert run.source.table.dtype == run.ends.head_VD.dtype == run.drafter.dtype == torch.bfloat16
    run.source.preload(run.schedule.num_packs)
    if way.device == "cuda":
        torch.cuda.synchronize()
    return run
