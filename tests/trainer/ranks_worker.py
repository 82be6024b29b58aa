"""What a spawned rank of `test_trainer_ranks.py` runs."""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch
from toy_run import make_run, toy_loss

from slipstream.trainer.ranks import ColumnShare, RankGroup


def train(rank: int, ranks: int, folder: Path, num_columns: int, stop_at: int | None, bad_step: int | None) -> None:
    """Train a toy run as one of several ranks and leave weights, records and the end in a file."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    share = ColumnShare(rank=rank, ranks=ranks)
    group = RankGroup.join(share=share, store=folder / "store", timeout_seconds=60)
    seen = 0

    def stop() -> bool:
        nonlocal seen
        seen += 1
        return rank == 0 and stop_at is not None and seen > stop_at

    def loss(**arguments):
        sums = toy_loss(**arguments)
        bad = arguments["batch"].step == bad_step and rank == ranks - 1
        return sums.__class__(**{**vars(sums), "loss_sum": sums.loss_sum * (math.nan if bad else 1.0)})

    checkpoints = folder / "checkpoints" if rank == 0 else None
    run = make_run(num_steps=6, num_columns=num_columns, share=share, group=group, folder=checkpoints, loss=loss)
    result = run.trainer.fit(stop=stop)
    group.close()
    records = [(r.step, r.loss_sum, r.anchors, r.gradient_norm, r.skipped) for r in run.recorder.records]
    torch.save({"weights": run.weights(), "records": records, "step": result.step}, folder / f"rank-{rank}.pt")


def leave_alone(rank: int, folder: Path) -> None:
    """Rank 1 leaves in the middle of a run; rank 0 must say so."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    share = ColumnShare(rank=rank, ranks=2)
    group = RankGroup.join(share=share, store=folder / "store", timeout_seconds=60)
    if rank == 1:
        group.wait(group.start_sum(torch.ones(3)))
        os._exit(7)
    try:
        for _ in range(2):
            group.wait(group.start_sum(torch.ones(3)))
    except Exception as error:
        (folder / "error").write_text(f"{type(error).__name__}: {error}")
    group.close()
