"""The bench's made-up step is one that the trainer trains on, and its FLOP are counted as its formula says."""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import pytest
import torch

from slipstream.drafter.dflash import PASSES
from slipstream.launch.bench import SHAPES, DrafterWork
from slipstream.launch.bench import drafter as bench
from slipstream.launch.bench.drafter_work import make_columns

TINY = dataclasses.replace(
    SHAPES["smollm2"], hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    vocab_size=300, mask_token_id=299,
)  # fmt: skip
WORK = DrafterWork(documents=2, document_tokens=128, anchors=64, packs=2, chunk_rows=256, steps=2)


class Clock:
    """Stands for a CUDA event on a machine without one."""

    def __init__(self, *, enable_timing: bool) -> None:
        self.at = 0.0
        assert enable_timing

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, other: Clock) -> float:
        return (other.at - self.at) * 1e3


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_step_trains_and_its_phases_add_up(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Clock)
    monkeypatch.setitem(PASSES, "cpu", PASSES[kind])  # type: ignore[arg-type]
    rig, tflop = bench._build(shape=TINY, work=WORK, device=torch.device("cpu"))
    losses = [float(rig.run()) for _ in range(6)]
    assert losses[-1] < losses[0]
    total, phases = rig.marks.medians()
    assert set(phases) == set(bench.PHASES)
    assert all(value > 0 for value in phases.values())
    assert sum(phases.values()) == pytest.approx(total, rel=0.3)
    assert tflop > 0


def test_useful_flop_of_the_issues_step() -> None:
    """27B shape, 2 x 2,048 tokens, 1,024 anchors: written out once more, number by number."""
    columns, tflop = make_columns(shape=SHAPES["qwen3.6-27b"], work=DrafterWork())
    anchors = columns[0].use.anchors.astype(np.float64)
    slots, tokens, hidden = 1024 * 16, 4096, 5120
    layer = slots * (2 * hidden * 4096 + 2 * hidden * 1024 + 3 * hidden * 17408) + tokens * 2 * hidden * 1024
    pairs = ((anchors % 2048) + 16).sum() * 16
    expected = 2 * (5 * 3 * (layer + 2 * pairs * 4096) + 2 * tokens * 5 * hidden**2 + 2 * 1024 * 15 * hidden * 248320)
    assert tflop == pytest.approx(expected / 1e12)
    assert 235 < tflop < 250
    assert columns[0].batch.num_rows == 1024 * 15
