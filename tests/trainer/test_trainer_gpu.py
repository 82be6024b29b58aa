"""On CUDA: steps that neither wait nor allocate, checkpoints and metadata behind events, bad steps, the CPU's own losses."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from built_run import GPU_SHAPE, Built, make_recipe
from cuda_trace import WINDOW, TracedSteps, read_trace, thread_ids
from followed_run import Leader, Way, lead
from torch.profiler import ProfilerActivity, profile, record_function

from slipstream.objective import BlockLossParts
from slipstream.trainer import build, complete_checkpoints, read_cursor
from slipstream.trainer.build import Gpu
from slipstream.trainer.checkpoint import read_checkpoint
from slipstream.trainer.hooks import Hook
from slipstream.trainer.lanes import CudaLanes
from slipstream.trainer.late_work import CudaWork
from slipstream.trainer.snapshot import Snapshot

pytestmark = pytest.mark.gpu


def gpu_run(
    folder: Path,
    *,
    resume: bool = False,
    gpu: Gpu | None = None,
    device: str = "cuda",
    embedding: str | None = None,
    **sections: dict,
) -> Built:
    """About 39 steps, launched unless a section says otherwise; packs lie on the device before the first."""
    base = {
        "plan": {"epochs": 6},
        "validation": {"every_steps": 1000},
        "checkpoint": {"every_steps": 8, "keep": 9},
        "placement": {"cuda_graphs": "off"},
    }
    recipe = make_recipe(**{key: {**base.get(key, {}), **sections.get(key, {})} for key in base.keys() | sections.keys()})
    attention = "flex" if device == "cuda" else "sdpa"
    run = Built(
        folder, recipe, resume=resume, shape=GPU_SHAPE, device=device, attention=attention, gpu=gpu, embedding=embedding
    )
    run.source.preload(run.schedule.num_packs)
    torch.cuda.synchronize()
    return run


def weights(run: Built) -> dict[str, torch.Tensor]:
    return {name: weight.detach().cpu().clone() for name, weight in run.drafter.state_dict().items()}


def assert_equal_weights(one: Built, two: Built) -> None:
    for name, weight in weights(one).items():
        assert torch.equal(weight, weights(two)[name]), name


@pytest.mark.parametrize(("dtype", "graphs"), [("bfloat16", "off"), ("float32", "off"), ("bfloat16", "on")])
def test_steps_neither_wait_nor_allocate(tmp_path: Path, dtype: str, graphs: str) -> None:
    run = gpu_run(
        tmp_path,
        drafter={"dtype": dtype},
        objective={"noise_std": 0.05, "weight": "dpace"},
        placement={"cuda_graphs": graphs},
    )
    trace_file = tmp_path / "trace.json"
    traced = TracedSteps(trace_file, first=8, last=32)
    run.trainer.hooks = (*run.trainer.hooks, traced)
    result = run.fit()
    assert result.status == "finished"
    assert (traced.num_steps, traced.num_checkpoints) == (24, 3)
    trace = read_trace(trace_file, but=traced.waiters)
    # two passes of two columns, and the update
    assert (trace.launches > 24 * 150, trace.graph_launches) == ((False, 24 * 5) if graphs == "on" else (True, 0))
    assert trace.launches > 24 * 10
    assert trace.forbidden == {}
    assert trace.pageable == {}
    late_work = run.trainer.hooks[-2]
    assert late_work.grown == {}, run.lines("late_work")
    assert len(run.lines("warm_up")) == 1
    lines = run.lines("train")
    assert [line["step"] for line in lines] == list(range(result.step))
    assert all(0 < line["seconds"] < 60 for line in lines)
    assert result.counters.skipped_steps == 0


def test_the_trace_sees_what_it_looks_for(tmp_path: Path) -> None:
    """Without this the test above could pass blind."""
    values = torch.ones(8, device="cuda")
    torch.cuda.empty_cache()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace, record_function(WINDOW):
        values.sum().item()
        torch.cuda.synchronize()
        event = torch.cuda.Event()
        event.record()
        event.synchronize()
        torch.ones(1 << 20).to("cuda")
        torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
        torch.empty(48 << 20, dtype=torch.uint8, pin_memory=True)
    trace.export_chrome_trace(str(tmp_path / "trace.json"))
    found = read_trace(tmp_path / "trace.json", but=set())
    names = {name.split("_")[0] for name, _ in found.forbidden}
    assert {"cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"} <= names, found
    assert names & {"cudaMalloc", "cuMemCreate"}, found
    assert names & {"cudaHostAlloc", "cudaHostRegister"}, found
    assert sum(found.pageable.values()) >= 1, found
    main = thread_ids("MainThread")
    assert all(int(thread) in main for _, thread in found.forbidden), found
    assert read_trace(tmp_path / "trace.json", but=main).forbidden == {}


def test_late_work_is_counted() -> None:
    """Without this "nothing grew" would say nothing."""
    work = CudaWork(torch.device("cuda"))
    torch.cuda.empty_cache()
    before = work.counts()
    torch.compile(lambda values: values.cos() + 3)(torch.ones(7, device="cuda"))
    kept = torch.empty(256 << 20, dtype=torch.uint8, device="cuda"), torch.empty(80 << 20, dtype=torch.uint8, pin_memory=True)
    grown = {name for name, count in work.counts().items() if count > before[name]}
    assert {"recompiles", "device_allocations", "pinned_allocations"} <= grown
    assert any("graph" in name for name in work.names())
    work.close()
    del kept


class SlowLanes(CudaLanes):
    """Every copy on a side stream comes late, a snapshot's a tenth of a second, so that what does not wait overtakes it."""

    def transfer(self, to: torch.Tensor, of: torch.Tensor) -> None:
        is_state = to.device.type == "cpu" and to.numel() > 1000
        torch.cuda._sleep(200_000_000 if is_state else 2_000_000)
        super().transfer(to, of)


def slow_gpu() -> Gpu:
    return Gpu(lanes=SlowLanes(torch.device("cuda")), work=CudaWork(torch.device("cuda")))


class StatesAtCheckpoints(Hook):
    """What a checkpoint must hold, and what it must not: the state after it was taken, with more work on the device."""

    def __init__(self, run: Built) -> None:
        self.run, self.states = run, {}

    def after_step(self, step: int, records) -> None:
        if step % 8 == 0:
            self.states[step] = self.run.trainer.optimizer.state()


def differing_checkpoints(run: Built) -> list[int]:
    watcher = StatesAtCheckpoints(run)
    run.trainer.hooks = (*run.trainer.hooks, watcher)
    run.fit()
    found = []
    for path in complete_checkpoints(run.checkpoints):
        step = read_cursor(path).step
        if step in watcher.states:
            checkpoint, wanted = read_checkpoint(path, identity=run.trainer._saving.writer._identity), watcher.states[step]
            same = all(
                torch.equal(tensor, getattr(checkpoint.state, part)[name])
                for part in ("master", "exp_avg", "exp_avg_sq")
                for name, tensor in getattr(wanted, part).items()
            )
            same = same and int(checkpoint.state.good_steps) == int(wanted.good_steps) == step
            if not same:
                found.append(step)
    return found


@pytest.mark.parametrize("graphs", ["off", "on"])
def test_late_copies_change_nothing(tmp_path: Path, graphs: str) -> None:
    plain = gpu_run(tmp_path / "plain")
    slow = gpu_run(tmp_path / "slow", gpu=slow_gpu(), placement={"cuda_graphs": graphs})
    assert differing_checkpoints(plain) == []
    assert differing_checkpoints(slow) == []
    assert_equal_weights(plain, slow)
    assert [line["loss"] for line in plain.lines("train")] == [line["loss"] for line in slow.lines("train")]


def test_a_snapshot_that_nobody_waits_for_is_overtaken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the test above would notice."""
    monkeypatch.setattr(Snapshot, "before_update", lambda self: None)
    assert differing_checkpoints(gpu_run(tmp_path, gpu=slow_gpu())) != []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exact_resume(tmp_path: Path, dtype: str) -> None:
    whole = gpu_run(tmp_path / "whole", drafter={"dtype": dtype})
    whole.fit()
    first = gpu_run(tmp_path / "parts", drafter={"dtype": dtype})
    assert first.fit(steps=11).status == "interrupted"
    second = gpu_run(tmp_path / "parts", resume=True, drafter={"dtype": dtype})
    assert second.trainer.start_step == 11
    result = second.fit()
    assert result.counters == whole.trainer.counters
    assert_equal_weights(whole, second)


class StateAtEachStep(Hook):
    def __init__(self, run: Built) -> None:
        self.run, self.states = run, []

    def after_step(self, step: int, records) -> None:
        self.states.append(self.run.trainer.optimizer.state())


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("what", ["row", "loss", "gradient"])
def test_a_step_that_is_not_finite_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, dtype: str, value: float
) -> None:
    class Damaged(BlockLossParts):
        def gather(self, hidden_NBD, batch):
            if batch.step == 3 and what == "gradient":
                hidden_NBD.register_hook(lambda gradient: gradient * value)
            return BlockLossParts.gather(self, hidden_NBD, batch)

        def sum_up(self, *rows, batch, **keys):
            found = BlockLossParts.sum_up(self, *rows, batch=batch, **keys)
            add = value if batch.step == 3 and what == "loss" else 0.0
            return dataclasses.replace(found, loss_sum=found.loss_sum + add)

    monkeypatch.setattr(build, "BlockLossParts", Damaged)
    run = gpu_run(tmp_path, plan={"epochs": 1}, drafter={"dtype": dtype})
    if what == "row":
        pack_id = run.planner.step(3).uses[1].pack_id
        run.source.slots[pack_id][10, 1, 3] = value
    watcher = StateAtEachStep(run)
    run.trainer.hooks = (*run.trainer.hooks, watcher)
    result = run.fit()
    lines = run.lines("train")
    assert [line["step"] for line in lines if line["skipped"]] == [3]
    assert lines[3]["bad_rows"] == (what == "row")
    assert lines[3]["total_skipped_steps"] == result.counters.skipped_steps == 1
    before, after = watcher.states[2], watcher.states[3]
    for part in ("master", "exp_avg", "exp_avg_sq"):
        for name, tensor in getattr(before, part).items():
            assert torch.equal(tensor, getattr(after, part)[name]), (part, name)
    assert int(before.good_steps) == int(after.good_steps) == 3
    assert int(watcher.states[-1].good_steps) == result.step - 1
    assert all(torch.isfinite(weight).all() for weight in weights(run).values())


def test_losses_are_the_cpus(tmp_path: Path) -> None:
    lines = []
    for device in ("cpu", "cuda"):
        run = gpu_run(tmp_path / device, device=device, plan={"epochs": 8})
        assert run.schedule.num_steps >= 50
        run.fit()
        lines.append(run.lines("train"))
    for name, tolerance in (("loss", 1e-3), ("gradient_norm", 1e-2), ("total_anchors", 0), ("supervised_tokens", 0)):
        assert [line[name] for line in lines[1]] == pytest.approx([line[name] for line in lines[0]], rel=tolerance), name


@pytest.fixture(scope="module")
def leader(tmp_path_factory: pytest.TempPathFactory) -> Leader:
    return lead(tmp_path_factory.mktemp("leader"))


@pytest.mark.parametrize("graphs", ["off", "on"])
def test_bf16_steps_are_the_cpus_one_by_one(
    tmp_path: Path, leader: Leader, monkeypatch: pytest.MonkeyPatch, graphs: str
) -> None:
    """Flex attention, the fused pass, the row kernel, the kernel of the sums: launched, and replayed."""
    way = Way(device="cuda", passes="cuda", attention="flex", graphs=graphs)
    run, apart = leader.follow(tmp_path, way, monkeypatch=monkeypatch)
    (line,) = run.lines("warm_up")
    assert line["cuda_graphs"]["used"] == (graphs == "on")
    assert apart.steps >= 50
    assert apart.too_far == []
