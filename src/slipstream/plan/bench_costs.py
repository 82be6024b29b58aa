"""Stage costs from what `slipstream bench … --json` printed, scaled to the packs of a run. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from slipstream.config import DrafterShape
from slipstream.plan.flops import drafter_flops
from slipstream.plan.known_gpus import PackShape
from slipstream.plan.throughput import StageCosts
from slipstream.plan.weights import TargetWeights

TOLERANCE = 0.05
"""A bench of a target whose layers have so different a number of weights was of another target."""


@dataclass(frozen=True, slots=True)
class RunShape:
    """What costs depend on: the drafter's shape, the target's weights, the average pack and its room in tokens."""

    shape: DrafterShape
    weights: TargetWeights
    pack: PackShape
    pack_tokens: int

    @property
    def depth(self) -> int:
        """Layers of the target up to the last tap."""
        return self.shape.tap_layers[-1] + 1

    def drafter_flops(self, *, anchors: float, tokens: int, context: float) -> float:
        """Useful work of a use with so many anchors, each of which sees `context` tokens in the mean."""
        return drafter_flops(
            shape=self.shape,
            tokens=tokens,
            anchors=round(anchors),
            visible_pairs=anchors * self.shape.block_size * (context + self.shape.block_size),
            rows=round(anchors) * (self.shape.block_size - 1),
        )


@dataclass(frozen=True, slots=True)
class PartialCosts:
    """What one file knows; a stage that it did not measure is none."""

    target_seconds_per_pack: float | None = None
    drafter_seconds_per_use: float | None = None
    step_seconds: float | None = None
    colocated_ratio: float | None = None
    source: str = ""


def costs_of_bench(found: Mapping[str, Any], *, run: RunShape) -> PartialCosts:
    """What a bench's JSON object says of a run's packs: of `target`, `drafter`, `pipeline`, or nothing.

    The target's time goes with real tokens and layers, the drafter's with useful work. Raises `ValueError` in words where
    the bench was of another model.
    """
    machine = str(found.get("device", "an unnamed device"))
    if "target" in found:
        return _of_target(found["target"], run=run, source=f"bench target on {machine}")
    if "drafter" in found:
        return _of_drafter(found["drafter"], work=found["work"], run=run, source=f"bench drafter on {machine}")
    if "pipeline" in found:
        named = f"bench pipeline of {found.get('shape', 'an unnamed shape')} on {machine}"
        return _of_pipeline(found["pipeline"], run=run, source=named)
    return PartialCosts()


def join_costs(parts: list[PartialCosts], *, run: RunShape) -> StageCosts:
    """One record from several files, later ones over earlier ones. Raises `ValueError` naming a stage that none measured."""
    known = PartialCosts()
    for part in parts:
        named = {name: getattr(part, name) for name in PartialCosts.__dataclass_fields__}
        known = replace(known, **{name: value for name, value in named.items() if value is not None and name != "source"})
    if known.target_seconds_per_pack is None:
        raise ValueError("no file measured the target: add one of `slipstream bench target --json`")
    if known.drafter_seconds_per_use is None:
        raise ValueError("no file measured the drafter: add one of `slipstream bench drafter --json`")
    return StageCosts(
        target_seconds_per_pack=known.target_seconds_per_pack,
        drafter_seconds_per_use=known.drafter_seconds_per_use,
        tokens_per_pack=run.pack.tokens,
        step_seconds=known.step_seconds or 0.0,
        colocated_ratio=known.colocated_ratio or 1.0,
        source=", ".join(dict.fromkeys(part.source for part in parts if part.source)),
    )


def _of_target(target: Mapping[str, Any], *, run: RunShape, source: str) -> PartialCosts:
    layers = int(target["layers"])
    ours = sum(run.weights.layers[: run.depth]) / run.depth
    theirs = float(target["matrix_parameters"]) / layers
    if abs(theirs / ours - 1) > TOLERANCE:
        raise ValueError(
            f"is of another target, {target['shape']}: {theirs / 1e6:.1f} M weights a layer, this recipe's {ours / 1e6:.1f} M"
        )
    seconds = target["milliseconds"] / 1e3
    return PartialCosts(
        target_seconds_per_pack=seconds * run.pack.tokens / target["real_tokens"] * run.depth / layers, source=source
    )


def _of_drafter(drafter: Mapping[str, Any], *, work: Mapping[str, Any], run: RunShape, source: str) -> PartialCosts:
    if drafter["parameters"] != run.shape.num_parameters:
        raise ValueError(
            f"is of another drafter: {drafter['parameters']:,} weights, this recipe's has {run.shape.num_parameters:,}"
        )
    once = drafter["phases"].get("optimizer", 0.0) / 1e3
    seconds = (drafter["milliseconds"] / 1e3 - once) / work["packs"]
    measured = run.drafter_flops(
        anchors=work["anchors"], tokens=work["documents"] * work["document_tokens"], context=work["document_tokens"] / 2
    )
    return PartialCosts(drafter_seconds_per_use=seconds * _use_flops(run) / measured, step_seconds=once, source=source)


def _of_pipeline(pipeline: Mapping[str, Any], *, run: RunShape, source: str) -> PartialCosts:
    """A pipeline's step is one use, its optimizer included: what comes once a step is in the cost of a use."""
    figures = pipeline["figures"][0]
    target = figures["target_milliseconds"] / 1e3 * run.pack.tokens / pipeline["real_tokens"] * run.depth / pipeline["layers"]
    context = run.pack.squared_tokens / max(1.0, run.pack.tokens) / 2
    measured = run.drafter_flops(anchors=pipeline["anchors"], tokens=pipeline["pack_tokens"], context=context)
    return PartialCosts(
        target_seconds_per_pack=target,
        drafter_seconds_per_use=figures["drafter_milliseconds"] / 1e3 * _use_flops(run) / measured,
        colocated_ratio=figures["ratio"],
        source=source,
    )


def _use_flops(run: RunShape) -> float:
    context = run.pack.squared_tokens / max(1.0, run.pack.tokens) / 2
    return run.drafter_flops(anchors=run.pack.anchors, tokens=run.pack_tokens, context=context)
