"""The target's frozen embedding and head, read straight from its weight files: two tensors, not a model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from slipstream.config import TargetInfo
from slipstream.errors import TargetError
from slipstream.target.dtypes import DTYPES
from slipstream.target.fingerprint import weight_files
from slipstream.target.random_weights import EMBEDDING, HEAD, random_end

EMBEDDINGS = (
    "model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
)
HEADS = ("lm_head.weight", "language_model.lm_head.weight")


@dataclass(frozen=True, slots=True)
class FrozenEnds:
    """What the drafter borrows of the target: `embedding_VD` and `head_VD`, one tensor when they are tied. No gradients.

    They lie on one device, unless the embedding was asked to stay in host memory.
    """

    embedding_VD: Tensor
    head_VD: Tensor


def load_frozen_ends(*, info: TargetInfo, dtype: str, device: str = "cpu", host_embedding: bool = False) -> FrozenEnds:
    """Read embedding and head `[V, D]` as `dtype`. Raises `TargetError` if they are missing, misshapen or ambiguous.

    With `host_embedding` an embedding that is not the head as well stays in host memory: where the file has its type, mapped
    from there, so that all processes of a host share its pages.
    """
    if info.weights == "random":
        return _random_ends(info, dtype=dtype, device=device, host_embedding=host_embedding)
    where = _locate(info.folder)
    embedding_name = next((name for name in EMBEDDINGS if name in where), None)
    head_name = next((name for name in HEADS if name in where), None)
    if embedding_name is None:
        raise _refused(info, rule=f"has no token embedding: none of {', '.join(EMBEDDINGS)}")
    embedding_VD = _read(where[embedding_name], embedding_name, info=info)
    if head_name is None and not info.tie_word_embeddings:
        raise _refused(info, rule=f"is not tied and has no head: none of {', '.join(HEADS)}")
    place = "cpu" if host_embedding and not info.tie_word_embeddings else device
    converted_VD = embedding_VD.to(device=place, dtype=DTYPES[dtype])
    if head_name is None:
        return FrozenEnds(embedding_VD=converted_VD, head_VD=converted_VD)
    head_VD = _read(where[head_name], head_name, info=info)
    if info.tie_word_embeddings:
        # Servers take the embedding of a tied model, transformers the second copy: the drafter could match only one of them.
        if not torch.equal(head_VD, embedding_VD):
            raise _refused(info, rule=f"is tied, but holds {head_name} with other values than {embedding_name}")
        return FrozenEnds(embedding_VD=converted_VD, head_VD=converted_VD)
    return FrozenEnds(embedding_VD=converted_VD, head_VD=head_VD.to(device=device, dtype=DTYPES[dtype]))


def _random_ends(info: TargetInfo, *, dtype: str, device: str, host_embedding: bool) -> FrozenEnds:
    """Those of the model that `loading` makes up, on the device, which draws otherwise than a CPU."""
    make = partial(random_end, vocab_size=info.vocab_size, hidden_size=info.hidden_size, dtype=DTYPES[dtype], device=device)
    embedding_VD = make(name=EMBEDDING)
    if info.tie_word_embeddings:
        return FrozenEnds(embedding_VD=embedding_VD, head_VD=embedding_VD)
    return FrozenEnds(embedding_VD=embedding_VD.cpu() if host_embedding else embedding_VD, head_VD=make(name=HEAD))


def _locate(folder: Path) -> dict[str, Path]:
    """The file of each tensor. Only headers are read."""
    where: dict[str, Path] = {}
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="pt") as tensors:
                where.update(dict.fromkeys(tensors.keys(), file))
        except SafetensorError as error:
            raise TargetError(key="target.model", value=str(file), rule=f"is damaged: {error}", hint="copy it again") from error
    return where


def _read(file: Path, name: str, *, info: TargetInfo) -> Tensor:
    with safe_open(file, framework="pt") as tensors:
        tensor: Tensor = tensors.get_tensor(name)
    if tensor.shape != (info.vocab_size, info.hidden_size):
        expected = [info.vocab_size, info.hidden_size]
        raise _refused(info, rule=f"{name} is {list(tensor.shape)}, config.json says {expected}")
    return tensor


def _refused(info: TargetInfo, *, rule: str) -> TargetError:
    return TargetError(key="target.model", value=str(info.folder), rule=rule)
