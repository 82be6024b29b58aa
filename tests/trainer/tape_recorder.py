"""A recorder for a CPU that keeps a CUDA graph's rules: replays see memory and the numbers of the recording, no Python."""

from __future__ import annotations

from collections.abc import Callable

import torch
from model_lanes import ModelLanes
from torch.utils._python_dispatch import TorchDispatchMode

READS_BACK = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select")
"""What makes a CPU wait for a device, and cannot be recorded there."""


class Tape(TorchDispatchMode):
    """Every operator that computes, with its arguments and results; those that write into an argument have no others.

    `replay` runs them again, into the memory of the first results.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple] = []
        self.num_replays = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::")[1]
        assert name not in READS_BACK, f"{name} cannot be recorded"
        results = func(*args, **(kwargs or {}))
        alias = [returned.alias_info for returned in func._schema.returns]
        if "empty" in func._schema.name or any(info is not None and not info.is_write for info in alias):
            return results  # the memory is there; a view shows it
        writes = any(info is not None for info in alias)
        self.calls.append((func, args, kwargs or {}, None if writes else results))
        return results

    @torch.no_grad()
    def replay(self) -> None:
        self.num_replays += 1
        for func, args, kwargs, results in self.calls:
            again = func(*args, **kwargs)
            if results is not None:
                _write(results, again)


def _write(to, of) -> None:
    if isinstance(to, torch.Tensor):
        to.detach().copy_(of)
    elif isinstance(to, (tuple, list)):
        for one, other in zip(to, of, strict=True):
            _write(one, other)


class TapeRecorder:
    nbytes = 4711

    def __init__(self) -> None:
        self.tapes: list[Tape] = []
        self.num_tried = 0

    def try_out(self, work: Callable[[], None]) -> None:
        self.num_tried += 1
        work()

    def record(self, work: Callable[[], None]) -> Tape:
        tape = Tape()
        with tape:
            work()
        self.tapes.append(tape)
        return tape


class RecordingLanes(ModelLanes):
    """Model lanes that can record."""

    def __init__(self) -> None:
        super().__init__()
        self.made = TapeRecorder()

    def recorder(self) -> TapeRecorder:
        return self.made
