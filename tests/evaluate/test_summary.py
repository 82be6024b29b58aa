"""The figures of paths, by hand and against the `dflash` package's own reduction."""

from __future__ import annotations

import statistics

from slipstream.evaluate.summary import AcceptancePath, summarise


def test_figures_by_hand():
    paths = [
        AcceptancePath(lengths=(3, 1, 2), accepted=(2, 0, 2)),  # the last step is cut by the answer's end
        AcceptancePath(lengths=(4,), accepted=(3,)),
        AcceptancePath(lengths=(), accepted=()),
    ]
    found = summarise(paths, block_size=4)
    assert (found.requests, found.steps, found.tokens) == (3, 4, 10)
    assert found.tau_steps == 10 / 4
    assert found.tau_requests == (2 + 4) / 2
    # Slot 3 could be judged in three steps only: the step with two tokens to come has no third draft.
    assert found.slot_acceptance == (3 / 4, 3 / 4, 1 / 3)
    assert found.histogram == (0, 1, 1, 1, 1)


def test_the_request_mean_is_that_of_the_dflash_benchmark():
    paths = [AcceptancePath(lengths=lengths, accepted=(0,) * len(lengths)) for lengths in ((1, 5, 2), (3,), (2, 2, 2, 2))]
    expected = statistics.mean(statistics.mean(path.lengths) for path in paths)
    assert summarise(paths, block_size=5).tau_requests == expected


def test_nothing_to_report_is_none_and_not_zero():
    found = summarise([AcceptancePath(lengths=(), accepted=())], block_size=3)
    assert found.tau_steps is None
    assert found.tau_requests is None
    assert found.slot_acceptance == (None, None)


def test_a_drafter_that_is_always_right_has_acceptance_one_at_every_slot():
    found = summarise([AcceptancePath(lengths=(4, 4, 2), accepted=(3, 3, 2))], block_size=4)
    assert found.slot_acceptance == (1.0, 1.0, 1.0)
