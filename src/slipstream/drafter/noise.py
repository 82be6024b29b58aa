"""Noise on hidden states, as a regulariser: on the drafter's side, so that slots and seals stay clean.

Shape letters: T context tokens · K tapped layers · D hidden size.
"""

from __future__ import annotations

import numpy as np
import torch

from slipstream.config.recipe import ObjectiveSection


def noise_std(*, objective: ObjectiveSection, step: int, num_steps: int) -> float:
    """Relative standard deviation at a step: linear from `noise_std` to `noise_end_std` over `noise_ratio` of all steps."""
    share = min(1.0, step / max(1.0, objective.noise_ratio * num_steps))
    return objective.noise_std + (objective.noise_end_std - objective.noise_std) * share


def add_noise(hidden_TKD: torch.Tensor, *, std: float, seed: int, pack_id: int, use_number: int) -> torch.Tensor:
    """Hidden states plus Gaussian noise of `std` times the root mean square of each token's tap; 0 returns them unchanged.

    The draw depends on (seed, pack, use) and the kind of device alone, so a resumed run repeats it. The scale is taken
    for each token and tap: a token with massive activations would drown all others in a scale shared by the tap.
    """
    if std == 0.0:
        return hidden_TKD
    generator = torch.Generator(device=hidden_TKD.device)
    generator.manual_seed(int(np.random.SeedSequence((seed, pack_id, use_number)).generate_state(1, np.uint64)[0]) >> 1)
    draw = torch.randn(hidden_TKD.shape, generator=generator, device=hidden_TKD.device, dtype=torch.float32)
    scale = hidden_TKD.float().square().mean(dim=-1, keepdim=True).sqrt() * std
    return (hidden_TKD.float() + draw * scale).to(hidden_TKD.dtype)
