"""What Dynamo and Triton report is counted and named; arrays lie where kernels like them; slots refuse what does not fit."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from model_lanes import ModelLanes

from slipstream.trainer.late_work import CudaWork
from slipstream.trainer.metadata import ALIGNMENT_BYTES, ArrayLayout, MetadataRing


@pytest.fixture
def knobs(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Triton's knobs, with somebody listening already."""
    heard: list[str] = []
    device = {"num_device_alloc": 5, "num_alloc_retries": 0}
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda _: device)
    monkeypatch.setattr(torch.cuda, "host_memory_stats", lambda: {"num_host_alloc": 3})
    return SimpleNamespace(
        compilation=SimpleNamespace(listener=lambda **arguments: heard.append(arguments["src"].name)),
        autotuning=SimpleNamespace(listener=None),
        heard=heard,
    )


def test_compiles_and_tunings_are_counted_and_named(knobs: SimpleNamespace) -> None:
    work = CudaWork(torch.device("cuda"), knobs=knobs)
    first = knobs.compilation.listener
    try:
        torch.compile(lambda x: x + 1, backend="eager")(torch.zeros(3))
        knobs.compilation.listener(src=SimpleNamespace(name="_adamw"), cache_hit=False)
        knobs.autotuning.listener(fn=SimpleNamespace(__name__="_chunk"))
        counts = work.counts()
        assert counts["recompiles"] == 1
        assert counts["triton_compiles"] == counts["autotunes"] == 1
        assert (counts["device_allocations"], counts["pinned_allocations"]) == (5, 3)
        names = work.names()
        assert names[1:] == ["kernel _adamw", "kernel _chunk"]
        assert names[0].startswith("graph ")
        assert work.names() == []
        assert knobs.heard == ["_adamw"]  # who listened before still hears
    finally:
        work.close()
    assert knobs.compilation.listener is not first
    torch.compile(lambda x: x + 2, backend="eager")(torch.zeros(3))
    assert work.counts()["recompiles"] == 1


def arrays(length: int) -> dict[str, torch.Tensor]:
    return {
        "rows": torch.arange(length),
        "flags": torch.tensor([True, False, True]),
        "tiles": torch.full((1, 1, 3, 5), length, dtype=torch.int32),
        "embedding": torch.full((length, 3), -0.1, dtype=torch.bfloat16),
    }


def test_arrays_travel_whole_and_aligned() -> None:
    lanes = ModelLanes()
    ring = MetadataRing(lanes, layout=ArrayLayout.of(arrays(40)), num_slots=4)
    for length in (40, 7, 0, 33, 12, 40):
        sent = ring.send(ring.stage(arrays(length)))
        for name, array in arrays(length).items():
            assert torch.equal(sent[name], array), (length, name)
            offset = sent[name].storage_offset() * sent[name].element_size()
            assert offset % ALIGNMENT_BYTES == 0, name
        ring.used()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": torch.arange(41)}, "rows is int64"),
        ({"rows": torch.arange(4, dtype=torch.int32)}, "rows is int32"),
        ({"tiles": torch.zeros(1, 1, 3, 6, dtype=torch.int32)}, "tiles is"),
        ({"more": torch.zeros(1)}, "more"),
    ],
)
def test_what_does_not_fit_its_slot_is_refused(change: dict[str, torch.Tensor], message: str) -> None:
    ring = MetadataRing(ModelLanes(), layout=ArrayLayout.of(arrays(40)), num_slots=2)
    with pytest.raises(AssertionError, match=message):
        ring.stage(arrays(40) | change)


def test_more_uses_than_slots_are_refused() -> None:
    ring = MetadataRing(ModelLanes(), layout=ArrayLayout.of(arrays(4)), num_slots=2)
    ring.stage(arrays(4))
    ring.stage(arrays(4))
    with pytest.raises(AssertionError, match="more than 2 uses"):
        ring.stage(arrays(4))
