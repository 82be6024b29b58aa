"""What is read of a target's config.json, and the drafter that follows from it and the recipe."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from slipstream.config import find_target, make_recipe, read_target_info, resolve_drafter, resolve_mask_token, resolve_taps
from slipstream.config.target_info import spread_taps
from slipstream.errors import PreflightError

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"},
    "eos_token_id": [2, 3],
    "tie_word_embeddings": True,
}


def target(folder: Path, **changes: Any) -> str:
    config = {key: value for key, value in {**LLAMA, **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def drafter(model: str, **keys: Any) -> Any:
    section = {"mask_token_id": 3, "num_layers": 2, "block_size": 8, **keys}
    recipe = make_recipe({"name": "r", "target": {"model": model}, "corpus": {"path": "c"}, "drafter": section})
    return resolve_drafter(recipe=recipe, info=read_target_info(model))


@pytest.mark.parametrize(
    ("layers", "taps", "expected"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (64, 5, (1, 16, 31, 46, 61)),
        (30, 5, (1, 8, 14, 20, 27)),
        (36, 1, (18,)),
    ],
)
def test_spread_taps_are_those_of_dflash(layers: int, taps: int, expected: tuple[int, ...]) -> None:
    assert spread_taps(num_layers=layers, num_taps=taps) == expected


def test_spread_is_refused_where_layers_are_too_few(tmp_path: Path) -> None:
    info = read_target_info(target(tmp_path))
    assert resolve_taps(taps="spread", num_taps=5, info=info) == (1, 2, 3, 4, 5)
    with pytest.raises(PreflightError) as caught:
        resolve_taps(taps="spread", num_taps=6, info=info)
    assert (caught.value.key, caught.value.value) == ("target.num_taps", 6)
    assert "at most 5" in caught.value.hint


def test_the_last_layer_cannot_be_tapped(tmp_path: Path) -> None:
    info = read_target_info(target(tmp_path))
    assert resolve_taps(taps=(0, 6), num_taps=5, info=info) == (0, 6)
    with pytest.raises(PreflightError) as caught:
        resolve_taps(taps=(0, 7), num_taps=5, info=info)
    assert (caught.value.key, caught.value.value) == ("target.tap_layers", [0, 7])
    assert "0 to 6" in caught.value.hint


def test_info_is_what_the_file_says(tmp_path: Path) -> None:
    info = read_target_info(target(tmp_path))
    assert (info.hidden_size, info.num_layers, info.head_dim, info.rope_theta) == (64, 8, 16, 5000.0)
    assert info.eos_token_ids == (2, 3)
    assert info.tie_word_embeddings
    assert not info.is_hybrid


def test_generation_config_wins_for_stop_tokens(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert read_target_info(target(tmp_path)).eos_token_ids == (7,)


def test_nested_text_config_and_hybrids_are_read(tmp_path: Path) -> None:
    text = {**LLAMA, "model_type": "qwen3_5_text", "layer_types": ["linear_attention"] * 3 + ["full_attention"]}
    text |= {"num_hidden_layers": 4, "vocab_size": 248320}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5", "text_config": text}))
    info = read_target_info(str(tmp_path))
    assert info.is_hybrid
    assert info.num_layers == 4
    assert resolve_mask_token(mask_token_id=None, info=info) == 248070


def test_unknown_mask_tokens_are_asked_for(tmp_path: Path) -> None:
    info = read_target_info(target(tmp_path))
    with pytest.raises(PreflightError, match="required") as caught:
        resolve_mask_token(mask_token_id=None, info=info)
    assert caught.value.key == "drafter.mask_token_id"
    with pytest.raises(PreflightError, match="outside") as caught:
        resolve_mask_token(mask_token_id=256, info=info)
    assert caught.value.value == 256
    assert resolve_mask_token(mask_token_id=255, info=info) == 255


def test_known_families_bring_their_mask_token(tmp_path: Path) -> None:
    info = read_target_info(target(tmp_path, model_type="qwen3", vocab_size=151936))
    assert resolve_mask_token(mask_token_id=None, info=info) == 151669


@pytest.mark.parametrize("missing", ["model_type", "hidden_size", "num_hidden_layers", "vocab_size"])
def test_missing_keys_are_named(tmp_path: Path, missing: str) -> None:
    with pytest.raises(PreflightError) as caught:
        read_target_info(target(tmp_path, **{missing: None}))
    assert missing in caught.value.rule
    assert str(tmp_path / "config.json") == caught.value.value


def test_broken_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(PreflightError, match="cannot be read as JSON"):
        read_target_info(str(tmp_path))


def test_targets_are_found_in_the_local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(PreflightError) as caught:
        find_target("some/model")
    assert (caught.value.key, caught.value.value) == ("target.model", "some/model")
    for age, name in enumerate(["new", "old"]):
        snapshot = tmp_path / "models--some--model" / "snapshots" / name
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text("{}")
        os.utime(snapshot / "config.json", (1000 - age, 1000 - age))
    assert find_target("some/model").name == "new"


def test_drafter_takes_the_targets_dimensions(tmp_path: Path) -> None:
    shape = drafter(target(tmp_path))
    assert (shape.hidden_size, shape.intermediate_size, shape.vocab_size) == (64, 128, 256)
    assert (shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim) == (4, 2, 16)
    assert shape.tap_layers == (1, 2, 3, 4, 5)
    assert shape.num_target_layers == 8
    layer = 64 * 16 * (4 + 2 + 2 + 4) + 2 * 16 + 3 * 64 * 128 + 2 * 64
    assert shape.num_parameters == 2 * layer + 5 * 64 * 64 + 2 * 64


def test_drafter_dimensions_can_be_given(tmp_path: Path) -> None:
    shape = drafter(target(tmp_path), num_attention_heads=8, num_key_value_heads=4, head_dim=32, intermediate_size=96)
    assert (shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim, shape.intermediate_size) == (8, 4, 32, 96)


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "drafter.num_key_value_heads"),
        ({"head_dim": 15}, "drafter.head_dim"),
    ],
)
def test_impossible_drafters_are_refused(tmp_path: Path, keys: dict[str, int], key: str) -> None:
    with pytest.raises(PreflightError) as caught:
        drafter(target(tmp_path), **keys)
    assert caught.value.key == key
