"""Rejection sampling keeps the target's distribution, whatever the drafter proposes; options are applied as documented."""

from __future__ import annotations

import pytest
import torch

from slipstream.errors import UsageError
from slipstream.evaluate.sampling import Draft, Greedy, Sampled, Sampling, probabilities

V, ROUNDS = 5, 10_000


def chi_square(counts, expected):
    kept = expected > 0
    assert counts[~kept].sum() == 0
    return float((((counts - expected) ** 2)[kept] / expected[kept]).sum()), int(kept.sum()) - 1


@pytest.mark.parametrize(
    "options", [{"temperature": 1.0}, {"temperature": 0.6, "top_p": 0.8}, {"temperature": 1.3, "top_k": 3}]
)
def test_first_two_tokens_follow_the_target(options):
    """The first drafted place, and the second where the first stood, over 10,000 rounds: chi-square below mean + 4 sigma."""
    generator = torch.Generator().manual_seed(3)
    target_BV = torch.randn(3, V, generator=generator) * 1.5
    drafter_BV = torch.randn(2, V, generator=generator) * 1.5
    sampling = Sampling(**options)
    chooser = Sampled(sampling, generator=torch.Generator().manual_seed(0))
    first, second = torch.zeros(V), torch.zeros(V)
    for _ in range(ROUNDS):
        draft = chooser.draft(drafter_BV)
        verdict = chooser.verify(draft=draft, logits_BV=target_BV)
        tokens = [*draft.tokens[: verdict.accepted].tolist(), verdict.next_token]
        first[tokens[0]] += 1
        if len(tokens) > 1:
            second[tokens[1]] += 1
    p = probabilities(target_BV, sampling=sampling)
    for counts, expected in ((first, p[0]), (second, p[1])):
        statistic, freedom = chi_square(counts, expected * counts.sum())
        assert statistic < freedom + 4 * (2 * freedom) ** 0.5, (statistic, freedom)
    assert second.sum() > ROUNDS / 20


def test_the_statistic_sees_a_distribution_that_is_ten_percent_off():
    """The same statistic for draws from the wrong distribution is far outside."""
    p = torch.tensor([0.4, 0.3, 0.2, 0.05, 0.05])
    wrong = torch.multinomial(
        torch.tensor([0.44, 0.28, 0.18, 0.05, 0.05]), ROUNDS, True, generator=torch.Generator().manual_seed(0)
    )
    statistic, freedom = chi_square(torch.bincount(wrong, minlength=V).float(), p * ROUNDS)
    assert statistic > freedom + 4 * (2 * freedom) ** 0.5


def test_a_drafter_equal_to_the_target_is_always_accepted():
    logits_BV = torch.randn(4, V, generator=torch.Generator().manual_seed(1))
    chooser = Sampled(Sampling(temperature=1.0), generator=torch.Generator().manual_seed(0))
    for _ in range(200):
        assert chooser.verify(draft=chooser.draft(logits_BV[:3]), logits_BV=logits_BV).accepted == 3


def test_a_token_that_the_target_never_gives_never_stands():
    target_BV = torch.zeros(2, V)
    target_BV[:, 2] = -torch.inf
    chooser = Sampled(Sampling(temperature=1.0), generator=torch.Generator().manual_seed(0))
    draft = Draft(tokens=torch.tensor([2]), probs=torch.eye(V)[2:3])
    for _ in range(200):
        verdict = chooser.verify(draft=draft, logits_BV=target_BV)
        assert verdict.accepted == 0
        assert verdict.next_token != 2


def test_greedy_counts_the_leading_agreement_only():
    target_BV = torch.eye(V)[[1, 2, 3, 4]]
    verdict = Greedy().verify(draft=Draft(tokens=torch.tensor([1, 0, 3]), probs=None), logits_BV=target_BV)
    assert (verdict.accepted, verdict.next_token) == (1, 2)
    verdict = Greedy().verify(draft=Draft(tokens=torch.tensor([1, 2, 3]), probs=None), logits_BV=target_BV)
    assert (verdict.accepted, verdict.next_token) == (3, 4)


@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 0), (0.7, 0), (1.0, 2), (0.5, 4), (1e-6, 0), (1.0, 99)])
def test_probabilities_equal_the_dflash_packages(top_p, top_k):
    from dflash.model import _sampling_probs

    logits = torch.randn(6, V, generator=torch.Generator().manual_seed(2)) * 3
    ours = probabilities(logits, sampling=Sampling(temperature=0.7, top_p=top_p, top_k=top_k))
    torch.testing.assert_close(ours, _sampling_probs(logits, 0.7, top_p, top_k))


@pytest.mark.parametrize(
    "options", [{"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.0}, {"temperature": 1.0, "top_k": -1}]
)
def test_impossible_options_are_refused(options):
    with pytest.raises(UsageError, match="--t"):
        Sampling(**options)
