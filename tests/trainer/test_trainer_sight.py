"""Training with spans and stages changes nothing and waits for nothing: on modelled streams, and on a GPU under a trace."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from built_run import Built, make_recipe
from cuda_trace import TracedSteps, read_trace
from model_lanes import CountedWork, ModelLanes
from test_trainer_gpu import GPU_SHAPE

from slipstream.observe import Account, SpanLog, WorkerFacts
from slipstream.observe.stages import GpuStages, cuda_stages
from slipstream.trainer.build import Gpu

FACTS = WorkerFacts(worker="drafter-0", role="drafter", rank=0, gpu=0)


@contextmanager
def seen(path: Path) -> Iterator[Account]:
    """An account whose spans are in `path` afterwards."""
    with SpanLog(FACTS, path=path) as spans:
        account = Account("drafter-0", spans=spans)
        yield account
        if account.stages is not None:
            account.stages.close()
    assert spans.dropped == 0


def lanes_of(path: Path) -> dict[str, list[list[Any]]]:
    found: dict[str, list[list[Any]]] = {}
    for line in map(json.loads, path.read_text().splitlines()):
        if isinstance(line, list):
            found.setdefault(line[0], []).append(line)
    return found


def test_on_modelled_streams(tmp_path: Path) -> None:
    plain = Built(tmp_path / "plain", make_recipe(), gpu=Gpu(lanes=ModelLanes(), work=CountedWork()))
    plain.fit()
    lanes = ModelLanes()
    with seen(tmp_path / "spans.jsonl") as account:
        assert account.spans is not None
        account.stages = GpuStages(event=lanes.timed_event, record=lanes.mark, spans=account.spans, pairs=64)
        gpu = Gpu(lanes=lanes, work=CountedWork())
        run = Built(tmp_path / "seen", make_recipe(), gpu=gpu, account=account)
        result = run.fit()
    assert lanes.num_waits == 0
    assert account.stages.dropped == 0
    for name, weight in plain.drafter.state_dict().items():
        assert torch.equal(weight, run.drafter.state_dict()[name]), name
    found = lanes_of(tmp_path / "spans.jsonl")
    steps = list(range(result.step))
    assert {span[5] for span in found["gpu"] if span[1] == "backward"} <= set(steps)
    assert [span[5] for span in found["loader"]] == steps
    states = {span[1] for span in found["cpu"]}
    assert {"warm_up", "forward", "backward", "optimizer", "hooks", "validate", "checkpoint"} <= states
    first = next(span for span in found["cpu"] if span[1] == "forward")
    assert first[2] >= max(span[2] + span[3] for span in found["cpu"] if span[1] == "warm_up"), "warm-up is told as a whole"


@pytest.mark.gpu
def test_on_a_gpu_stages_are_timed_and_nothing_waits(tmp_path: Path) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    recipe = make_recipe(plan={"epochs": 6}, validation={"every_steps": 1000}, checkpoint={"every_steps": 8, "keep": 9})
    with seen(tmp_path / "spans.jsonl") as account:
        assert account.spans is not None
        account.stages = cuda_stages(account.spans, device=device)
        run = Built(tmp_path, recipe, shape=GPU_SHAPE, device="cuda", attention="flex", account=account)
        run.source.preload(run.schedule.num_packs)
        torch.cuda.synchronize()
        traced = TracedSteps(tmp_path / "trace.json", first=8, last=32)
        run.trainer.hooks = (*run.trainer.hooks, traced)
        result = run.fit()
        torch.cuda.synchronize()
    trace = read_trace(tmp_path / "trace.json", but=traced.waiters)
    assert trace.forbidden == {}
    assert run.trainer.hooks[-2].grown == {}
    assert account.stages.dropped == 0
    found = lanes_of(tmp_path / "spans.jsonl")["gpu"]
    assert all(one[2] + one[3] <= two[2] for one, two in itertools.pairwise(found)), "stages of one stream do not overlap"
    for name in ("forward", "backward", "optimizer"):
        assert {span[5] for span in found if span[1] == name} == set(range(result.step)), name
    for line in run.lines("train"):
        stages = sum(span[3] for span in found if span[5] == line["step"]) / 1e6
        assert 0 < stages <= line["seconds"] * 1.02 + 1e-4, line["step"]
