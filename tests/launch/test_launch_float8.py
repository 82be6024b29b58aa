"""Whole runs with eight-bit slots: the same bits in both placements, other weights than without, no resume across the two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from launch_material import tiny_recipe
from safetensors.torch import load_file

from slipstream.config import Recipe
from slipstream.errors import CheckpointError
from slipstream.launch.local import train_run
from slipstream.launch.preflight import preflight
from slipstream.trainer.checkpoint import latest

KEYS: dict[str, Any] = {
    "target__dtype": "bfloat16",
    "plan__replays": 2,
    "plan__replay_distance": 10,
    "placement__slot_dtype": "float8_e4m3",
    "plan__max_steps": 14,
}


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    folder = latest(run / "checkpoints")
    assert folder is not None
    return load_file(folder / "weights.safetensors")


def trained(recipe: Recipe) -> dict[str, torch.Tensor]:
    return weights_of(train_run(flight=preflight(recipe)).folder)


def test_placements_agree_bit_for_bit_and_the_type_of_slots_decides_the_weights(
    material: dict[str, str], tmp_path: Path
) -> None:
    split = trained(tiny_recipe(material, tmp_path, name="split", **KEYS))
    colocated = trained(tiny_recipe(material, tmp_path, name="colocated", placement__mode="colocated", **KEYS))
    assert split.keys() == colocated.keys()
    assert all(torch.equal(split[name], colocated[name]) for name in split)
    plain_keys = {**KEYS, "placement__slot_dtype": "target", "placement__mode": "colocated"}
    plain = trained(tiny_recipe(material, tmp_path, name="plain", **plain_keys))
    assert not all(torch.equal(split[name], plain[name]) for name in split)
    changed = tiny_recipe(material, tmp_path, name="split", **{**KEYS, "placement__slot_dtype": "target"})
    with pytest.raises(CheckpointError, match=r"placement\.slot_dtype = 'target': .*started with float8_e4m3"):
        train_run(flight=preflight(changed, resume=True))
