"""The pipeline bench on a CPU: both stages tiny, streams that do everything at once; and how many layers it takes."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "trainer"), str(TESTS / "transport")]

from model_lanes import CountedWork, ModelLanes  # noqa: E402
from staged_harness import OPERATIONS, STREAMS  # noqa: E402

from slipstream.launch.bench import SHAPES, pipeline  # noqa: E402
from slipstream.launch.bench.standing_plan import PipelineWork  # noqa: E402
from slipstream.launch.bench.target import mixed_pack, qwen36_27b  # noqa: E402
from slipstream.transport.device_inline import Berth  # noqa: E402
from slipstream.transport.operations import device_slots  # noqa: E402

SHAPE = dataclasses.replace(
    SHAPES["smollm2"], hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    vocab_size=300, mask_token_id=299, block_size=8, num_layers=2, layer_types=("full",) * 2,
)  # fmt: skip
WORK = PipelineWork(pack_tokens=256, anchors=32, packs=4, rounds=2, chunk_rows=128)


class RandomTarget:
    """Notes which packs it made; hidden states are random."""

    def __init__(self) -> None:
        self.made: list[int] = []

    def capture(self, pack, *, hidden_TKD):
        self.made.append(pack.pack_id)
        hidden_TKD.normal_()


def berths(layout, count):
    slots = device_slots(layout, count, operations=OPERATIONS, device=torch.device("cpu"))
    parts = [[torch.zeros(1, dtype=torch.int64) for _ in range(3)] for _ in slots]
    event = STREAMS.event
    return [Berth(slot, *memory, packed=event(), checked=event()) for slot, memory in zip(slots, parts, strict=True)]


class OneCompile:
    """Stands for counts of a GPU that the turns of its measurement let grow."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def so_far(self):
        return {"triton compiles": 1}


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch):
    gpu = SimpleNamespace(open=lambda: SimpleNamespace(streams=STREAMS, operations=OPERATIONS, berths=berths))
    monkeypatch.setattr(pipeline, "Gpu", gpu)
    monkeypatch.setattr(pipeline, "CudaLanes", lambda device: ModelLanes())
    monkeypatch.setattr(pipeline, "CudaWork", lambda device: CountedWork())
    monkeypatch.setattr(pipeline, "Growth", OneCompile)
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 2**30)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    packs = [mixed_pack(WORK.pack_tokens, vocab_size=SHAPE.mask_token_id, seed=seed) for seed in (0, 1)]
    return pipeline._build(target=RandomTarget(), shape=SHAPE, work=WORK, packs=packs, device=torch.device("cpu"))


def test_every_turn_trains_and_the_figures_follow_from_the_times(rig) -> None:
    said: list[str] = []
    for number in (1, 3):
        rig.target.made.clear()
        work = dataclasses.replace(WORK, replays=number)
        found = pipeline._measure(rig, work=work, say=said.append)
        alone = (1 + work.rounds) * work.packs
        new = alone + 1 + number - 1 + 1  # a turn more that forbids waiting, the packs before the first, one ahead
        assert len(rig.target.made) == alone + new
        assert max(rig.target.made) == new - 1
        assert found.replays == number
        total = found.target_milliseconds + number * found.drafter_milliseconds
        assert found.ratio == pytest.approx(total / found.together_milliseconds)
        assert found.trained_tokens_per_second == pytest.approx(number * found.unique_tokens_per_second)
        one_use = found.target_milliseconds + found.drafter_milliseconds
        assert found.gain_bound == pytest.approx(one_use / (total / number))
        assert found.ratio == pytest.approx(found.gain / found.gain_bound)
        assert (found.growth, found.skipped_steps, found.synchronised) == ({"triton compiles": 1}, 0, "never")
    assert len(said) == 6


def test_a_target_is_cut_to_what_memory_holds() -> None:
    shape, work = SHAPES["qwen3.6-27b"], PipelineWork()

    def layers(gib: float) -> int:
        return pipeline.layers_that_fit(shape=shape, config=qwen36_27b(), work=work, free_bytes=int(gib * 2**30))

    assert layers(139) == 62
    assert layers(79) in range(24, 48, 4)
    assert layers(10) == shape.num_taps + 1
