"""The verdict on runs with a planted cause: it is named, its gain is what the advised change gives, and health stays silent."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from planted_run import Plant, planted

from slipstream.report import findings, findings_launch, findings_workers
from slipstream.report.findings import Finding, percent, thousands
from slipstream.report.reading import RunData
from slipstream.report.verdict import Verdict, judge


def kinds(verdict: Verdict) -> list[str]:
    return [finding.kind for finding in verdict.findings]


def first(run: RunData, kind: str) -> Finding:
    verdict = judge(run)
    assert verdict.findings[0].kind == kind, (kinds(verdict), verdict.headline)
    return verdict.findings[0]


def gained(before: Plant, **changes: Any) -> float:
    """What a change gives when it is really made."""
    old, new = judge(planted(before)), judge(planted(before, **changes))
    assert old.tokens_per_second is not None
    assert new.tokens_per_second is not None
    return new.tokens_per_second / old.tokens_per_second - 1


def within_ten_percent(predicted: float | None, real: float) -> bool:
    """Predicted and real speed differ by a tenth at most."""
    assert predicted is not None
    return abs((1 + predicted) / (1 + real) - 1) <= 0.10


def test_a_healthy_run_has_nothing_to_say() -> None:
    verdict = judge(planted(Plant(use=lambda rank: 0.09)))
    assert kinds(verdict) == ["balanced"]
    assert verdict.findings[0].predicted_gain is None
    assert "keep pace" in verdict.headline
    assert verdict.tokens_per_second == pytest.approx(1000 / 0.1, rel=0.05)


def test_a_slow_target_is_named_and_more_targets_give_what_was_said() -> None:
    plant = Plant(target=lambda pack: 0.4, devices=4)
    finding = first(planted(plant), "target_bound")
    assert finding.numbers["wait_input"] == pytest.approx(1 - 0.22 / 0.8, abs=0.02)
    assert finding.share_lost == pytest.approx(finding.numbers["wait_input"] / 2)
    assert finding.change == {"placement.mode": "split", "placement.drafter_ranks": 1, "placement.target_workers": 3}
    assert "3 + 1 is predicted to give" in finding.advice
    real = gained(plant, targets=3)
    assert real > 1
    assert within_ten_percent(finding.predicted_gain, real)


def test_a_slow_drafter_is_named_and_more_ranks_give_what_was_said() -> None:
    plant = Plant(use=lambda rank: 0.4, columns=3, devices=4)
    finding = first(planted(plant), "drafter_bound")
    assert finding.change["placement.drafter_ranks"] == 3
    assert finding.numbers["wait_slot"] == pytest.approx(1 - 0.3 / 1.22, abs=0.02)
    assert within_ten_percent(finding.predicted_gain, gained(plant, ranks=3))


def test_the_same_devices_colocated_may_be_the_better_choice() -> None:
    plant = Plant(target=lambda pack: 0.2, use=lambda rank: 0.1)
    finding = first(planted(plant), "target_bound")
    assert finding.change == {"placement.mode": "colocated", "placement.drafter_ranks": 2}
    assert within_ten_percent(finding.predicted_gain, gained(plant, colocated=True, ranks=2))


def test_bursts_are_named_and_a_deeper_queue_gives_what_was_said() -> None:
    plant = Plant(target=lambda pack: 1.0 if pack % 10 == 0 else 0.02, use=lambda rank: 0.15, once=0.01, steps=200)
    finding = first(planted(plant), "sawtooth")
    assert finding.numbers["longest_pack"] == pytest.approx(1.0, rel=0.01)
    ahead = finding.change["plan.ahead_packs"]
    assert ahead > 2
    real = gained(plant, ahead=ahead)
    assert real > 0.2
    assert within_ten_percent(finding.predicted_gain, real)


def test_targets_that_are_kept_by_something_else_starve_the_drafters() -> None:
    plant = Plant(target=lambda pack: 0.05, odd_target_seconds=0.4)
    finding = first(planted(plant), "starvation")
    assert "in load" in finding.sentence
    assert within_ten_percent(finding.predicted_gain, gained(plant, odd_target_seconds=0.0))


def test_a_slow_loader_is_named_and_targets_that_wait_for_it_are_a_consequence() -> None:
    plant = Plant(build=0.5, target=lambda pack: 0.05)
    finding = first(planted(plant), "slow_loader")
    assert finding.numbers["build_seconds"] == pytest.approx(0.5, rel=0.05)
    assert kinds(judge(planted(plant))) == ["slow_loader", "back_pressure"]
    assert within_ten_percent(finding.predicted_gain, gained(plant, build=0.01))


def test_a_rank_that_is_late_is_named_and_evening_it_out_gives_what_was_said() -> None:
    plant = Plant(ranks=2, columns=4, target=lambda pack: 0.02, use=lambda rank: 0.3 if rank == 1 else 0.1)
    assert kinds(judge(planted(plant))) == ["rank_imbalance", "back_pressure"]
    finding = first(planted(plant), "rank_imbalance")
    assert finding.sentence.startswith("drafter-1 works")
    assert within_ten_percent(finding.predicted_gain, gained(plant, use=lambda rank: 0.1))


def test_checkpoints_that_stall_are_named_and_fewer_of_them_give_what_was_said() -> None:
    plant = Plant(checkpoint_every=5, checkpoint=0.5, target=lambda pack: 0.02)
    finding = first(planted(plant), "checkpoint_stalls")
    assert finding.numbers["checkpoint"] == pytest.approx(0.5 / (0.5 + 5 * 0.22), abs=0.02)
    every = finding.change["checkpoint.every_steps"]
    assert within_ten_percent(finding.predicted_gain, gained(plant, checkpoint_every=every, steps=4 * every))


def test_validation_that_takes_too_long_is_named() -> None:
    plant = Plant(validate_every=10, validate=1.0, target=lambda pack: 0.02)
    finding = first(planted(plant), "slow_validation")
    every = finding.change["validation.every_steps"]
    assert within_ten_percent(finding.predicted_gain, gained(plant, validate_every=every, steps=4 * every))


def test_launching_that_outlasts_the_device_is_named() -> None:
    """The thread launches for 0.22 s, the device works for half of it; packs twice as large launch half as much a token."""
    plant = Plant(gpu=True, launch=1.0, colocated=True, ranks=1, target=lambda pack: 0.05, use=lambda rank: 0.05)
    finding = first(planted(plant), "launch_bound")
    assert finding.numbers["device_seconds"] == pytest.approx(0.11, rel=0.05)
    assert finding.predicted_gain == pytest.approx(1.0, abs=0.05)
    assert finding.change["plan.pack_tokens"] == 2048
    assert kinds(judge(planted(replace(plant, launch=0.1)))) == ["balanced"]


def test_compiling_after_warm_up_is_named_by_what_was_compiled() -> None:
    plant = Plant(late=(50, 60, 70), late_seconds=3.0, target=lambda pack: 0.02)
    verdict = judge(planted(plant))
    finding = next(found for found in verdict.findings if found.kind == "recompiles")
    assert "graph 1/0 (dynamo)" in finding.sentence
    assert finding.numbers["seconds"] == pytest.approx(9.0, rel=0.05)
    assert within_ten_percent(finding.predicted_gain, gained(plant, late=(), late_seconds=0.0))


def test_damaged_packs_are_named_whatever_they_cost() -> None:
    """Two damaged packs cost next to nothing; the headline has them behind the cause that costs, or alone."""
    lines = [{"kind": "rejected_seals", "step": 50, "worker": "drafter-0", "rejected": 2, "packs": [100, 101]}]
    run = planted(Plant(target=lambda pack: 0.3, devices=2))
    verdict = judge(replace(run, events=lines))
    assert kinds(verdict) == [*kinds(judge(run)), "rejected_seals"]
    finding = verdict.findings[-1]
    assert 0 < finding.share_lost < 0.01
    assert "packs 100, 101" in finding.sentence
    assert verdict.headline == f"{judge(run).headline}. {finding.sentence}"
    alone = judge(replace(planted(), events=lines))
    assert kinds(alone) == ["rejected_seals"]
    assert alone.headline.count("drafter-0 refused packs") == 1


def test_a_target_that_died_is_named_and_judged_by_the_time_that_it_was_there() -> None:
    plant = Plant(target=lambda pack: 0.3, devices=2, died_at=100)
    verdict = judge(planted(replace(plant, restart_seconds=40.0)))
    assert kinds(verdict) == ["target_bound", "restarts"], "not starved by a target that does something else"
    found = verdict.findings[-1]
    assert found.numbers["seconds"] == pytest.approx(40.0)
    assert verdict.shares["target-0"]["load"] > 0.3
    assert verdict.headline.endswith(f". Besides, {found.sentence}")
    assert "target-0 died and was started again, once in all: 40.00 s of loading" in found.sentence


@pytest.mark.parametrize(
    ("threshold", "kind", "plant"),
    [
        ("findings.WAITS", "target_bound", lambda wait: Plant(target=lambda pack: 0.11 / (1 - wait), devices=2)),
        ("findings.WAITS", "drafter_bound", lambda wait: Plant(target=lambda pack: 0.11 * (1 - wait))),
        ("findings_workers.LOADER", "slow_loader", lambda wait: Plant(target=lambda pack: 0.02, build=0.22 / (1 - wait))),
        (
            "findings_workers.IMBALANCE",
            "rank_imbalance",
            lambda late: Plant(ranks=2, target=lambda pack: 0.02, use=lambda rank: 0.1 + rank * 0.12 * late / (1 - late)),
        ),
        (
            "findings_workers.PAUSE",
            "checkpoint_stalls",
            lambda share: Plant(target=lambda pack: 0.02, checkpoint_every=1, checkpoint=0.22 * share / (1 - share)),
        ),
        (
            "findings_workers.VALIDATION",
            "slow_validation",
            lambda share: Plant(target=lambda pack: 0.02, validate_every=1, validate=0.22 * share / (1 - share)),
        ),
        (
            "findings_workers.RECOMPILES",
            "recompiles",
            lambda share: Plant(target=lambda pack: 0.02, late=(40,), late_seconds=120 * 0.22 * share / (1 - share)),
        ),
    ],
)
def test_a_finding_begins_at_its_threshold(threshold: str, kind: str, plant: Callable[[float], Plant]) -> None:
    """A tenth under it nothing is said, a tenth over it is."""
    module, name = threshold.split(".")
    value = getattr({"findings": findings, "findings_workers": findings_workers}[module], name)
    assert kind not in kinds(judge(planted(plant(value * 0.9))))
    assert kind in kinds(judge(planted(plant(value * 1.1))))


def test_gaps_between_kernels_are_seen_by_the_driver_alone() -> None:
    """Stages timed by events cover their gaps: the device seems busy throughout, NVML says how much of it was work."""
    plant = Plant(gpu=True, launch=0.0, colocated=True, target=lambda pack: 0.05, use=lambda rank: 0.05)
    finding = first(planted(plant, utilisation=0.4), "launch_bound")
    assert finding.numbers["device_seconds"] == pytest.approx(0.4 * 0.22, rel=0.02)
    assert finding.predicted_gain == pytest.approx(1.0, abs=0.02)
    assert kinds(judge(planted(plant, utilisation=0.95))) == ["balanced"]
    assert kinds(judge(planted(plant, utilisation=None))) == ["balanced"]


@pytest.mark.parametrize(("device", "found"), [(0.9, True), (1.1, False)])
def test_launching_counts_below_a_share_of_the_device(device: float, found: bool) -> None:
    launch = 1 / (findings_launch.DEVICE_BUSY * device) - 1
    plant = Plant(gpu=True, launch=launch, colocated=True, target=lambda pack: 0.05, use=lambda rank: 0.05)
    assert ("launch_bound" in kinds(judge(planted(plant)))) is found


@pytest.mark.parametrize(("share", "found"), [(0.9, False), (1.1, True)])
def test_launching_counts_above_a_share_of_the_thread(share: float, found: bool) -> None:
    """A thread that waits for its arrays for the rest of the time is not bound by launching."""
    waits = 1 - findings_launch.LAUNCHED * share
    plant = Plant(gpu=True, launch=1.0, colocated=True, build=0.22 / (1 - waits), target=lambda pack: 0.05)
    plant = replace(plant, use=lambda rank: 0.05)
    assert ("launch_bound" in kinds(judge(planted(plant)))) is found


@pytest.mark.parametrize(("share", "found"), [(0.9, True), (1.1, False)])
def test_a_thread_that_waits_for_its_device_is_not_bound_by_launching(share: float, found: bool) -> None:
    """The waits of the plant are for arrays; under another name they are for the device."""
    waits = findings_launch.DEVICE_WAIT * share
    plant = Plant(gpu=True, launch=1.0, colocated=True, build=0.22 / (1 - waits), target=lambda pack: 0.05)
    run = planted(plant, use=lambda rank: 0.05)
    spans = run.spans["worker-0"]
    names = tuple({"wait_loader": "wait_gpu"}.get(name, name) for name in spans.state_names)
    waiting = replace(run, spans={"worker-0": replace(spans, state_names=names)})
    assert ("launch_bound" in kinds(judge(waiting))) is found


@pytest.mark.parametrize(("gain", "found"), [(0.9, False), (1.1, True)])
def test_another_layout_is_worth_a_word_from_a_gain_on(gain: float, found: bool) -> None:
    """Split takes as long as its drafter, 0.22 s; colocated on two, as long as both stages on half of the packs."""
    both = 0.22 / (1 + findings.GAIN * gain)
    plant = Plant(use=lambda rank: 0.1, target=lambda pack: both - 0.02 - 0.1)
    assert (judge(planted(plant)).findings[0].predicted_gain is not None) is found


@pytest.mark.parametrize(("busy", "kind"), [(0.80, "starvation"), (0.90, "target_bound")])
def test_targets_that_starve_drafters_are_told_from_targets_that_are_slow(busy: float, kind: str) -> None:
    plant = Plant(target=lambda pack: 0.4 * busy, odd_target_seconds=0.4 * (1 - busy))
    verdict = judge(planted(plant))
    assert verdict.findings[0].kind == kind, verdict.headline


def test_waits_for_a_device_that_works_meanwhile_cost_nothing() -> None:
    """A thread may wait for input far ahead of its device; only what the device lacks is lost."""
    run = planted(Plant(target=lambda pack: 0.4, gpu=True, launch=0.0, devices=2))
    assert judge(run).findings[0].kind == "target_bound"
    spans = run.spans["drafter-0"]
    gpu = spans.lane_names.index("gpu")
    stretched = replace(spans, seconds=np.where(spans.lane == gpu, spans.seconds * 3.6, spans.seconds))
    busy = replace(run, spans={**run.spans, "drafter-0": stretched})
    assert judge(busy).findings[0].kind != "target_bound"


def test_only_the_newest_start_and_no_warm_up_are_judged() -> None:
    """The first steps are fifty times as slow; they are left out."""
    slow_start = planted(Plant(target=lambda pack: 5.0 if pack < 4 else 0.1, use=lambda rank: 0.09))
    verdict = judge(slow_start)
    assert kinds(verdict) == ["balanced"]
    assert verdict.window is not None
    assert verdict.window[0] - slow_start.begin > 10


def test_a_window_sees_the_end_of_a_live_run_alone() -> None:
    """The target becomes slow half way: the whole run is half and half, its last seconds are bound by the target."""
    run = planted(Plant(target=lambda pack: 0.1 if pack < 160 else 0.5, use=lambda rank: 0.09, devices=2))
    recent = judge(run, window=10.0)
    assert recent.window is not None
    assert recent.window[1] - recent.window[0] <= 10.0
    assert recent.findings[0].kind == "target_bound"
    assert recent.findings[0].numbers["wait_input"] > judge(run).findings[0].numbers["wait_input"] + 0.05


def test_too_few_steps_are_not_judged() -> None:
    run = planted(Plant(steps=4))
    assert judge(run) == Verdict(headline="too few steps to judge: 4 of 4 were made")
    assert judge(RunData(root=run.root)).headline.startswith("too few steps")
    without_spans = replace(run, spans={}, recipe={**run.recipe, "observe": {"spans": False}})
    assert judge(without_spans).headline == "nothing to judge by: observe.spans is false"


def test_the_error_of_the_prediction_is_stated() -> None:
    run = planted(Plant(use=lambda rank: 0.09))
    predicted = replace(run, prediction={"throughput": {"tokens_per_second": 11_000}})
    verdict = judge(predicted)
    assert verdict.prediction_error == pytest.approx(0.1, abs=0.05)
    assert "11.0K were predicted before the run, +" in verdict.headline
    assert judge(run).prediction_error is None


def test_a_verdict_is_json_and_reads_as_a_sentence() -> None:
    verdict = judge(planted(Plant(target=lambda pack: 0.4, devices=4)))
    found = json.loads(json.dumps(verdict.as_dict()))
    assert found["findings"][0]["kind"] == "target_bound"
    assert set(found["shares"]) == {"target-0", "drafter-0"}
    assert all(sum(shares.values()) == pytest.approx(1, abs=1e-3) for shares in found["shares"].values())
    assert verdict.headline.startswith("2.5K tokens/s: drafters wait 72 % for hidden states; targets are at 100 %. 3 + 1 is")
    assert set(verdict.predictions) == {"1 + 1", "3 + 1", "2 + 2"}


def test_figures_as_people_read_them() -> None:
    assert [percent(value) for value in (0.314, 0.031, 0.03, 0.0)] == ["31 %", "3.1 %", "3 %", "0 %"]
    assert percent(0.22, sign=True) == "+22 %"
    assert percent(-0.051, sign=True) == "-5.1 %"
    assert [thousands(value) for value in (870.4, 15_940.0)] == ["870", "15.9K"]
