"""A recorder for a CPU that keeps a CUDA graph's rules: replays see memory and the numbers of the recording, no Python.

And attention that such a recording can hold: borders are read where they lie, at each replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.target.frame import Frame

READS_BACK = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select")
"""What makes a CPU wait for a device, and cannot be recorded there."""


class Tape(TorchDispatchMode):
    """Every operator with its arguments and results. `replay` runs them again, into the memory of the first results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple] = []
        self.num_replays = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::")[1]
        assert name not in READS_BACK, f"{name} cannot be recorded"
        given = {tensor.untyped_storage().data_ptr() for tensor in tensors_in((args, kwargs))}
        results = func(*args, **(kwargs or {}))
        made = [tensor for tensor in tensors_in(results) if tensor.untyped_storage().data_ptr() not in given]
        if made or func._schema.is_mutable:
            self.calls.append((func, args, kwargs or {}, results, bool(made)))
        return results

    def replay(self) -> None:
        self.num_replays += 1
        with torch.inference_mode():
            for func, args, kwargs, results, is_new in self.calls:
                again = func(*args, **kwargs)
                if is_new:
                    for to, of in zip(tensors_in(results), tensors_in(again), strict=True):
                        to.copy_(of)


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


def tensors_in(value) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from tensors_in(part)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))


def attention(query: Tensor, key: Tensor, value: Tensor, *, frame: Frame, scale: float, window: int | None) -> Tensor:
    """As `reference_kernels.attention`, all sequences at once. Like flash attention it leaves rows past `longest` alone, and
    an empty sequence costs it nothing; what it gives a row does not depend on other sequences' borders.
    """
    borders = frame.cu_seqlens_M
    place_T = torch.arange(len(query), dtype=torch.int32)
    sequence_T = torch.bucketize(place_T, borders[1:], right=True)
    inside_T = place_T - borders[sequence_T]
    distance = place_T[:, None] - place_T[None]
    seen = (sequence_T[:, None] == sequence_T[None]) & (distance >= 0)
    if window is not None and window < frame.longest:
        seen &= distance < window
    groups = query.shape[1] // key.shape[1]
    keys, values = (part.float().transpose(0, 1).repeat_interleave(groups, dim=0) for part in (key, value))
    scores = torch.matmul(query.float().transpose(0, 1), keys.transpose(1, 2)) * scale
    mixed = torch.matmul(torch.softmax(scores.masked_fill(~seen, -torch.inf), dim=-1), values).transpose(0, 1)
    return torch.where((inside_T < frame.longest)[:, None, None], mixed, torch.nan).to(query.dtype).contiguous()
