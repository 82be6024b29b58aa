"""The sum of gradients over the ranks, begun while a launched backward pass, the last of a step, still runs.

The flat gradient is summed in parts, a part as soon as the backward pass has written it: layers from the last to the first,
then the matrices outside of layers, then vectors together with the step's figures. A pass that is replayed from CUDA graphs
runs no hooks, so `finish` begins all parts after it, and nothing overlaps. The order is fixed, so that all ranks begin the
same sums whatever their timing. Waits for: the other ranks. Unblocked by: their backward passes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch.distributed as dist
from torch import Tensor, nn

from slipstream.trainer.optim import FlatAdamW, Region
from slipstream.trainer.ranks import RankGroup

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(slots=True)
class Part:
    """Elements `start` to `stop` of the buffer that is summed, and the parameters whose gradients lie there."""

    start: int
    stop: int
    names: frozenset[str]
    missing: set[str] = field(default_factory=set)


class GradientSum:
    """Sums a step's gradients and figures over the ranks of `group`. `optimizer` holds the parameters of `module`."""

    def __init__(self, module: nn.Module, *, optimizer: FlatAdamW, group: RankGroup) -> None:
        self._optimizer, self._group = optimizer, group
        self._parts = parts_in_order(optimizer.regions, size=len(optimizer.reduced))
        self._part_of = {name: part for part in self._parts for name in part.names}
        self._works: list[dist.Work] = []
        self._is_last = False
        for name, parameter in module.named_parameters():
            if name in self._part_of:  # after the optimizer's own hook, which puts the gradient into the buffer
                parameter.register_post_accumulate_grad_hook(partial(self._arrived, name=name))

    def begin_last(self) -> None:
        """The next backward pass is the step's last."""
        assert not self._works, "the sum of the step before is not finished"
        self._is_last = True
        for part in self._parts:
            part.missing = set(part.names)

    def finish(self) -> None:
        """Sum what is not yet on its way, gradients that no backward pass brought as zeros. What follows sees the sum."""
        self._is_last = False
        self._optimizer.clear_stale()
        while len(self._works) < len(self._parts):
            self._begin(self._parts[len(self._works)])
        for work in self._works:
            self._group.wait(work)
        self._works.clear()

    def _arrived(self, _parameter: Tensor, *, name: str) -> None:
        if not self._is_last:
            return
        self._part_of[name].missing.discard(name)
        # the last part holds the step's figures, which are complete after the backward pass only
        while len(self._works) < len(self._parts) - 1 and not self._parts[len(self._works)].missing:
            self._begin(self._parts[len(self._works)])

    def _begin(self, part: Part) -> None:
        self._works.append(self._group.start_sum(self._optimizer.reduced[part.start : part.stop]))


def parts_in_order(regions: Sequence[Region], *, size: int) -> list[Part]:
    """Stretches of the flat buffer in the order in which a backward pass completes them; together they are all of it.

    A stretch is the matrices of one layer, or what lies between; the vectors at the end go with what follows them.
    """
    parts: list[tuple[int, Part]] = []
    stops = [region.start for region in regions[1:]] + [size]
    for region, stop in zip(regions, stops, strict=True):
        found = _LAYER.search(region.name)
        layer = -2 if len(region.shape) < 2 else int(found[1]) if found else -1
        if parts and parts[-1][0] == layer:
            before = parts.pop()[1]
            parts.append((layer, Part(before.start, stop, before.names | {region.name})))
        else:
            parts.append((layer, Part(region.start, stop, frozenset({region.name}))))
    ordered = sorted(parts, key=lambda entry: -entry[0])  # stable: layers downwards, then other matrices, then vectors
    if ordered[-1][1].stop != size:  # no vectors: what is kept behind the gradients goes with what lies before it
        ordered.append(ordered.pop(next(at for at, (_, part) in enumerate(ordered) if part.stop == size)))
    return [part for _, part in ordered]
