"""Data-parallel ranks over gloo: the same weights as one rank, the same stop, the same skip."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch
from ranks_worker import leave_alone, train
from toy_run import make_run

from slipstream.trainer.checkpoint import complete_checkpoints
from slipstream.trainer.ranks import ColumnShare


def spawn(folder: Path, *, ranks: int, num_columns: int, stop_at: int | None = None, bad_step: int | None = None) -> list[dict]:
    context = multiprocessing.get_context("spawn")
    children = [
        context.Process(target=train, args=(rank, ranks, folder, num_columns, stop_at, bad_step)) for rank in range(ranks)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join(timeout=120)
        assert child.exitcode == 0
    return [torch.load(folder / f"rank-{rank}.pt") for rank in range(ranks)]


@pytest.fixture(autouse=True)
def one_thread() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_columns() -> None:
    assert [ColumnShare(rank=rank, ranks=2).columns(6) for rank in (0, 1)] == [(0, 2, 4), (1, 3, 5)]
    with pytest.raises(AssertionError):
        ColumnShare(rank=0, ranks=2).columns(3)


def test_two_ranks_of_one_pack_equal_one_rank_of_two_bitwise(tmp_path: Path) -> None:
    alone = make_run(num_steps=6, num_columns=2)
    alone.trainer.fit()
    folder = tmp_path / "run #1 100%25"  # ranks meet through a file, not through an address
    folder.mkdir()
    found = spawn(folder, ranks=2, num_columns=2)
    expected = [(r.step, r.loss_sum, r.anchors, r.gradient_norm, r.skipped) for r in alone.recorder.records]
    for rank in found:
        assert rank["records"] == expected
        for name, weight in alone.weights().items():
            assert torch.equal(rank["weights"][name], weight), name


def test_more_packs_a_rank_agree_closely(tmp_path: Path) -> None:
    alone = make_run(num_steps=6, num_columns=6)
    alone.trainer.fit()
    found = spawn(tmp_path, ranks=2, num_columns=6)
    norms = [r.gradient_norm for r in alone.recorder.records]
    assert [record[3] for record in found[0]["records"]] == pytest.approx(norms, rel=1e-6)
    for name, weight in alone.weights().items():
        torch.testing.assert_close(found[0]["weights"][name], weight, rtol=1e-5, atol=1e-6)
        assert torch.equal(found[0]["weights"][name], found[1]["weights"][name])


def test_all_ranks_stop_at_the_same_step_and_skip_the_same(tmp_path: Path) -> None:
    found = spawn(tmp_path, ranks=2, num_columns=2, stop_at=2, bad_step=1)
    assert [rank["step"] for rank in found] == [4, 4]
    for rank in found:
        assert [record[0] for record in rank["records"]] == [0, 1, 2, 3]
        assert [record[4] for record in rank["records"]] == [False, True, False, False]
    assert torch.equal(found[0]["weights"]["fc"], found[1]["weights"]["fc"])
    assert [path.name for path in complete_checkpoints(tmp_path / "checkpoints")] == ["step-000004"]


def test_a_rank_that_leaves_is_named(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    children = [context.Process(target=leave_alone, args=(rank, tmp_path)) for rank in (0, 1)]
    for child in children:
        child.start()
    for child in children:
        child.join(timeout=120)
    assert [child.exitcode for child in children] == [0, 7]
    assert (tmp_path / "error").read_text().startswith("PeerDied: drafter rank 0 lost another rank")
