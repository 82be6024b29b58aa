"""Stage 5 of 6: hidden states -> predictions for every slot of every block.

Waits for: a hidden pack that its transport verified. Unblocked by: the target. It hands nothing on before its step has run
backward; the slot is free when that is done, not when it is read.
"""

from collections.abc import Callable, Mapping

import torch

from slipstream.config import DrafterShape
from slipstream.device.sdpa import forbid_plans_by_shape
from slipstream.drafter.blocks import batch_to, embedding_rows, make_block_batch, place_batch, to_device
from slipstream.drafter.decode import DraftContext
from slipstream.drafter.dflash import DFlashDrafter
from slipstream.drafter.noise import add_noise, noise_std

FAMILIES: Mapping[str, Callable[..., DFlashDrafter]] = {"dflash": DFlashDrafter}
"""Drafter families by `drafter.type` of a recipe."""


def build_drafter(
    *, shape: DrafterShape, dtype: str, device: str, seed: int | None, attention: str, family: str = "dflash"
) -> DFlashDrafter:
    """A new drafter with weights from a seed, the same on every device. `dtype` is "bfloat16" or "float32".

    Without a seed its weights are left for the caller to load, and are anything until then: drawing takes seconds if they are
    many.
    `attention` is "auto" (flex on CUDA, SDPA on CPU), "sdpa" or "flex".
    """
    forbid_plans_by_shape(device)
    types = {"bfloat16": torch.bfloat16, "float32": torch.float32}
    drafter = FAMILIES[family](shape=shape, dtype=types[dtype], device=torch.device(device), attention=attention)
    if seed is not None:
        drafter.initialise(seed=seed)
    return drafter


__all__ = [
    "FAMILIES",
    "DFlashDrafter",
    "DraftContext",
    "add_noise",
    "batch_to",
    "build_drafter",
    "embedding_rows",
    "make_block_batch",
    "noise_std",
    "place_batch",
    "to_device",
]
