"""Whole runs on GPUs: target and drafter as two processes on one, ranks over NCCL on two; the weights are those of one process.

Targets have made-up weights at a size whose kernels exist. Each run starts processes that compile: about a minute.
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from launch_material import MASK_TOKEN, tiny_recipe
from safetensors.torch import load_file

from slipstream.errors import WorkerFailed
from slipstream.launch import local
from slipstream.launch.local import RunResult, train_run
from slipstream.launch.preflight import preflight
from slipstream.launch.processes import Child, start_child
from slipstream.plan import Schedule
from slipstream.runfolder import RunFolder

pytestmark = pytest.mark.gpu

needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
DIMENSIONS = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
KILLED_AT = 6
VALIDATED = {"validation__max_new_tokens": 100, "validation__every_steps": 10}


@pytest.fixture(scope="module")
def larger(material: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The tiny target with heads that GPU kernels take, and no weights."""
    folder = tmp_path_factory.mktemp("larger") / "target"
    shutil.copytree(material["target"], folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | DIMENSIONS))
    return {**material, "target": str(folder)}


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[Child]:
    """Handles of the children that a run starts, in order."""
    handles: list[Child] = []

    def recording(**arguments: Any) -> Child:
        handles.append(start_child(**arguments))
        return handles[-1]

    monkeypatch.setattr(local, "start_child", recording)
    return handles


def train(material: dict[str, str], runs: Path, *, name: str, on_report: Any = None, **changes: Any) -> RunResult:
    base = {
        "target__weights": "random",
        "target__dtype": "bfloat16",
        "plan__pack_tokens": 256,
        "plan__pack_anchors": 64,
        "plan__epochs": 8,
        "drafter__num_layers": 2,
        "drafter__block_size": 8,
        "drafter__mask_token_id": MASK_TOKEN,
        "drafter__dtype": "bfloat16",
        "optimizer__lr": 1e-3,
        "placement__device": "cuda",
        "placement__host_memory_gb": 4.0,
        "placement__target_threads": 2,
        "placement__drafter_threads": 2,
    }
    recipe = tiny_recipe(material, runs, name=name, **{**base, **changes})
    return train_run(flight=preflight(recipe), on_report=on_report)


@pytest.fixture(scope="module")
def alone(larger: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    """One process on one GPU."""
    changes = {"placement__mode": "colocated", "validation__prompts": larger["prompts"], **VALIDATED}
    return train(larger, tmp_path_factory.mktemp("alone"), name="alone", **changes)


def lines(result: RunResult, kind: str) -> list[dict[str, Any]]:
    every = map(json.loads, RunFolder(result.folder).metrics.read_text().splitlines())
    return [line for line in every if line["kind"] == kind]


def assert_same_training(ours: RunResult, theirs: RunResult) -> None:
    """The same losses step by step and the same weights, up to what the order of sums in a kernel may change."""
    one, two = lines(ours, "train"), lines(theirs, "train")
    assert [line["step"] for line in one] == [line["step"] for line in two] == list(range(ours.steps))
    assert [line["loss"] for line in one] == pytest.approx([line["loss"] for line in two], rel=1e-3)
    assert [line["total_anchors"] for line in one] == [line["total_anchors"] for line in two]
    assert not any(line["skipped"] for line in one)
    weights, others = (load_file(result.checkpoint / "weights.safetensors") for result in (ours, theirs))
    apart = {name: float((weights[name] - others[name]).norm() / others[name].norm()) for name in others}
    assert max(apart.values()) < 1e-2, apart


def test_two_processes_on_one_gpu_and_a_target_that_dies(
    larger: dict[str, str], tmp_path: Path, alone: RunResult, children: list[Child]
) -> None:
    """Seals are checked on the way through host memory; a restarted target makes the same states again."""
    seen: list[str] = []

    def on_report(worker: str, kind: str, payload: Any) -> None:
        seen.append(f"{worker} {kind}")
        if kind == "record" and payload["kind"] == "train" and payload["step"] == KILLED_AT and "target-0 restart" not in seen:
            next(child for child in children if child.name == "target-0" and child.alive).process.kill()

    split = {"placement__mode": "split", "placement__target_gpus": (0,), "placement__drafter_gpus": (0,)}
    result = train(larger, tmp_path, name="split", on_report=on_report, **split)
    assert [child.name for child in children] == ["drafter-0", "target-0", "target-0"]
    assert_same_training(result, alone)
    assert lines(result, "late_work") == []


def two_ranks(material: dict[str, str], runs: Path, *, graphs: str, **changes: Any) -> RunResult:
    """Two ranks on a GPU each, which ended well: nothing was compiled or allocated late, and steps were run as asked.

    A launched backward pass begins the sums over NCCL by its hooks, part by part; a replayed one runs no hooks, and its sums
    begin behind it.
    """
    ranks = {"placement__mode": "colocated", "placement__drafter_ranks": 2, "placement__cuda_graphs": graphs}
    result = train(material, runs, name=f"nccl-{graphs}", **ranks, **changes)
    (warm_up,) = lines(result, "warm_up")
    assert warm_up["cuda_graphs"]["used"] == (graphs == "on"), warm_up
    assert lines(result, "late_work") == []
    return result


@needs_two
def test_two_ranks_that_reduce_while_backward_runs_train_as_one_that_has_both_columns(
    larger: dict[str, str], tmp_path: Path, alone: RunResult
) -> None:
    """Launched steps, whose hooks overlap the sums; without validation, which the replayed run has."""
    result = two_ranks(larger, tmp_path, graphs="off")
    assert_same_training(result, alone)


@needs_two
def test_two_ranks_over_nccl_train_as_one_that_has_both_columns(
    larger: dict[str, str], tmp_path: Path, alone: RunResult
) -> None:
    """They divide validation, and rank 0 writes checkpoints meanwhile; after warm-up nothing is compiled or allocated on it."""
    result = two_ranks(
        larger,
        tmp_path,
        graphs="on",
        validation__prompts=larger["prompts"],
        checkpoint__every_steps=9,
        **VALIDATED,
    )
    assert_same_training(result, alone)
    validations = lines(result, "validation")
    assert [line["step"] for line in validations] == [0, *range(10, result.steps, 10), result.steps]
    figures = ("acceptance_length", "acceptance_length_by_request", "slot_acceptance", "histogram", "answers")
    same = [[line[name] for name in figures] for line in (validations[0], lines(alone, "validation")[0])]
    assert same[0] == same[1], "by the weights that no step has changed yet"
    _check_shares(RunFolder(result.folder), steps=[line["step"] for line in validations])


def _check_shares(folder: RunFolder, *, steps: list[int]) -> None:
    """Each rank has captured answers of its own, and was in the state of validation at every measurement."""
    first = Schedule.load(folder.schedule).num_packs
    captured = []
    for worker in ("worker-0", "worker-1"):
        spans = [json.loads(line) for line in (folder.spans / f"{worker}.jsonl").read_text().splitlines()[1:]]
        assert sorted({span[5] for span in spans if span[0] == "cpu" and span[1] == "validate"}) == steps
        captured.append({span[4] - first for span in spans if span[0] == "cpu" and span[1] == "target" and span[4] >= first})
    count = len(captured[0]) + len(captured[1])
    assert count > 1
    assert captured == [set(range(rank, count, 2)) for rank in (0, 1)]


@needs_two
def test_a_target_and_a_drafter_on_a_gpu_each(larger: dict[str, str], tmp_path: Path, alone: RunResult) -> None:
    result = train(larger, tmp_path, name="one-and-one", placement__mode="split")
    assert_same_training(result, alone)
    assert lines(result, "late_work") == []


@needs_two
def test_a_rank_that_fails_ends_the_run_while_the_other_waits_for_it(
    larger: dict[str, str], tmp_path: Path, children: list[Child]
) -> None:
    """Rank 0 cannot write its checkpoint; rank 1 waits in NCCL for its gradients, which never come."""
    two = {"placement__mode": "colocated", "placement__drafter_ranks": 2, "checkpoint__every_steps": 9}
    checkpoints, failed = tmp_path / "fails" / "checkpoints", []

    def on_report(worker: str, kind: str, payload: Any) -> None:
        if kind == "record" and payload["kind"] == "train" and payload["step"] == KILLED_AT - 4:
            checkpoints.rename(tmp_path / "elsewhere")
            checkpoints.touch()
        elif kind == "failed":
            failed.append(time.monotonic())

    with pytest.raises(WorkerFailed, match=r"^worker-0 \(exit code 2\)"):
        train(larger, tmp_path, name="fails", on_report=on_report, **two)
    assert time.monotonic() - failed[0] < 30, "nobody waits for a collective to time out"
    assert not any(child.alive for child in children)
