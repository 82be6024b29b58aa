"""Thread counts are explicit, shared out evenly, and what torch really takes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from slipstream.device.threads import ThreadShare, share_threads, thread_environment


@pytest.mark.parametrize(
    ("given", "cores", "expected"),
    [
        ((None, None), 16, ThreadShare(target=4, drafter=4)),
        ((None, None), 3, ThreadShare(target=1, drafter=1)),
        ((None, None), 18, ThreadShare(target=4, drafter=4)),
        ((6, None), 16, ThreadShare(target=6, drafter=2)),
        ((None, 1), 16, ThreadShare(target=7, drafter=1)),
        ((8, None), 16, ThreadShare(target=8, drafter=1)),
        ((5, 9), 1, ThreadShare(target=5, drafter=9)),
    ],
)
def test_cores_are_shared_out(given: tuple[int | None, int | None], cores: int, expected: ThreadShare) -> None:
    assert (
        share_threads(target_workers=2, drafter_ranks=2, target_threads=given[0], drafter_threads=given[1], cores=cores)
        == expected
    )


def test_a_child_runs_with_what_it_was_given() -> None:
    code = """
import os, sys, torch
from slipstream.device.threads import ThreadCounts, set_threads
assert torch.get_num_threads() == 1, torch.get_num_threads()
assert set_threads(2) == ThreadCounts(intra_op=2, inter_op=1)
assert set_threads(2) == ThreadCounts(intra_op=2, inter_op=1)
assert (torch.get_num_threads(), torch.get_num_interop_threads()) == (2, 1)
assert os.environ["KEPT"] == "yes"
"""
    environment = thread_environment(1, base={**os.environ, "KEPT": "yes", "OMP_NUM_THREADS": "2"})
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
