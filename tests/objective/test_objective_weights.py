"""Slot weights by hand-computed values, and denominators as the plan counts them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from slipstream.config.recipe import ObjectiveSection
from slipstream.objective import planned_denominator, slot_weights

DECAY = ObjectiveSection(weight="decay", decay_gamma=4.0)
DPACE = ObjectiveSection(weight="dpace", dpace_alpha=0.5)
SUPERVISED = torch.tensor([[False, True, True, True], [False, True, True, False], [False, False, False, False]])


def test_decay_is_the_papers_formula() -> None:
    weights = slot_weights(objective=DECAY, loss_NB=torch.rand(3, 4), supervised_NB=SUPERVISED)
    row = [0.0, 1.0, math.exp(-1 / 4), math.exp(-2 / 4)]
    wanted = torch.tensor([row, [*row[:3], 0.0], [0.0] * 4])
    torch.testing.assert_close(weights, wanted)


def test_dpace_is_the_papers_formula() -> None:
    q = torch.tensor([[0.5, 0.8, 0.2, 0.4], [0.5, 1.0, 0.0, 0.9], [0.1] * 4])
    weights = slot_weights(objective=DPACE, loss_NB=-q.log(), supervised_NB=SUPERVISED)
    a, b, c = 0.9, 0.9 * 0.6, 0.9 * 0.6 * 0.7
    wanted = torch.tensor([[0, a + b + c, b + c, c], [0, 1 + 0.5, 0.5, 0], [0, 0, 0, 0]])
    torch.testing.assert_close(weights, wanted)


@pytest.mark.parametrize("objective", [DECAY, DPACE])
def test_unsupervised_slots_weigh_nothing_whatever_their_loss(objective: ObjectiveSection) -> None:
    loss = torch.rand(3, 4, requires_grad=True)
    dirty = torch.where(SUPERVISED, loss, torch.tensor(float("nan")))
    weights = slot_weights(objective=objective, loss_NB=dirty, supervised_NB=SUPERVISED)
    assert torch.equal(weights, slot_weights(objective=objective, loss_NB=loss, supervised_NB=SUPERVISED))
    assert not weights[~SUPERVISED].any()
    assert not weights.requires_grad


def test_the_decay_denominator_is_the_sum_of_weights() -> None:
    counts = SUPERVISED.sum(dim=0).numpy()
    weights = slot_weights(objective=DECAY, loss_NB=torch.zeros(3, 4), supervised_NB=SUPERVISED)
    assert planned_denominator(objective=DECAY, supervised_per_slot=counts) == pytest.approx(float(weights.sum()))


def test_the_dpace_denominator_counts_slots_and_nothing_supervised_is_zero() -> None:
    assert planned_denominator(objective=DPACE, supervised_per_slot=[0, 5, 3, 1]) == 9.0
    for objective in (DECAY, DPACE):
        assert planned_denominator(objective=objective, supervised_per_slot=np.zeros(4, dtype=np.int64)) == 0.0
