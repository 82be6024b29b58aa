"""Bytes that a piece of real code keeps alive, on torch's meta device: sizes and lifetimes of tensors, no values.

What a compiled function allocates inside is left out (`ew.run` stands for one kernel on CUDA: its results alone take memory),
and flex attention is stood in for by a function that keeps what flex keeps.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """While entered, counts storages that come and go. `peak` since the last `reset`; `now` at present."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.at_peak = ""
        self._seen: set[int] = set()
        self.paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.paused:
            self.add(result, name=str(func))
        return result

    def add(self, result: Any, *, name: str) -> None:
        """Count what is new in a result."""
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._add(leaf.untyped_storage(), name)

    def reset(self) -> None:
        """Begin a new peak."""
        self.peak = self.now

    def _add(self, storage: torch.UntypedStorage, name: str) -> None:
        key = id(storage)
        if key in self._seen:
            return
        nbytes = storage.nbytes()
        self._seen.add(key)
        self.now += nbytes
        if self.now > self.peak:
            self.peak, self.at_peak = self.now, name
        weakref.finalize(storage, self._drop, key, nbytes)

    def _drop(self, key: int, nbytes: int) -> None:
        self._seen.discard(key)
        self.now -= nbytes


@contextmanager
def as_one_kernel(live: LiveBytes, *modules: Any) -> Iterator[None]:
    """Inside, `run` of these modules' `ew` allocates its results and nothing else, as a compiled function does.

    A function without results, which writes to its arguments, allocates nothing.
    """
    elementwise = modules[0].ew
    before = elementwise.run

    def run(function: Callable[..., Any], *arguments: Any) -> Any:
        plain = [argument.detach() if isinstance(argument, torch.Tensor) else argument for argument in arguments]
        live.paused = True
        try:
            with torch.no_grad():
                shapes = function(*plain)
        finally:
            live.paused = False
        if shapes is None:
            return None
        results = shapes if isinstance(shapes, tuple) else (shapes,)
        made = tuple(torch.empty(result.shape, dtype=result.dtype, device="meta") for result in results)
        del shapes, results
        return made if len(made) > 1 else made[0]

    elementwise.run = run
    try:
        yield
    finally:
        elementwise.run = before


class Flex(torch.autograd.Function):
    """What flex attention keeps: its operands, its output, a log-sum-exp in fp32."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        heads, queries, width = query.shape
        output = query.new_empty(queries, heads, width)
        sums = query.new_empty(heads, queries, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, sums)
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, key, value, _output, sums = ctx.saved_tensors
        delta = torch.empty_like(sums)
        grads = tuple(
            part.new_empty(part.shape[1], part.shape[0], part.shape[2]).transpose(0, 1) for part in (query, key, value)
        )
        del delta
        return grads


class MetaFlex:
    """Stands for the drafter's attention."""

    def mask(self, spans: Any, *, device: torch.device) -> None:
        """None is needed."""

    def attend_joined(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, mask: Any) -> torch.Tensor:
        """`[Q, H, C]`."""
        output: torch.Tensor = Flex.apply(query, key, value)
        return output
