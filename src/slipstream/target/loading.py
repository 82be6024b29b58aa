"""Loads a target from its local folder: only the layers that are needed, frozen; weights are made up only where asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from slipstream.config import TargetInfo
from slipstream.device.sdpa import forbid_plans_by_shape
from slipstream.errors import TargetError
from slipstream.target.dtypes import DTYPES
from slipstream.target.random_weights import random_model


def load_decoder(*, info: TargetInfo, dtype: str, device: str, num_layers: int | None = None) -> PreTrainedModel:
    """The decoder without a head, frozen; with `num_layers` only that many, and no final norm.

    The layers above are never read from disk. Raises `TargetError` when weights are missing or of another shape.
    """
    config = text_config(info.folder)
    if num_layers is not None:
        truncate_config(config, num_layers=num_layers)
    model = _load(AutoModel, info=info, config=config, dtype=dtype, device=device)
    if num_layers is not None and isinstance(getattr(model, "norm", None), nn.Module):
        model.norm = nn.Identity()
    return model


def load_full(*, info: TargetInfo, dtype: str, device: str = "cpu") -> PreTrainedModel:
    """The whole target with its head, frozen, for generation and the decode loop. Raises `TargetError` as `load_decoder`."""
    return _load(AutoModelForCausalLM, info=info, config=text_config(info.folder), dtype=dtype, device=device)


def decoder_layers(model: nn.Module, *, count: int) -> nn.ModuleList:
    """The decoder's own list of layers. Raises `TargetError` if there is not exactly one list of that length."""
    found = [child for child in model.children() if isinstance(child, nn.ModuleList) and len(child) == count]
    if len(found) != 1:
        raise TargetError(
            key="target.model",
            value=type(model).__name__,
            rule=f"has {len(found)} lists of {count} layers at its top, not one",
            hint="a decoder-only language model is needed",
        )
    return found[0]


def text_config(folder: Path) -> Any:
    """The language model's config of a target, without the vision or audio parts of a multi-modal one."""
    return AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config(decoder=True)


def truncate_config(config: Any, *, num_layers: int) -> None:
    """Cut a config down to its first layers, lists with an entry for each layer included (`layer_types` and the like)."""
    before = config.num_hidden_layers
    for name, value in config.to_dict().items():
        if "layer" in name and isinstance(value, list | tuple) and len(value) == before:
            setattr(config, name, list(value)[:num_layers])
    config.num_hidden_layers = num_layers


def _load(auto: Any, *, info: TargetInfo, config: Any, dtype: str, device: str) -> PreTrainedModel:
    forbid_plans_by_shape(device)
    # SDPA cannot cap attention logits (Gemma 2); the plain implementation can.
    attention = "eager" if getattr(config, "attn_logit_softcapping", None) else "sdpa"
    if info.weights == "random":
        return random_model(auto, config=config, dtype=DTYPES[dtype], device=device, attention=attention)
    placement = {} if device == "cpu" else {"device_map": {"": device}}
    with _quiet():
        try:
            model, report = auto.from_pretrained(
                info.folder,
                config=config,
                dtype=DTYPES[dtype],
                attn_implementation=attention,
                output_loading_info=True,
                local_files_only=True,
                **placement,
            )
        except (OSError, ValueError) as error:
            raise TargetError(key="target.model", value=str(info.folder), rule=f"cannot be loaded: {error}") from error
    for kind in ("missing_keys", "mismatched_keys"):
        if report[kind]:
            names = sorted(str(name) for name in report[kind])
            raise TargetError(
                key="target.model",
                value=str(info.folder),
                rule=f"{len(names)} weights are {kind.removesuffix('_keys')}, such as {names[0]}",
                hint="they would be random; is the folder complete and a decoder-only language model?",
            )
    frozen: PreTrainedModel = model.eval().requires_grad_(False)
    return frozen


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from reporting the layers that we leave out on purpose; we judge its report ourselves."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
