"""Made-up weights for rehearsals of a placement: a target of true shape with no weight file, made on the device in seconds.

Every tensor is drawn from a generator of its own, seeded by its name: the same on every process and at every restart, for
one kind of device, and the same whether the model is whole or cut.

Shape letters: V vocabulary · D hidden size.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SEED = 0
SPREAD = 0.02
"""Standard deviation of matrices, as most models start with."""
DRAWN_AT_ONCE = 1 << 26
"""Values drawn in fp32 before they are rounded to the weight's type."""
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"


def random_model(auto: Any, *, config: Any, dtype: torch.dtype, device: str, attention: str) -> PreTrainedModel:
    """A model of the config with drawn matrices on `device`; vectors such as norms are as transformers starts them."""
    with torch.random.fork_rng(devices=_devices(device)), torch.device(device):
        model: PreTrainedModel = auto.from_config(config, dtype=dtype, attn_implementation=attention)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            fill(weight, name=name.removeprefix("model."))
    frozen: PreTrainedModel = model.eval().requires_grad_(False)
    return frozen


def random_end(*, name: str, vocab_size: int, hidden_size: int, dtype: torch.dtype, device: str) -> Tensor:
    """The embedding or the head `[V, D]` of a random model, without the rest of it."""
    end_VD = torch.empty(vocab_size, hidden_size, dtype=dtype, device=device)
    fill(end_VD, name=name)
    return end_VD


def fill(weight: Tensor, *, name: str) -> None:
    """Draw a matrix from its name; of the vectors only the decay rates of linear attention, the others are constants."""
    flat = weight.detach().view(-1)
    if weight.dim() < 2 and not name.endswith("A_log"):
        return
    generator = torch.Generator(device=weight.device)
    generator.manual_seed(int.from_bytes(hashlib.sha256(f"{SEED} {name}".encode()).digest()[:8]))
    for start in range(0, len(flat), DRAWN_AT_ONCE):
        part = flat[start : start + DRAWN_AT_ONCE]
        drawn = torch.empty(len(part), dtype=torch.float32, device=weight.device)
        if weight.dim() < 2:
            drawn.uniform_(1, 16, generator=generator).log_()
        else:
            drawn.normal_(std=SPREAD, generator=generator)
        part.copy_(drawn)


def _devices(device: str) -> list[torch.device]:
    """The GPU whose generator must be left as it was; none on a CPU."""
    if torch.device(device).type == "cpu":
        return []
    return [torch.device("cuda", torch.cuda.current_device())]
