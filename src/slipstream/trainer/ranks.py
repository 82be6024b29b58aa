"""The group of data-parallel drafter ranks: which columns each owns, and the one sum per step between them.

Waits for: every other rank's gradient. Unblocked by: their backward passes. No `DistributedDataParallel`: it waits for the
device by itself, and the flat gradient needs a single reduction.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from slipstream.errors import PeerDied


@dataclass(frozen=True, slots=True)
class ColumnShare:
    """Rank `rank` of `ranks` owns columns rank, rank + ranks, ...; `ranks` divides the number of columns."""

    rank: int
    ranks: int

    def columns(self, num_columns: int) -> tuple[int, ...]:
        """The owned columns, ascending."""
        assert 0 <= self.rank < self.ranks, f"rank {self.rank} of {self.ranks}"
        assert num_columns % self.ranks == 0, f"{num_columns} columns over {self.ranks} ranks"
        return tuple(range(self.rank, num_columns, self.ranks))


class RankGroup:
    """All drafter ranks of a run. Sums are the same on every rank, whichever rank is slow."""

    def __init__(self, share: ColumnShare) -> None:
        assert dist.is_initialized()
        self.share = share

    @classmethod
    def join(cls, *, share: ColumnShare, store: Path, timeout_seconds: float, backend: str = "gloo") -> RankGroup:
        """Meet the other ranks through the file `store`, new to this run and seen by all of them.

        Raises `PeerDied` when they are not all there within `timeout_seconds`, which also bounds every later wait.
        """
        try:
            dist.init_process_group(
                backend,
                init_method=f"file://{store.resolve()}",
                rank=share.rank,
                world_size=share.ranks,
                timeout=timedelta(seconds=timeout_seconds),
            )
        except (RuntimeError, dist.DistError) as error:
            raise PeerDied(f"drafter rank {share.rank} did not meet all {share.ranks} ranks: {error}") from error
        return cls(share)

    def all_reduce_sum(self, flat: Tensor) -> None:
        """Sum one flat tensor over the ranks, in place. Raises `PeerDied` when a rank is gone or later than the timeout."""
        try:
            dist.all_reduce(flat, op=dist.ReduceOp.SUM)
        except (RuntimeError, dist.DistError) as error:
            raise PeerDied(f"drafter rank {self.share.rank} lost another rank while summing gradients: {error}") from error

    def close(self) -> None:
        """Leave the group. Idempotent."""
        if dist.is_initialized():
            dist.destroy_process_group()
