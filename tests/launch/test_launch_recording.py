"""Sizes of frame for a plan: every pack of it is held by one, with few enough blocks; and what a run is told of the choice."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from launch_material import tiny_recipe
from test_launch_planning import planned

from slipstream.config import Recipe, read_target_info, resolve_drafter
from slipstream.device.graph_choice import GraphReport, StepTimes
from slipstream.launch import recording
from slipstream.launch.planning import slot_layout
from slipstream.launch.recording import frame_sizes, plan_sizes, record_target
from slipstream.target.frame import FrameSize
from slipstream.target.graphs import crowded_pack, full_pack
from slipstream.target.huggingface import load_target
from slipstream.target.isolation import pack_documents
from slipstream.target.layouts import chunk_indices


@pytest.fixture
def recipe(material: dict[str, str], tmp_path: Path) -> Recipe:
    return tiny_recipe(material, tmp_path, name="recorded", validation__prompts=material["prompts"])


def test_every_pack_of_a_plan_is_held_by_a_size(recipe: Recipe) -> None:
    plan = planned(recipe)
    sizes = plan_sizes(recipe=recipe, plan=plan)
    packs = [plan.pack(pack_id) for pack_id in range(plan.schedule.num_packs)] + [item.pack for item in plan.validation]
    used = set()
    for pack in packs:
        used.add(next(size for size in sizes if size.holds(pack.cu_seqlens(), num_tokens=pack.num_tokens)))
    assert used == set(sizes), "none is recorded for nothing"
    assert {size.longest for size in sizes} == {128}, "blocks of queries are not shorter"


def test_sizes_follow_from_documents_and_padding() -> None:
    rng = np.random.default_rng(3)
    pack_tokens = 1024
    packs = []
    for longest in (20, 90, 700):
        for _ in range(30):
            lengths = rng.integers(1, longest + 1, size=300)
            lengths = lengths[: int(np.searchsorted(np.cumsum(lengths), rng.integers(0, pack_tokens), side="right"))]
            documents = [np.zeros(length, dtype=np.int32) for length in lengths]
            packs.append(pack_documents(documents, capacity_tokens=pack_tokens))
    sizes = frame_sizes(
        num_documents=np.array([pack.num_documents for pack in packs]),
        num_tokens=np.array([pack.num_tokens for pack in packs]),
        longest_document=max(int(np.diff(pack.starts).max(initial=0)) for pack in packs),
        pack_tokens=pack_tokens,
    )
    assert [size.num_sequences for size in sizes] == [16, 32, 64, 128]
    assert {size.longest for size in sizes} <= {640, 768}
    for pack in packs:
        assert any(size.holds(pack.cu_seqlens(), num_tokens=pack.num_tokens) for size in sizes)
    example = full_pack(pack_tokens, longest=sizes[0].longest, vocab_size=100)
    assert all(size.holds(example.cu_seqlens(), num_tokens=pack_tokens) for size in sizes)


def test_no_pack_of_as_many_documents_has_more_chunks_than_the_crowded_one() -> None:
    rng = np.random.default_rng(5)
    for num_documents in (1, 2, 7, 60):
        crowded = crowded_pack(1024, num_documents=num_documents, vocab_size=99)
        assert (crowded.num_documents, crowded.num_tokens) == (num_documents, 1024)
        most = len(chunk_indices(crowded.cu_seqlens()))
        assert most == num_documents + (1024 - num_documents) // 64
        for _ in range(50):
            borders = np.sort(rng.choice(np.arange(1, 1024), size=num_documents - 1, replace=False))
            assert len(chunk_indices(np.array([0, *borders, 1024], dtype=np.int32))) <= most
    assert crowded_pack(128, num_documents=500, vocab_size=99).num_documents == 128


def test_a_target_that_is_launched_meets_its_largest_pack_in_warm_up(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    info = read_target_info(recipe.target.model)
    shape = resolve_drafter(recipe=recipe, info=info)
    plan = planned(recipe)
    most = max(plan.pack(number).num_documents for number in range(plan.schedule.num_packs + len(plan.validation)))
    target = load_target(info=info, dtype="float32", tap_layers=shape.tap_layers)
    captured: list[int] = []
    monkeypatch.setattr(recording, "consider_recording", lambda target, **keys: GraphReport(used=False, why="because"))
    monkeypatch.setattr(recording, "CudaRecorder", lambda device, **stages: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(target, "capture", lambda pack, **slot: captured.append(len(chunk_indices(pack.cu_seqlens()))))
    layout = slot_layout(recipe=recipe, shape=shape, info=info)
    record_target(target, recipe=recipe, plan=plan, layout=layout, device="cuda")
    (chunks,) = captured
    assert chunks == most + 1 + (128 - most - 1) // 64
    packs = [plan.pack(number) for number in range(plan.schedule.num_packs + len(plan.validation))]
    assert chunks >= max(len(chunk_indices(pack.cu_seqlens())) for pack in packs)


@pytest.mark.parametrize(("longest", "rounded"), [(1, 128), (128, 128), (129, 256), (4000, 4096), (4090, 4096)])
def test_the_longest_document_is_rounded_up_within_the_pack(longest: int, rounded: int) -> None:
    (size,) = frame_sizes(num_documents=np.array([3]), num_tokens=np.array([4096]), longest_document=longest, pack_tokens=4096)
    assert size == FrameSize(num_sequences=16, longest=rounded)


def test_a_line_of_metrics_tells_the_choice_and_a_cpu_makes_none(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    info = read_target_info(recipe.target.model)
    shape = resolve_drafter(recipe=recipe, info=info)
    layout = slot_layout(recipe=recipe, shape=shape, info=info)
    target = load_target(info=info, dtype="float32", tap_layers=shape.tap_layers)
    plan = planned(recipe, start_step=7)
    assert record_target(target, recipe=recipe, plan=plan, layout=layout, device="cpu") is None
    asked = {}

    def considered(given, **keys):
        asked.update(keys, target=given)
        return GraphReport(used=True, why="because", plain=StepTimes(0.02, 0.021), recorded=StepTimes(0.001, 0.004), nbytes=9)

    monkeypatch.setattr(recording, "consider_recording", considered)
    monkeypatch.setattr(recording, "CudaRecorder", lambda device, **stages: ("recorder", device))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    line = record_target(target, recipe=recipe, plan=plan, layout=layout, device="cuda")
    assert line is not None
    assert {key: line[key] for key in ("kind", "step")} == {"kind": "target_warm_up", "step": 7}
    assert line["cuda_graphs"] == {
        "used": True,
        "why": "because",
        "plain": {"launch_seconds": 0.02, "step_seconds": 0.021},
        "recorded": {"launch_seconds": 0.001, "step_seconds": 0.004},
        "nbytes": 9,
    }
    assert asked["target"] is target
    assert (asked["wish"], asked["pack_tokens"], asked["slot_dtype"]) == ("auto", 128, torch.float32)
    assert asked["sizes"] == plan_sizes(recipe=recipe, plan=plan)
    assert asked["recorder"] == ("recorder", torch.device("cuda", 0))
