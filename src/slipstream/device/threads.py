"""Explicit CPU thread counts per role: two processes that both take every core make each other slow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slipstream.device.limits import available_cores

# Libraries read these once, at import, so they are set in a child's environment before it starts.
_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS", "RAYON_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class ThreadShare:
    """CPU threads of each target process and of each drafter process."""

    target: int
    drafter: int


def share_threads(
    *,
    target_workers: int,
    drafter_ranks: int,
    target_threads: int | None,
    drafter_threads: int | None,
    cores: int | None = None,
) -> ThreadShare:
    """Share `cores` (none: those of this process) out evenly over the processes whose count is not given; at least 1 each."""
    cores = available_cores() if cores is None else cores
    given = (target_threads or 0) * target_workers + (drafter_threads or 0) * drafter_ranks
    sharing = (target_workers if target_threads is None else 0) + (drafter_ranks if drafter_threads is None else 0)
    even = max(1, (cores - given) // sharing) if sharing else 1
    return ThreadShare(
        target=even if target_threads is None else target_threads,
        drafter=even if drafter_threads is None else drafter_threads,
    )


def thread_environment(threads: int, *, base: Mapping[str, str]) -> dict[str, str]:
    """`base` with the thread counts of a child process set in it; tokenizers stay serial, as workers do not tokenise."""
    return {**base, **dict.fromkeys(_VARIABLES, str(threads)), "TOKENIZERS_PARALLELISM": "false"}


@dataclass(frozen=True, slots=True)
class ThreadCounts:
    """What torch runs with in this process: threads inside one operator, and operators side by side."""

    intra_op: int
    inter_op: int


def set_threads(threads: int) -> ThreadCounts:
    """Give torch `threads` inside an operator and 1 across, and say what it took. Call it before any work is done."""
    import torch  # here, not above: the supervisor counts threads without torch

    torch.set_num_threads(threads)
    if torch.get_num_interop_threads() != 1:
        torch.set_num_interop_threads(1)
    counts = ThreadCounts(intra_op=torch.get_num_threads(), inter_op=torch.get_num_interop_threads())
    assert counts == ThreadCounts(intra_op=threads, inter_op=1), f"torch took {counts}, {threads} were asked for"
    return counts
