"""From a step's record to a line of metrics."""

from __future__ import annotations

import mmap
from dataclasses import replace

import pytest

from slipstream.observe.metrics import StepRecord, StepWorth, process_memory_bytes, step_metrics

RECORD = StepRecord(
    step=7,
    epoch=1,
    loss_sum=30.0,
    weight_sum=12.0,
    hits_per_slot=(0.0, 6.0, 2.0, 0.0),
    supervised_per_slot=(0.0, 8.0, 8.0, 0.0),
    accepted_sum=7.0,
    anchors=10.0,
    bad_rows=0.0,
    context_tokens=1000.0,
    unique_tokens=600.0,
    gradient_norm=0.5,
    skipped=False,
    stop=False,
    learning_rate=1e-3,
    seconds=0.5,
)


def test_figures() -> None:
    line = step_metrics(RECORD, totals={"skipped_steps": 3})
    assert (line["kind"], line["step"], line["epoch"]) == ("train", 7, 1)
    assert line["loss"] == 2.5
    assert line["accuracy"] == 0.5
    assert line["accuracy_per_slot"] == [0.75, 0.25, None]
    assert line["acceptance_length"] == pytest.approx(1.7)
    assert (line["context_tokens_per_second"], line["supervised_tokens_per_second"]) == (2000, 32)
    assert line["anchors_per_second"] == 20
    assert (line["context_tokens"], line["unique_tokens"], line["supervised_tokens"]) == (1000, 600, 16)
    assert line["total_skipped_steps"] == 3
    assert line["memory_bytes"] > 1 << 20


def test_worth_of_a_step() -> None:
    worth = StepWorth(token_room=1250, anchor_room=40, mixing=0.125, useful_flops=3e12, peak_flops=24e12)
    line = step_metrics(RECORD, totals={}, worth=worth)
    assert (line["token_fill"], line["anchor_fill"], line["mixing"]) == (0.8, 0.25, 0.125)
    assert (line["useful_tflops_per_second"], line["mfu"]) == (6.0, 0.25)  # 3 TFLOP in half a second
    assert (line["unique_tokens_per_second"], line["context_tokens_per_second"]) == (1200, 2000)
    unknown = step_metrics(RECORD, totals={}, worth=replace(worth, peak_flops=None))
    assert (unknown["useful_tflops_per_second"], unknown["mfu"]) == (6.0, None)
    assert step_metrics(replace(RECORD, seconds=0.0), totals={}, worth=worth)["mfu"] is None


def test_nothing_supervised_gives_none_not_zero() -> None:
    empty = replace(RECORD, loss_sum=0.0, weight_sum=0.0, supervised_per_slot=(0.0,) * 4, hits_per_slot=(0.0,) * 4, anchors=0.0)
    line = step_metrics(empty, totals={})
    assert line["loss"] is None
    assert line["accuracy"] is None
    assert line["acceptance_length"] is None


def test_memory_is_that_of_this_process() -> None:
    with mmap.mmap(-1, 64 << 20) as block:  # not from the heap, which may have as much to give without growing
        before = process_memory_bytes()
        for page in range(0, len(block), mmap.PAGESIZE):
            block[page] = 1
        assert process_memory_bytes() > before + (48 << 20)
