"""What processes get of a machine that is made up: nodes, cores, threads, environments, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from launch_material import tiny_recipe

from slipstream.config import read_target_info, resolve_drafter
from slipstream.device import shared
from slipstream.device.gpus import GpuFacts
from slipstream.device.numa import Binding
from slipstream.errors import PlanError, PreflightError
from slipstream.launch import resources as module
from slipstream.launch.prediction import compare, write_memory
from slipstream.launch.resources import NOT_BOUND, Resources
from slipstream.plan import resolve_placement

GIB = 2**30
NODES = {"0000:3b:00.0": 0, "0000:af:00.0": 1}
CORES = {0: tuple(range(8)), 1: tuple(range(8, 16))}


@pytest.fixture
def resources(material: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the resources of a run on two sockets of eight cores, a GPU on each; `gpus` says which GPU each process has."""

    def binding(pci_id: str | None, *, allowed: Any) -> Binding | None:
        node = NODES.get(pci_id or "")
        return None if node is None else Binding(node=node, cores=tuple(sorted(set(CORES[node]) & set(allowed))))

    monkeypatch.setattr(module, "binding_of", binding)
    monkeypatch.setattr(module, "share_threads", lambda **given: SimpleNamespace(target=6, drafter=6))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def make(
        *, pci_ids: tuple[str | None, ...] = tuple(NODES), memory: int | None = 8 * GIB, device: str = "cuda", **changes: Any
    ) -> Resources:
        changes = {"placement__target_threads": None, "placement__drafter_threads": None, **changes}
        recipe = tiny_recipe(material, tmp_path, name="made-up", placement__mode="split", **changes)
        info = read_target_info(recipe.target.model)
        placement = resolve_placement(placement=recipe.placement, device=device, num_devices=len(pci_ids))  # type: ignore[arg-type]
        flight: Any = SimpleNamespace(
            recipe=recipe, info=info, shape=resolve_drafter(recipe=recipe, info=info), device=device, placement=placement
        )
        gpus = tuple(GpuFacts(index=i, name="NVIDIA H200", memory_bytes=memory, pci_id=p) for i, p in enumerate(pci_ids))
        return Resources(flight=flight, gpus=gpus if device == "cuda" else (), cores=tuple(range(16)))

    return make


def test_each_process_is_bound_to_its_gpu_s_node(resources: Any) -> None:
    made = resources()
    assert made.binding(role="target", index=0) == Binding(node=0, cores=CORES[0])
    assert made.binding(role="drafter", index=0) == Binding(node=1, cores=CORES[1])
    assert made.job_binding(role="drafter", index=0) == {"node": 1, "cores": list(range(8, 16))}
    assert made.describe_binding() == {"target-0": "node 0, cores 0-7", "drafter-0": "node 1, cores 8-15"}


def test_cores_of_a_node_are_shared_by_its_processes(resources: Any) -> None:
    assert [resources().threads(role=role, index=0) for role in ("target", "drafter")] == [6, 6]
    crowded = resources(pci_ids=("0000:3b:00.0", "0000:3b:00.0"))
    assert [crowded.threads(role=role, index=0) for role in ("target", "drafter")] == [4, 4]
    asked = resources(pci_ids=("0000:3b:00.0", "0000:3b:00.0"), placement__target_threads=6)
    assert asked.threads(role="target", index=0) == 6


def test_without_nodes_nothing_is_bound_and_that_is_said(resources: Any) -> None:
    made = resources(pci_ids=(None, None))
    assert made.binding(role="target", index=0) is None
    assert made.job_binding(role="target", index=0) is None
    assert set(made.describe_binding().values()) == {NOT_BOUND}
    assert made.threads(role="target", index=0) == 6


def test_environments_name_gpu_allocator_and_caches(resources: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    environment = resources().environment(role="drafter", index=0)
    assert environment["CUDA_VISIBLE_DEVICES"] == "1"
    assert environment["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert environment["TRITON_CACHE_DIR"] == str(tmp_path / "cache/slipstream/kernels/nvidia-h200/triton")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a, GPU-b")
    assert resources().environment(role="drafter", index=0)["CUDA_VISIBLE_DEVICES"] == "GPU-b"
    assert resources(device="cpu").environment(role="target", index=0) == {
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def test_what_a_gpu_cannot_hold_is_refused_and_an_unknown_size_is_told(
    resources: Any, caplog: pytest.LogCaptureFixture
) -> None:
    made = resources()
    made.check_memory(made.plan_memory(slots_per_column=2, validation_slots=0))
    small = resources(memory=GIB // 2)
    with pytest.raises(PlanError, match=r"GPU 0 has 0.5 GiB.*the biggest part is"):
        small.check_memory(small.plan_memory(slots_per_column=2, validation_slots=0))
    unknown = resources(memory=None)
    unknown.check_memory(unknown.plan_memory(slots_per_column=2, validation_slots=0))
    assert "does not say how large GPU 0, 1 is" in caplog.text


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_pools_that_fit_one_by_one_and_not_together_are_refused_before_anything_loads(
    resources: Any, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    made = resources(device=device, placement__drafter_ranks=2)
    memory = made.plan_memory(slots_per_column=3, validation_slots=1)
    largest = -(-memory.num_slots // 2) * memory.slot_nbytes
    monkeypatch.setattr(shared, "available_memory", lambda: largest)
    with pytest.raises(PreflightError, match=r"shared memory for slots = .*is more than the available memory"):
        made.check_memory(memory)
    monkeypatch.undo()
    made.check_memory(memory)
    monkeypatch.setattr(shared, "largest_file", lambda: largest - 1)
    with pytest.raises(PreflightError, match="ulimit -f"):
        made.check_memory(memory)
    monkeypatch.setattr(shared, "largest_file", lambda: largest)
    made.check_memory(memory)


def test_a_host_too_small_for_more_than_its_slots_is_refused_before_anything_loads(
    resources: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = resources()
    memory = made.plan_memory(slots_per_column=3, validation_slots=1)
    host = memory.host_of("split")
    assert host is not None
    assert host.peak_bytes > memory.host_slot_bytes
    monkeypatch.setattr(module, "available_memory", lambda: host.peak_bytes)
    made.check_memory(memory)
    monkeypatch.setattr(module, "available_memory", lambda: host.peak_bytes - 1)
    with pytest.raises(PlanError, match=r"GiB of host memory for the run, which needs .*: processes themselves 3\.0, "):
        made.check_memory(memory)
    elsewhere = Resources.of_another(made.flight, gpus=made.gpus)
    monkeypatch.setattr(shared, "available_memory", lambda: 1)
    elsewhere.check_memory(elsewhere.plan_memory(slots_per_column=3, validation_slots=1))


def test_the_prediction_is_written_and_put_beside_what_was_measured(resources: Any, tmp_path: Path) -> None:
    made = resources()
    plan, path = made.plan_memory(slots_per_column=2, validation_slots=0), tmp_path / "prediction.json"
    path.write_text(json.dumps({"throughput": {"tokens_per_second": 1.0}}))
    write_memory(path, plan=plan, placement=made.flight.placement)
    written = json.loads(path.read_text())
    assert written["throughput"] == {"tokens_per_second": 1.0}
    assert [(row["role"], row["rank"]) for row in written["memory"]] == [("target", 0), ("drafter", 0)]
    for row in (*written["memory"], written["host"]):
        assert row["bytes"] == sum(row["parts"].values())
    assert written["host"]["parts"]["slots"] == plan.host_slot_bytes
    planned = plan.of("split")[1]
    drafter = planned.peak_bytes
    taken = {"peak_bytes": drafter // 2, "reserved_bytes": 9, "outside_bytes": 8, "replayed": list(planned.replayed)}
    line = compare(path, "drafter-0", {"memory": taken})
    assert line == {"worker": "drafter-0", "role": "drafter", "rank": 0, "predicted_bytes": drafter, **taken}
    assert compare(path, "worker-0", {"memory": taken})["predicted_bytes"] is None


def test_a_prediction_is_that_of_the_stages_that_were_replayed(resources: Any, tmp_path: Path) -> None:
    made, path = resources(placement__cuda_graphs="auto"), tmp_path / "prediction.json"
    plan = made.plan_memory(slots_per_column=2, validation_slots=0)
    write_memory(path, plan=plan, placement=made.flight.placement)
    peaks = {process.replayed: process.peak_bytes for process in plan.alternatives if process.role == "drafter"}
    assert len(set(peaks.values())) == 2
    for replayed, nbytes in peaks.items():
        taken = {"peak_bytes": 5, "reserved_bytes": 9, "outside_bytes": 8, "replayed": replayed}
        assert compare(path, "drafter-0", {"memory": taken})["predicted_bytes"] == nbytes
