"""How much each slot of a block counts: pure functions of the losses of a block, and the denominators they are planned with.

Shape letters: N anchors · B block size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from slipstream.config.recipe import ObjectiveSection

NumberArray = npt.NDArray[np.int64] | Sequence[int]


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """`weigh` gives fp32 weights `[N, B]` without gradient; `denominator` what the plan's counts `[B]` are worth."""

    weigh: Callable[[torch.Tensor, torch.Tensor, ObjectiveSection], torch.Tensor]
    denominator: Callable[[NumberArray, ObjectiveSection], float]


def _decay_table(block_size: int, gamma: float) -> npt.NDArray[np.float64]:
    """`exp(-(k - 1) / gamma)` for slots 1 to B - 1, 0 for slot 0 (DFlash, arXiv 2602.06036)."""
    weights: npt.NDArray[np.float64] = np.exp(-(np.arange(block_size) - 1) / gamma)
    weights[0] = 0.0
    return weights


def _decay(loss_NB: torch.Tensor, supervised_NB: torch.Tensor, objective: ObjectiveSection) -> torch.Tensor:
    slot = torch.arange(loss_NB.shape[1], dtype=torch.float32, device=loss_NB.device)
    table = torch.exp((1.0 - slot) / objective.decay_gamma)
    return torch.where(supervised_NB, table, torch.zeros_like(table))


def _decay_denominator(counts_B: NumberArray, objective: ObjectiveSection) -> float:
    counts = np.asarray(counts_B, dtype=np.float64)
    return float(counts @ _decay_table(len(counts), objective.decay_gamma))


def _dpace(loss_NB: torch.Tensor, supervised_NB: torch.Tensor, objective: ObjectiveSection) -> torch.Tensor:
    """`w_j = sum over m >= j of prod over i <= m of q_i`, q smoothed by alpha, over supervised slots (arXiv 2605.18810)."""
    alpha = objective.dpace_alpha
    zero = torch.zeros((), device=loss_NB.device)
    confidence = torch.where(supervised_NB, (1.0 - alpha) * torch.exp(-loss_NB) + alpha, zero)
    reach = torch.zeros_like(confidence)
    reach[:, 1:] = confidence[:, 1:].cumprod(dim=1)
    return torch.where(supervised_NB, reach.flip(1).cumsum(dim=1).flip(1), zero)


def _count_denominator(counts_B: NumberArray, objective: ObjectiveSection) -> float:
    return float(np.sum(np.asarray(counts_B, dtype=np.float64)))


WEIGHTS: Mapping[str, WeightScheme] = {
    "decay": WeightScheme(weigh=_decay, denominator=_decay_denominator),
    "dpace": WeightScheme(weigh=_dpace, denominator=_count_denominator),
}
"""Every scheme by `objective.weight` of a recipe."""


def slot_weights(*, objective: ObjectiveSection, loss_NB: torch.Tensor, supervised_NB: torch.Tensor) -> torch.Tensor:
    """Weights fp32 `[N, B]` of all slots, without gradient; exactly 0 where not supervised, whatever the loss there is."""
    return WEIGHTS[objective.weight].weigh(loss_NB.detach(), supervised_NB, objective)


def planned_denominator(*, objective: ObjectiveSection, supervised_per_slot: NumberArray) -> float:
    """What a step's summed loss is divided by, from the plan's counts `[B]` over all columns: no collective is needed.

    For decay it is the sum of weights. Weights of "dpace" depend on the drafter, so there it is the number of supervised
    slots. Nothing supervised gives 0; the trainer divides by 1 then, and counts the step.
    """
    return WEIGHTS[objective.weight].denominator(supervised_per_slot, objective)
