"""Every rule of the layout refuses what breaks it, and names the key."""

from __future__ import annotations

import copy

import pytest
import torch

from slipstream.errors import ExportError
from slipstream.export.layout import check_config, check_state, expected_tensors, make_config, normalised, shape_from_config


@pytest.fixture
def config(shape, info):
    return make_config(shape=shape, info=info, dtype="bfloat16")


def test_names_and_shapes_are_those_of_the_drafter(shape, state_of):
    expected = expected_tensors(shape)
    assert {key: tuple(tensor.shape) for key, tensor in state_of(shape).items()} == expected
    assert len(expected) == 11 * shape.num_layers + 3
    assert sum(torch.Size(size).numel() for size in expected.values()) == shape.num_parameters


def test_five_layers_are_58_tensors(shape_with):
    assert len(expected_tensors(shape_with(num_layers=5, layer_types=("full",) * 5))) == 58


def test_config_stands_in_every_place_that_servers_read(config, shape):
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["model_type"] == "qwen3"
    for key in ("block_size", "mask_token_id"):
        assert config[key] == config["dflash_config"][key] == getattr(shape, key)
    assert config["dflash_config"]["target_layer_ids"] == [1, 3, 5]
    assert config["num_target_layers"] == 8
    assert config["rope_theta"] == 100000.0
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 100000.0}
    assert config["layer_types"] == ["full_attention"] * 2
    assert (config["use_sliding_window"], config["sliding_window"]) == (False, None)
    assert config["tie_word_embeddings"] is False
    assert config["eos_token_id"] == 2
    check_config(config)


def test_a_config_read_back_is_the_shape(config, shape):
    assert shape_from_config(config) == shape


def test_sliding_layers_write_their_window_and_no_causality(shape_with, info):
    sliding = shape_with(layer_types=("sliding", "full"), sliding_window=40)
    config = make_config(shape=sliding, info=info, dtype="bfloat16")
    assert config["layer_types"] == ["sliding_attention", "full_attention"]
    assert (config["use_sliding_window"], config["sliding_window"]) == (True, 40)
    assert "is_causal" not in config
    assert "causal" not in config["dflash_config"]
    assert shape_from_config(config) == sliding


def test_several_stop_tokens_are_a_list_and_none_is_null(shape, info_with):
    assert make_config(shape=shape, info=info_with(eos_token_ids=(2, 5)), dtype="float32")["eos_token_id"] == [2, 5]
    assert make_config(shape=shape, info=info_with(eos_token_ids=()), dtype="float32")["eos_token_id"] is None


BROKEN = {
    "architecture of the target": ("architectures", ["Qwen3ForCausalLM"], "architectures"),
    "block sizes differ": ("block_size", 16, r"dflash_config\.block_size"),
    "no block size": ("block_size", None, "block_size"),
    "mask tokens differ": ("dflash_config.mask_token_id", 4, r"dflash_config\.mask_token_id"),
    "no nested mask token": ("dflash_config.mask_token_id", ..., r"dflash_config\.mask_token_id"),
    "no number of target layers": ("num_target_layers", ..., "num_target_layers"),
    "no taps": ("dflash_config.target_layer_ids", ..., "target_layer_ids"),
    "unsorted taps": ("dflash_config.target_layer_ids", [3, 1, 5], "ascending"),
    "a tap twice": ("dflash_config.target_layer_ids", [1, 1, 5], "ascending"),
    "the last layer": ("dflash_config.target_layer_ids", [1, 3, 7], "last layer"),
    "a negative tap": ("dflash_config.target_layer_ids", [-1, 3, 5], "0 to 6"),
    "mask beyond the vocabulary": ("vocab_size", 3, "mask_token_id"),
    "no theta": ("rope_theta", ..., "rope_theta"),
    "no nested theta": ("rope_parameters.rope_theta", ..., r"rope_parameters\.rope_theta"),
    "thetas differ": ("rope_parameters.rope_theta", 10000.0, r"rope_parameters\.rope_theta"),
    "another rotation": ("rope_parameters.rope_type", "yarn", "rope_type"),
    "scaled rotation": ("rope_scaling", {"factor": 2.0}, "rope_scaling"),
    "partial rotation": ("rope_parameters.partial_rotary_factor", 0.25, "partial_rotary_factor"),
    "partial rotation on top": ("partial_rotary_factor", 0.25, "partial_rotary_factor"),
    "multimodal rotation": ("rope_parameters.mrope_section", [1, 2, 3], "mrope_section"),
    "a layer type missing": ("layer_types", ["full_attention"], "layer_types"),
    "an unknown layer type": ("layer_types", ["full_attention", "linear_attention"], "layer_types"),
    "a window that would be dropped": ("layer_types", ["full_attention", "sliding_attention"], "use_sliding_window"),
    "a window for nobody": ("sliding_window", 40, "sliding_window"),
    "causality for all layers": ("is_causal", True, "is_causal"),
    "nested causality": ("dflash_config.causal", False, "is_causal"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_config_is_refused(case, config):
    path, value, message = BROKEN[case]
    broken = copy.deepcopy(config)
    place = broken
    *parents, last = path.split(".")
    for parent in parents:
        place = place[parent]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    with pytest.raises(ExportError, match=message):
        check_config(broken)


def test_sliding_without_a_window_is_refused(config):
    broken = config | {"layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": True}
    with pytest.raises(ExportError, match="sliding_window"):
        check_config(broken)


def test_a_published_config_that_names_things_once_is_understood(config, shape):
    """The form of the first published drafters: block size on top, mask token nested, theta flat, no layer types."""
    published = copy.deepcopy(config)
    del published["mask_token_id"], published["dflash_config"]["block_size"], published["rope_parameters"]
    del published["layer_types"]
    assert shape_from_config(published) == shape
    assert "target_layer_ids" not in normalised({"dflash_config": {}})["dflash_config"], "what nobody wrote is not guessed"


def broken_states():
    def drop(state):
        del state["layers.1.self_attn.k_norm.weight"]

    def add(state):
        state["lm_head.weight"] = torch.zeros(2, 2)

    def prefix(state):
        state["model.norm.weight"] = state.pop("norm.weight")

    def reshape(state):
        state["fc.weight"] = state["fc.weight"][:, :-1]

    def transpose(state):
        state["layers.0.mlp.up_proj.weight"] = state["layers.0.mlp.up_proj.weight"].T

    def nan(state):
        state["layers.0.mlp.up_proj.weight"][3, 4] = float("nan")

    def infinite(state):
        state["hidden_norm.weight"][0] = float("inf")

    def dtype(state):
        state["norm.weight"] = state["norm.weight"].double()

    def whole_numbers(state):
        for key in state:
            state[key] = state[key].int()

    return {
        drop: r"layers\.1\.self_attn\.k_norm\.weight.*missing",
        add: r"lm_head\.weight.*no tensor",
        prefix: r"norm\.weight.*missing",
        reshape: r"fc\.weight.*shape",
        transpose: r"layers\.0\.mlp\.up_proj\.weight.*shape",
        nan: r"layers\.0\.mlp\.up_proj\.weight = '1 of \d+ entries'.*not finite",
        infinite: r"hidden_norm\.weight.*not finite",
        dtype: r"norm\.weight.*type",
        whole_numbers: r"type",
    }


@pytest.mark.parametrize(("damage", "message"), broken_states().items(), ids=lambda value: getattr(value, "__name__", ""))
def test_a_broken_state_is_refused(damage, message, shape, state_of):
    state = {key: tensor.clone() for key, tensor in state_of(shape).items()}
    check_state(state, shape=shape)
    damage(state)
    with pytest.raises(ExportError, match=message):
        check_state(state, shape=shape)


def test_a_state_in_another_type_than_asked_is_refused(shape, state_of):
    with pytest.raises(ExportError, match=r"torch\.float32.*torch\.bfloat16"):
        check_state(state_of(shape), shape=shape, dtype=torch.bfloat16)
