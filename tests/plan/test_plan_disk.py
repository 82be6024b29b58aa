"""A schedule on disk comes back equal, and says which file is damaged."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from plan_corpora import make_corpus

from slipstream.config.recipe import PlanSection
from slipstream.errors import PlanError
from slipstream.plan import Schedule, make_schedule


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Schedule, Path]:
    """A schedule with replays, and its folder."""
    plan = PlanSection(pack_tokens=128, pack_anchors=32, packs_per_step=2, epochs=2, replays=2, replay_distance=10)
    schedule = make_schedule(index=make_corpus(lengths=[40] * 90).index(), plan=plan, block_size=4)
    schedule.save(tmp_path / "schedule")
    return schedule, tmp_path / "schedule"


def test_it_comes_back_equal(saved):
    schedule, folder = saved
    loaded = Schedule.load(folder)
    assert loaded.digest == schedule.digest
    assert loaded.plan == schedule.plan
    assert loaded.summary() == schedule.summary()
    assert np.array_equal(loaded.mixing, schedule.mixing)
    for name, array in schedule.arrays.named().items():
        assert np.array_equal(loaded.arrays.named()[name], array)
        assert loaded.arrays.named()[name].dtype == array.dtype
    schedule.save(folder)
    assert Schedule.load(folder).digest == schedule.digest


ARRAYS = {"document_ids", "pack_starts", "shares", "offsets", "pack_of_use", "use_number", "slot_of_pack", "mixing"}


@pytest.mark.parametrize("name", sorted(ARRAYS))
@pytest.mark.parametrize("damage", ["missing", "truncated", "flipped"])
def test_a_damaged_array_is_named(saved, name, damage):
    file = saved[1] / f"{name}.npy"
    content = bytearray(file.read_bytes())
    if damage == "missing":
        file.unlink()
    elif damage == "truncated":
        file.write_bytes(content[:-1])
    else:
        content[-1] ^= 1
        file.write_bytes(content)
    with pytest.raises(PlanError, match=damage if damage != "flipped" else "damaged") as refused:
        Schedule.load(saved[1])
    assert refused.value.key == str(file)


def test_a_damaged_index_is_named(saved):
    file = saved[1] / "schedule.json"
    whole = file.read_text()
    content = json.loads(whole)
    damaged = [
        whole[: len(whole) // 2],
        json.dumps([1]),
        json.dumps({key: value for key, value in content.items() if key != "checksums"}),
        json.dumps(content | {"plan": content["plan"] | {"seed": 1}}),
        json.dumps(content | {"block_size": 8}),
        json.dumps(content | {"fingerprint": "other"}),
        json.dumps(content | {"format": 99}),
    ]
    for text in damaged:
        file.write_text(text)
        with pytest.raises(PlanError) as refused:
            Schedule.load(saved[1])
        assert refused.value.key == str(file)
    file.unlink()
    with pytest.raises(PlanError, match="missing"):
        Schedule.load(saved[1])


def test_an_array_that_was_replaced_together_with_its_checksum_breaks_the_digest(saved):
    from slipstream.plan.schedule import array_checksum

    file = saved[1] / "shares.npy"
    other = np.load(file) + 1
    np.save(file, other)
    index = saved[1] / "schedule.json"
    content = json.loads(index.read_text())
    content["checksums"]["shares"] = array_checksum(other)
    index.write_text(json.dumps(content))
    with pytest.raises(PlanError, match="the digest says"):
        Schedule.load(saved[1])
