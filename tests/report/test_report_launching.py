"""Launch-bound runs as an H200 really had them: named with numbers, the gain is what larger packs give, health stays silent."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from launched_run import Launched, launched
from planted_run import Plant, planted

from slipstream.report import findings_launch, findings_workers
from slipstream.report.measured import measure
from slipstream.report.reading import RunData
from slipstream.report.verdict import Verdict, judge


def kinds(verdict: Verdict) -> list[str]:
    return [finding.kind for finding in verdict.findings]


def test_launching_is_named_before_validation_and_both_are_told() -> None:
    verdict = judge(launched())
    assert kinds(verdict) == ["launch_bound", "slow_validation"]
    launch, validation = verdict.findings
    assert launch.sentence == (
        "worker-0 launches kernels for 29 ms (26 ms of it the target's) of the 32 ms that a step takes, "
        "its GPU works for 17 ms: the GPU waits for the CPU"
    )
    assert launch.change == {"plan.pack_tokens": 8192, "plan.pack_anchors": 2048}
    assert "placement.cuda_graphs did not cover the target in this run" in launch.advice
    assert 'placement.mode = "split"' in launch.advice
    assert launch.share_lost > validation.share_lost > 0.2
    assert verdict.headline.startswith(f"98.3K tokens/s: {launch.sentence}. Give the GPU more at once: plan.pack_tokens 4096")
    assert f"Besides, {validation.sentence} (worth +" in verdict.headline


def test_packs_twice_as_large_give_what_was_said() -> None:
    before, after = judge(launched()), judge(launched(Launched().larger(2)))
    assert before.tokens_per_second is not None
    assert after.tokens_per_second is not None
    real = after.tokens_per_second / before.tokens_per_second
    assert real > 1.4
    assert before.findings[0].predicted_gain is not None
    assert (1 + before.findings[0].predicted_gain) / real == pytest.approx(1, abs=0.10)


def test_two_processes_that_launch_give_what_was_said() -> None:
    """Target and drafter of the same costs, in a process each; a queue cannot bridge a validation."""
    plant = Launched()
    found = re.search(r'"split", up to \+(\d+) %', judge(launched(plant)).findings[0].advice)
    assert found is not None
    each = {"target": lambda pack: plant.target_launch, "use": lambda rank: plant.use_device, "once": plant.once_launch}
    split = judge(planted(Plant(
        columns=1, tokens=plant.tokens, steps=plant.steps, validate_every=plant.validate_every, validate=plant.validate, **each
    )))  # fmt: skip
    before = judge(launched(plant))
    assert split.tokens_per_second is not None
    assert before.tokens_per_second is not None
    real = split.tokens_per_second / before.tokens_per_second
    assert (1 + int(found[1]) / 100) / real == pytest.approx(1, abs=0.10)


def test_stages_that_overlap_in_one_process_cost_their_own_time_alone() -> None:
    """A target alone takes as long as it is launched, though its stage on the device is shorter; together they overlap."""
    measured = measure(launched())
    assert measured is not None
    assert measured.costs.target_seconds_per_pack == pytest.approx(0.0255, rel=0.01)
    assert measured.costs.drafter_seconds_per_use == pytest.approx(0.0135, rel=0.02)
    assert measured.costs.colocated_ratio == pytest.approx((25.5 + 13.5) / 31.8, rel=0.03)
    assert measured.paused == pytest.approx(0.23, abs=0.02)


def test_validation_that_costs_more_comes_first() -> None:
    verdict = judge(launched(validate=6.5))
    assert kinds(verdict) == ["slow_validation", "launch_bound"]
    assert "raise validation.every_steps from 208 to 416" in verdict.findings[0].advice
    assert "Raise validation.every_steps" in verdict.headline
    assert "Besides, worker-0 launches kernels for 29 ms" in verdict.headline


@pytest.mark.parametrize(("share", "found"), [(0.95, True), (1.05, False)])
def test_a_device_that_works_for_most_of_a_step_is_not_kept_waiting(share: float, found: bool) -> None:
    device = findings_launch.DEVICE_BUSY * share * 0.032
    run = launched(target_device=device - 0.0137)
    assert ("launch_bound" in kinds(judge(run))) is found


@pytest.mark.parametrize(("share", "found"), [(0.95, False), (1.05, True)])
def test_a_thread_that_does_something_else_is_not_bound_by_launching(share: float, found: bool) -> None:
    launching, wait = 0.0287, 0.0024
    rest = launching / (findings_launch.LAUNCHED * share) - launching - wait
    assert ("launch_bound" in kinds(judge(launched(rest=rest)))) is found


@pytest.mark.parametrize(("share", "found"), [(0.95, True), (1.05, False)])
def test_a_thread_that_waits_for_its_device_is_not_either(share: float, found: bool) -> None:
    part = findings_launch.DEVICE_WAIT * share
    assert ("launch_bound" in kinds(judge(launched(rest=0.0, wait=0.0287 * part / (1 - part))))) is found


@pytest.mark.parametrize("validate", [0.0, 40.0])
def test_a_device_that_limits_is_no_alarm(validate: float) -> None:
    """A larger model, launched as quickly: pauses in which the device idles are not held against launching."""
    verdict = judge(launched(steps=320, target_device=0.3, use_device=0.2, validate_every=100, validate=validate))
    assert kinds(verdict) == (["slow_validation"] if validate else ["balanced"])


def test_without_a_sample_outside_pauses_nothing_is_said_of_launching() -> None:
    """One validation after the other, less than a second apart: what kernels did in between is not known."""
    verdict = judge(launched(validate_every=10, validate=0.9))
    assert kinds(verdict) == ["slow_validation"]


def test_why_nothing_was_replayed_is_told_as_warm_up_told_it() -> None:
    run = launched(target_launch=0.003, use_launch=0.028)
    why = {"used": False, "why": "this device cannot record launches"}
    launch = judge(replace(run, events=[{"kind": "warm_up", "cuda_graphs": why}])).findings[0]
    assert launch.kind == "launch_bound"
    assert "placement.cuda_graphs did not cover the drafter: this device cannot record launches" in launch.advice
    assert "cuda_graphs" not in judge(run).findings[0].advice
    hybrid = {"used": False, "why": "a pack is launched kernel by kernel, since its delta nets do"}
    of_target = judge(replace(launched(), events=[{"kind": "target_warm_up", "cuda_graphs": hybrid}])).findings[0]
    assert "placement.cuda_graphs did not cover the target: a pack is launched" in of_target.advice
    replayed = judge(replace(launched(), events=[{"kind": "target_warm_up", "cuda_graphs": {"used": True, "why": "so"}}]))
    assert "cuda_graphs" not in replayed.findings[0].advice


def test_recordings_that_the_recipe_forbids_are_advised_first() -> None:
    run = launched(use_launch=0.028)
    forbidden = replace(run, recipe={**run.recipe, "placement": {"mode": "colocated", "cuda_graphs": "off"}})
    before, after = judge(forbidden), judge(launched(target_launch=0.001, use_launch=0.001))
    launch = before.findings[0]
    assert launch.change == {"placement.cuda_graphs": "auto"}
    assert launch.advice.startswith('replay what is launched, placement.cuda_graphs "off" -> "auto"')
    assert "give the GPU more at once" in launch.advice
    assert launch.predicted_gain is not None
    assert before.tokens_per_second is not None
    assert after.tokens_per_second is not None
    assert (1 + launch.predicted_gain) * before.tokens_per_second / after.tokens_per_second == pytest.approx(1, abs=0.10)


def test_a_prediction_is_compared_over_the_time_that_it_is_of() -> None:
    """The table knows no pauses, a measured run does: either way like is compared with like."""
    run = launched()
    verdict = judge(run)
    assert verdict.steady_tokens_per_second == pytest.approx(4060 / 0.032, rel=0.01)
    assert verdict.prediction_error == pytest.approx(62_000 / (4060 / 0.032) - 1, abs=0.01)
    assert re.search(
        r"Outside validation and checkpoints it makes 12\d\.\dK; 62\.0K were predicted before the run from the table",
        verdict.headline,
    )
    measured = measure(run)
    assert measured is not None
    costs = {"pause_seconds_per_step": measured.costs.pause_seconds_per_step}
    known = replace(run, prediction={"throughput": {"tokens_per_second": measured.rate}, "stages": costs})
    assert judge(known).prediction_error == pytest.approx(0, abs=0.01)


def test_advice_on_validation_leaves_some() -> None:
    """As rare as costs what is aimed at, three in the run at least; where there are so few already, fewer prompts."""
    long = judge(launched(all_steps=100_000)).findings[1]
    every = long.change["validation.every_steps"]
    assert 1.9 / (every * 0.032 + 1.9) == pytest.approx(findings_workers.VALIDATION_AIM, rel=0.15)
    assert judge(launched(all_steps=1456)).findings[1].change == {"validation.every_steps": 416}
    few = judge(launched(all_steps=800)).findings[1]
    assert few.change == {"validation.max_prompts": 48}
    assert few.predicted_gain == pytest.approx(0.125, abs=0.02)


@pytest.mark.parametrize(
    "run",
    [
        launched(),
        launched(validate=6.5),
        launched(all_steps=800, validate=6.5),
        planted(Plant(checkpoint_every=5, checkpoint=0.5, target=lambda pack: 0.02)),
        planted(Plant(build=0.5, target=lambda pack: 0.05)),
        planted(Plant(target=lambda pack: 0.4)),
    ],
)  # fmt: skip
def test_no_sentence_begins_with_a_recipe_key(run: RunData) -> None:
    verdict = judge(run)
    assert not [finding.advice for finding in verdict.findings if "." in finding.advice.split()[0]]
    assert not re.search(r"\b[A-Z][a-z]+\.[a-z]+_", verdict.headline), verdict.headline
