"""What a batch sender allocates: as much as the largest batch, in the first round, and nothing after it."""

from __future__ import annotations

import torch

from slipstream.device.sender import LEAST_BYTES, BatchSender


class Allocations:
    """Ordinary memory, counted."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, nbytes: int) -> torch.Tensor:
        self.sizes.append(nbytes)
        return torch.zeros(nbytes, dtype=torch.uint8)


def sent(sender: BatchSender, *sizes: int) -> None:
    for size in sizes:
        found = sender(torch.ones(size, 3, dtype=torch.int64))
        assert (found.shape, found.dtype, found.device.type) == ((size, 3), torch.int64, "meta")
    sender.arrived()


def test_the_first_round_allocates_all_that_later_ones_need() -> None:
    allocated = Allocations()
    sender = BatchSender(torch.device("meta"), allocate=allocated)
    rounds = [(5, 70_000), (5, 7), (40_000, 40_000, 1)]
    for sizes in rounds:
        sent(sender, *sizes)
    first = list(allocated.sizes)
    assert first[:3] == [LEAST_BYTES, 70_000 * 24, 128 + 70_000 * 24], "pieces of the first batch, then one for all of it"
    assert len(first) == 5, "one piece and one memory for the third, which is larger"
    for sizes in (*rounds, *rounds[::-1]):
        sent(sender, *sizes)
    assert allocated.sizes == first


def test_on_a_cpu_tensors_stay_where_they_are() -> None:
    allocated = Allocations()
    sender = BatchSender(torch.device("cpu"), allocate=allocated)
    tensor = torch.ones(4)
    assert sender(tensor) is tensor
    sender.arrived()
    assert allocated.sizes == []
