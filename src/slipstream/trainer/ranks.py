"""The group of data-parallel drafter ranks: which columns each owns, and the sums between them.

Waits for: every other rank's gradient. Unblocked by: their backward passes. No `DistributedDataParallel`: it waits for the
device by itself, and the flat gradient needs no copies into buckets.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
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
    """All drafter ranks of a run. Sums are the same on every rank, whichever rank is slow.

    Over NCCL nothing here makes the CPU wait: a sum runs on a stream of its own behind what the calling thread's stream has
    been given so far, and what that stream is given after `wait` runs behind the sum.
    """

    def __init__(self, share: ColumnShare) -> None:
        assert dist.is_initialized()
        self.share = share

    @classmethod
    def join(cls, *, share: ColumnShare, store: Path, timeout_seconds: float, backend: str = "gloo") -> RankGroup:
        """Meet the other ranks through the file `store`, new to this run and seen by all of them.

        "nccl" takes the current CUDA device, and has its connections by the time it returns. Raises `PeerDied` when the ranks
        are not all there within `timeout_seconds`, which also bounds every later wait: over NCCL a rank that comes later than
        that ends the process of the one that waits, as no thread is there to raise.
        """
        timeout = timedelta(seconds=timeout_seconds)
        files = dist.FileStore(str(store.resolve()), share.ranks)  # type: ignore[attr-defined]
        files.set_timeout(timeout)
        device: dict[str, Any] = {}
        if backend == "nccl":
            device = {"device_id": torch.device("cuda", torch.cuda.current_device())}
        try:
            dist.init_process_group(backend, store=files, rank=share.rank, world_size=share.ranks, timeout=timeout, **device)
        except (RuntimeError, dist.DistError) as error:
            raise PeerDied(f"drafter rank {share.rank} did not meet all {share.ranks} ranks: {error}") from error
        return cls(share)

    def start_sum(self, flat: Tensor) -> dist.Work:
        """Begin to sum one contiguous tensor over the ranks, in place; every rank begins the same sums in the same order."""
        try:
            work: dist.Work | None = dist.all_reduce(flat, op=dist.ReduceOp.SUM, async_op=True)
        except (RuntimeError, dist.DistError) as error:
            raise self._lost(error) from error
        assert work is not None
        return work

    def wait(self, work: dist.Work) -> None:
        """What follows sees the sum. Raises `PeerDied` when a rank is gone or, over gloo, later than the timeout."""
        try:
            work.wait()
        except (RuntimeError, dist.DistError) as error:
            raise self._lost(error) from error

    def __enter__(self) -> RankGroup:
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        """Leave the group, unless this rank fails: its process then ends, with all that it has.

        The others may be waiting for it in a sum. NCCL would wait for them to leave too, and give up a group no sooner.
        """
        if failure is None:
            self.close()

    def close(self) -> None:
        """Leave the group together with all others: over NCCL, waits for them. Idempotent."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _lost(self, error: Exception) -> PeerDied:
        return PeerDied(f"drafter rank {self.share.rank} lost another rank during a reduction: {error}")
