"""What an exported drafter consists of: the keys and shapes of its weights, and its `config.json`, both ways.

The config is written by hand: servers read flat keys that transformers' own writer drops (`rope_theta`), and each reads
`block_size` and `mask_token_id` from another place, so they stand in both. Servers load a checkpoint with a missing or a
misnamed tensor without a word; therefore `check_state` and `check_config` are the only guard there is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import torch
from torch import Tensor

from slipstream.config import DrafterShape, TargetInfo
from slipstream.config.recipe import LayerType
from slipstream.errors import ExportError

ARCHITECTURE = "DFlashDraftModel"
LAYER_TYPES: Mapping[LayerType, str] = {"full": "full_attention", "sliding": "sliding_attention"}
FOREIGN_ROPE_KEYS = ("partial_rotary_factor", "mrope_section", "mrope_interleaved", "rope_dim", "text_config")
"""Keys of a target's rotation that no drafter of ours rotates by; a server that finds one rotates otherwise than we trained."""

assert set(LAYER_TYPES) == set(get_args(LayerType))


def expected_tensors(shape: DrafterShape) -> dict[str, tuple[int, ...]]:
    """Names and shapes of an exported drafter's tensors: 11 a layer and 3 more, no embedding, no head."""
    hidden, inner, head = shape.hidden_size, shape.intermediate_size, shape.head_dim
    queries, keys = shape.num_attention_heads * head, shape.num_key_value_heads * head
    layer = {
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "self_attn.q_norm.weight": (head,),
        "self_attn.k_norm.weight": (head,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    tensors: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, shape.num_taps * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    return tensors | {f"layers.{i}.{name}": size for i in range(shape.num_layers) for name, size in layer.items()}


def check_state(state: Mapping[str, Tensor], *, shape: DrafterShape, dtype: torch.dtype | None = None) -> None:
    """Raise `ExportError`, naming the key, unless `state` holds exactly the expected tensors: shapes, dtype, all finite.

    `dtype=None` accepts any one floating type, the same for all.
    """
    expected = expected_tensors(shape)
    for key in expected:
        if key not in state:
            raise ExportError(key=key, value=None, rule="is missing; servers would leave it uninitialised without an error")
    for key in state:
        if key not in expected:
            raise ExportError(key=key, value=tuple(state[key].shape), rule="is no tensor of this drafter", hint="unknown name")
    wanted = dtype or state["fc.weight"].dtype
    for key, size in expected.items():
        tensor = state[key]
        if tuple(tensor.shape) != size:
            raise ExportError(key=key, value=tuple(tensor.shape), rule=f"has the wrong shape, expected {size}")
        if tensor.dtype != wanted or not tensor.is_floating_point():
            raise ExportError(key=key, value=str(tensor.dtype), rule=f"has the wrong type, expected {wanted}")
        if not torch.isfinite(tensor).all():
            bad = int((~torch.isfinite(tensor)).sum())
            raise ExportError(key=key, value=f"{bad} of {tensor.numel()} entries", rule="are not finite")


def make_config(*, shape: DrafterShape, info: TargetInfo, dtype: str) -> dict[str, Any]:
    """The `config.json` of a drafter for the target `info`; `dtype` is that of the stored weights."""
    slides = "sliding" in shape.layer_types
    eos = list(info.eos_token_ids)
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "block_size": shape.block_size,
        "mask_token_id": shape.mask_token_id,
        "num_target_layers": shape.num_target_layers,
        "dflash_config": {
            "mask_token_id": shape.mask_token_id,
            "target_layer_ids": list(shape.tap_layers),
            "block_size": shape.block_size,
        },
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": shape.initializer_range,
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": False,
        "use_cache": True,
        "dtype": dtype,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "max_position_embeddings": shape.max_position_embeddings,
        "layer_types": [LAYER_TYPES[kind] for kind in shape.layer_types],
        "use_sliding_window": slides,
        "sliding_window": shape.sliding_window if slides else None,
        "max_window_layers": shape.num_layers,
        "bos_token_id": info.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "pad_token_id": info.pad_token_id,
    }


def check_config(config: Mapping[str, Any]) -> None:
    """Raise `ExportError`, naming the key, unless every server reads the config as the drafter was trained."""
    nested = _section(config, "dflash_config")
    if config.get("architectures") != [ARCHITECTURE]:
        raise ExportError(key="architectures", value=config.get("architectures"), rule=f"must be [{ARCHITECTURE!r}]")
    for key in ("block_size", "mask_token_id", "num_target_layers"):
        top = _integer(config, key)
        if nested.get(key, top) != top or (key != "num_target_layers" and key not in nested):
            raise ExportError(key=f"dflash_config.{key}", value=nested.get(key), rule=f"must equal the top-level one, {top}")
    _check_taps(nested.get("target_layer_ids"), num_target_layers=int(config["num_target_layers"]))
    if not 0 <= config["mask_token_id"] < _integer(config, "vocab_size"):
        rule = f"must be below the target's vocabulary of {config['vocab_size']}; servers do not resize embeddings"
        raise ExportError(key="mask_token_id", value=config["mask_token_id"], rule=rule)
    _check_rope(config)
    _check_layers(config)


def _check_taps(taps: Any, *, num_target_layers: int) -> None:
    key = "dflash_config.target_layer_ids"
    if not isinstance(taps, list) or not taps or not all(type(tap) is int for tap in taps):
        raise ExportError(key=key, value=taps, rule="must be a list of layer ids; servers guess when it is missing")
    if taps != sorted(set(taps)):
        raise ExportError(key=key, value=taps, rule="must be strictly ascending, as servers capture in layer order")
    if taps[0] < 0 or taps[-1] > num_target_layers - 2:
        rule = f"must lie in 0 to {num_target_layers - 2}: the last layer's output is not the same thing in every server"
        raise ExportError(key=key, value=taps, rule=rule)


def _check_rope(config: Mapping[str, Any]) -> None:
    theta, parameters = config.get("rope_theta"), _section(config, "rope_parameters")
    if not isinstance(theta, int | float) or theta <= 0:
        raise ExportError(key="rope_theta", value=theta, rule="must be written out; a missing one is taken as 10000")
    if parameters.get("rope_theta") != theta:
        raise ExportError(key="rope_parameters.rope_theta", value=parameters.get("rope_theta"), rule=f"must be {theta} too")
    if parameters.get("rope_type") != "default":
        raise ExportError(key="rope_parameters.rope_type", value=parameters.get("rope_type"), rule="must be 'default'")
    if config.get("rope_scaling") is not None:
        raise ExportError(key="rope_scaling", value=config["rope_scaling"], rule="must be null: drafters rotate unscaled")
    for key in FOREIGN_ROPE_KEYS:
        if key in config or key in parameters:
            place = key if key in config else f"rope_parameters.{key}"
            raise ExportError(
                key=place, value={**parameters, **config}[key], rule="must not be there: drafters rotate whole heads"
            )


def _check_layers(config: Mapping[str, Any]) -> None:
    types, count = config.get("layer_types"), _integer(config, "num_hidden_layers")
    if not isinstance(types, list) or len(types) != count:
        raise ExportError(key="layer_types", value=types, rule=f"must have one entry for each of the {count} layers")
    for kind in types:
        if kind not in LAYER_TYPES.values():
            raise ExportError(key="layer_types", value=kind, rule=f"must be one of {sorted(LAYER_TYPES.values())}")
    slides, window = "sliding_attention" in types, config.get("sliding_window")
    if slides is not bool(config.get("use_sliding_window")):
        value = config.get("use_sliding_window")
        raise ExportError(key="use_sliding_window", value=value, rule=f"must be {slides}; the window would be dropped")
    if slides is not (isinstance(window, int) and window > 0):
        rule = "must be the window in tokens" if slides else "must be null, since no layer slides"
        raise ExportError(key="sliding_window", value=window, rule=rule)
    if config.get("is_causal") is not None or "causal" in config["dflash_config"]:
        raise ExportError(
            key="is_causal", value=config.get("is_causal"), rule="must not be set: it overrides every layer's type"
        )


def normalised(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config of another writer (z-lab's, say) with every value in all the places where ours stand; nothing is guessed.

    What stands in two places is left as it is, so that a contradiction is found by `check_config`.
    """
    full = dict(config)
    nested = dict(full.get("dflash_config") or {})
    for key in ("block_size", "mask_token_id", "num_target_layers", "target_layer_ids"):
        if key in nested or key in full:
            nested.setdefault(key, full.get(key))
            full.setdefault(key, nested[key])
    full["dflash_config"] = nested
    parameters = dict(full.get("rope_parameters") or {"rope_type": "default"})
    if "rope_theta" in full or "rope_theta" in parameters:
        parameters.setdefault("rope_theta", full.get("rope_theta"))
        full.setdefault("rope_theta", parameters["rope_theta"])
    full["rope_parameters"] = parameters
    if full.get("layer_types") is None and not full.get("use_sliding_window") and type(full.get("num_hidden_layers")) is int:
        full["layer_types"] = ["full_attention"] * full["num_hidden_layers"]
    return full


def shape_from_config(raw: Mapping[str, Any]) -> DrafterShape:
    """The drafter that a config describes. Raises `ExportError` naming the key that is missing or unusable."""
    config = normalised(raw)
    check_config(config)
    kinds: dict[str, LayerType] = {name: kind for kind, name in LAYER_TYPES.items()}
    return DrafterShape(
        num_layers=_integer(config, "num_hidden_layers"),
        block_size=_integer(config, "block_size"),
        mask_token_id=_integer(config, "mask_token_id"),
        tap_layers=tuple(config["dflash_config"]["target_layer_ids"]),
        hidden_size=_integer(config, "hidden_size"),
        intermediate_size=_integer(config, "intermediate_size"),
        num_attention_heads=_integer(config, "num_attention_heads"),
        num_key_value_heads=_integer(config, "num_key_value_heads"),
        head_dim=_integer(config, "head_dim"),
        vocab_size=_integer(config, "vocab_size"),
        rms_norm_eps=float(_number(config, "rms_norm_eps")),
        rope_theta=float(config["rope_theta"]),
        max_position_embeddings=_integer(config, "max_position_embeddings"),
        layer_types=tuple(kinds[name] for name in config["layer_types"]),
        sliding_window=config["sliding_window"],
        num_target_layers=_integer(config, "num_target_layers"),
        initializer_range=float(_number(config, "initializer_range")),
    )


def _section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = config.get(key)
    if not isinstance(value, Mapping):
        raise ExportError(key=key, value=value, rule="must be a table")
    return value


def _integer(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if type(value) is not int:
        raise ExportError(key=key, value=value, rule="must be a whole number")
    return value


def _number(config: Mapping[str, Any], key: str) -> float:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ExportError(key=key, value=value, rule="must be a number")
    return value
