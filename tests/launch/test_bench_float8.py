"""The bench of float8 measures both types on the same weights and packs; its timing needs a GPU."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "target"))
from forward_tape import TapeRecorder, attention
from reference_kernels import exact_product, reference_kernels

from slipstream.errors import TargetError, UsageError
from slipstream.launch.bench import Ceilings, float8, target

CEILINGS = Ceilings(1.0, 1.0, 1.0)


class Clock:
    """Seconds that need no device."""

    seconds = 1.0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def tiny():
    return Qwen3Config(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=9,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=256,
    )


@pytest.fixture
def on_cpu(monkeypatch):
    """The measuring parts without a device: bfloat16 takes 300 ms a pack, float8 200."""
    times, timed = iter((300.0, 200.0)), []

    def time_works(works, *, repeats):
        timed.append(repeats)
        for work in works:
            work()
        median = next(times)
        return target._Timed(median=median, fastest=median, launch=median / 2, peak_gib=1.0, growth={})

    def kernels(*, hybrid, float8=False):
        product = (lambda *given: exact_product(*given).to(torch.bfloat16)) if float8 else None
        return replace(reference_kernels(), attention=attention, product=product)

    monkeypatch.setitem(target.TARGETS, "tiny", tiny)
    for module in (target, float8):
        monkeypatch.setattr(module, "DEVICE", "cpu")
        monkeypatch.setattr(module, "Clock", Clock)
    monkeypatch.setattr(target, "_time", time_works)
    monkeypatch.setattr(target, "cuda_kernels", kernels)
    monkeypatch.setattr(target, "profile_kernels", lambda work: ({}, {}))
    monkeypatch.setattr(target, "synchronises", lambda work: "never")
    monkeypatch.setattr(target, "CudaRecorder", lambda device, *, stage: TapeRecorder())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(float8, "product_tflops", lambda: 2.0)
    return timed


def test_both_types_are_measured_on_the_same_weights_and_packs(on_cpu, monkeypatch):
    monkeypatch.setattr(float8, "check_device", lambda device: None)
    said = []
    found = float8.measure_float8(shape="tiny", pack_tokens=512, ceilings=CEILINGS, layers=None, repeats=12, say=said.append)
    assert (found.bfloat16.layer_code, found.float8.layer_code) == ("fused", "fused, float8")
    assert (found.bfloat16.milliseconds, found.float8.milliseconds, found.speedup) == (300.0, 200.0, 1.5)
    assert found.bfloat16.matrix_parameters == found.float8.matrix_parameters
    assert found.float8.ratio == pytest.approx(1.5 * found.bfloat16.ratio)
    assert found.float8.taps == found.bfloat16.taps == (1, 2, 4, 5, 6)
    assert len(found.tap_errors) == 5
    assert all(0.01 < error < 0.5 for error in found.tap_errors)
    assert on_cpu == [4, 12]
    assert found.bfloat16.launch_milliseconds == 150.0
    assert [line.split(":")[0] for line in said if line.startswith("CUDA graphs")] == 2 * ["CUDA graphs are used"]
    assert all(run.graphs.used and run.graphs.recorded is not None for run in (found.bfloat16, found.float8))


def test_what_cannot_be_measured_is_refused_before_anything_is_built(on_cpu):
    with pytest.raises(TargetError, match="this is the CPU"):
        float8.measure_float8(shape="tiny", pack_tokens=512, ceilings=CEILINGS, layers=None, repeats=1, say=print)
    with pytest.raises(UsageError, match="must be one of"):
        target.build_subject(shape="x", pack_tokens=512, layers=None, say=print)
