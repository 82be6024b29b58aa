"""What steps are worth: by hand for one use, forgotten once read, and in every line of a built run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from built_run import SHAPE, Built, make_recipe

from slipstream.plan.flops import drafter_flops
from slipstream.records import Pack, Use
from slipstream.trainer.worth import DeviceMemory, GpuWork, StepWorths


def made_pack() -> Pack:
    """Documents of 60 and 40 tokens in a row of 128."""
    return Pack(
        pack_id=4,
        epoch=0,
        column=0,
        slot=0,
        document_ids=np.arange(2),
        starts=np.array([0, 60, 100], dtype=np.int32),
        token_ids=np.zeros(128, dtype=np.int32),
        position_ids=np.zeros(128, dtype=np.int32),
        loss_mask=np.ones(128, dtype=np.bool_),
    )


def made_use(step: int, *, number: int = 0) -> Use:
    return Use(
        step=step,
        pack_id=4,
        use_number=number,
        anchors=np.array([10, 59, 60, 99, 0, 0], dtype=np.int32),
        anchor_valid=np.array([True, True, True, True, False, False]),
        supervised_per_slot=np.array([0, 4, 3, 2]),
        is_last=False,
    )


def worths(work: GpuWork | None) -> StepWorths:
    return StepWorths(shape=SHAPE, token_room=256, anchor_room=12, mixing=[0.1, 0.2, 0.3, 0.4], work=work)


def expected_flops() -> float:
    size = SHAPE.block_size
    visible = sum(seen + size for seen in (10, 59, 0, 39)) * size  # the third anchor begins its document
    return drafter_flops(shape=SHAPE, tokens=100, anchors=4, visible_pairs=visible, rows=9)


def test_work_is_added_up_by_step_and_forgotten_once_read() -> None:
    found = worths(GpuWork(peak_flops=1e12, target_flops=lambda pack: 7e6 * pack.num_tokens))
    found.prepared(made_pack(), made_use(2), num_rows=9)
    found.prepared(made_pack(), made_use(2, number=1), num_rows=9)
    found.prepared(made_pack(), made_use(3), num_rows=9)
    worth = found.of(2)
    assert worth.useful_flops == pytest.approx(2 * expected_flops() + 7e8)  # the target runs once
    assert (worth.token_room, worth.anchor_room, worth.mixing, worth.peak_flops) == (256, 12, 0.3, 1e12)
    assert found.of(2).useful_flops is None
    found.prepared(made_pack(), made_use(0), num_rows=9)
    assert found.of(3).useful_flops == pytest.approx(expected_flops() + 7e8)
    assert found._flops == {}


def test_shares_of_the_peak_where_it_is_known(tmp_path: Path) -> None:
    known = Built(tmp_path / "known", make_recipe(), work=GpuWork(peak_flops=1e12, target_flops=None))
    known.fit()
    for line in known.lines("train"):
        assert line["useful_tflops_per_second"] > 0
        assert line["mfu"] == pytest.approx(line["useful_tflops_per_second"])
    unknown = Built(tmp_path / "unknown", make_recipe(), work=GpuWork(peak_flops=None, target_flops=None))
    unknown.fit()
    assert {line["mfu"] for line in unknown.lines("train")} == {None}
    assert min(line["useful_tflops_per_second"] for line in unknown.lines("train")) > 0
    silent = Built(tmp_path / "silent", make_recipe())
    silent.fit()
    assert {line["useful_tflops_per_second"] for line in silent.lines("train")} == {None}


def test_every_line_of_a_run_has_fills_and_mixing(tmp_path: Path) -> None:
    recipe = make_recipe()
    run = Built(tmp_path, recipe)
    run.fit()
    lines = run.lines("train")
    room = recipe.plan.packs_per_step * recipe.plan.pack_tokens
    for line in lines:
        assert line["token_fill"] == line["context_tokens"] / room
        assert 0 < line["anchor_fill"] <= 1
        assert line["mixing"] == pytest.approx(float(run.schedule.mixing[line["step"]]))
        assert "device_allocated_bytes" not in line
    assert len({line["token_fill"] for line in lines}) > 1


def test_memory_of_a_cpu_is_not_asked_for() -> None:
    assert DeviceMemory(torch.device("cpu")).metrics() == {}
