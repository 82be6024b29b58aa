"""The loss of a batch of blocks written as plainly as possible: fp32, all logits at once, loops over blocks. For tests.

Shape letters: N anchors · B block size · D hidden · V vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F

from slipstream.config.recipe import ObjectiveSection
from slipstream.objective.block_loss import BlockLoss


def reference_loss(
    *,
    hidden_NBD: torch.Tensor,
    head_VD: torch.Tensor,
    labels_NB: torch.Tensor,
    supervised_NB: torch.Tensor,
    anchor_valid_N: torch.Tensor,
    objective: ObjectiveSection,
) -> BlockLoss:
    """What `block_loss` must return, differentiable in `hidden_NBD`."""
    blocks, size = supervised_NB.shape
    logits = hidden_NBD.float() @ head_VD.float().t()
    loss_NB = F.cross_entropy(logits.flatten(0, 1), labels_NB.flatten(), reduction="none").view(blocks, size)
    hit_NB = logits.argmax(dim=-1) == labels_NB
    loss_sum, weight_sum, accepted = hidden_NBD.float().sum() * 0, torch.zeros(()), 0
    hits, supervised = torch.zeros(size), supervised_NB.sum(dim=0).float()
    for n in range(blocks):
        slots = [k for k in range(1, size) if supervised_NB[n, k]]
        weights = _weights([math.exp(-float(loss_NB[n, k].detach())) for k in slots], objective)
        run = True
        for k, weight in zip(slots, weights, strict=True):
            loss_sum = loss_sum + weight * loss_NB[n, k]
            weight_sum = weight_sum + weight
            hits[k] += float(hit_NB[n, k])
            run = run and bool(hit_NB[n, k])
            accepted += run
    return BlockLoss(
        loss_sum=loss_sum,
        weight_sum=weight_sum,
        hits_per_slot=hits,
        supervised_per_slot=supervised,
        accepted_sum=torch.tensor(float(accepted)),
        anchors=anchor_valid_N.sum().float(),
    )


def _weights(confidences: list[float], objective: ObjectiveSection) -> list[float]:
    """Weights of a block's supervised slots, the first being slot 1, from the probabilities given to their labels."""
    if objective.weight == "decay":
        return [math.exp(-place / objective.decay_gamma) for place in range(len(confidences))]
    smoothed = [(1 - objective.dpace_alpha) * q + objective.dpace_alpha for q in confidences]
    reach = [math.prod(smoothed[: m + 1]) for m in range(len(smoothed))]
    return [sum(reach[j:]) for j in range(len(reach))]
