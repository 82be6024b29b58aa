"""The loop with toys around it: order, exact resume, stops, bad steps, divergence."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from toy_run import SECTION, ToyDrafter, ToyPlanner, ToySource, make_run, toy_batch, toy_ends, toy_loss

from slipstream.errors import CheckpointError, TargetError, TrainingDiverged
from slipstream.trainer.checkpoint import checkpoint_name, complete_checkpoints, latest
from slipstream.trainer.hooks import Hook


def assert_equal_weights(one: dict[str, Tensor], two: dict[str, Tensor]) -> None:
    assert one.keys() == two.keys()
    for name in one:
        assert torch.equal(one[name], two[name]), name


def test_the_loss_falls_and_the_plan_is_followed() -> None:
    run = make_run(num_steps=40)
    result = run.trainer.fit()
    assert (result.step, result.status) == (40, "finished")
    records = run.recorder.records
    assert [record.step for record in records] == list(range(40))
    assert records[-1].loss < 0.8 * records[0].loss
    assert run.source.released == [pack for step in range(1, 40, 2) for pack in (step // 2 * 2, step // 2 * 2 + 1)]
    assert not run.source.live
    assert result.counters.context_tokens == 40 * 2 * 120
    assert result.counters.unique_tokens == 20 * 2 * 120


def test_hooks_are_called_in_order_and_read_a_step_late(tmp_path: Path) -> None:
    run = make_run(num_steps=3, folder=tmp_path, every=2)
    run.trainer.fit()
    assert run.recorder.calls == [
        ("start", 0),
        ("before", 0),
        ("after", 1, []),
        ("before", 1),
        ("after", 2, [0, 1]),
        ("checkpoint", 2),
        ("before", 2),
        ("after", 3, [2]),
        ("checkpoint", 3),
        ("end", 3, "finished"),
    ]


def test_the_gradient_is_the_token_mean_of_the_global_step() -> None:
    planner, drafter, ends = ToyPlanner(num_columns=3), ToyDrafter(), toy_ends()
    planned = planner.step(0).supervised_per_slot
    total = torch.zeros(())
    for use in planner.step(0).uses:
        batch = toy_batch(planner.pack(use.pack_id), use)
        hidden = ToySource().take(use.pack_id).hidden_TKD
        masks = drafter.make_masks(batch)
        block = drafter(hidden_TKD=hidden, batch=batch, embedding_VD=ends.embedding_VD, masks=masks)
        total = total + toy_loss(hidden_NBD=block, head_VD=ends.head_VD, batch=batch).loss_sum
    (total / planned.sum()).backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in drafter.parameters()]).norm()

    run = make_run(num_steps=1, num_columns=3)
    run.trainer.fit()
    (record,) = run.recorder.records
    assert record.gradient_norm == pytest.approx(float(expected), rel=1e-6)
    assert record.loss == pytest.approx(float(total.detach()) / planned.sum(), rel=1e-6)
    assert record.supervised_per_slot == tuple(planned)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exact_resume(tmp_path: Path, dtype: torch.dtype) -> None:
    whole = make_run(num_steps=12, dtype=dtype)
    whole.trainer.fit()
    first = make_run(num_steps=12, dtype=dtype, folder=tmp_path)
    calls = iter([False] * 4 + [True])
    result = first.trainer.fit(stop=lambda: next(calls))
    assert (result.step, result.status) == (5, "interrupted")
    second = make_run(num_steps=12, dtype=dtype, folder=tmp_path, resume=latest(tmp_path))
    result = second.trainer.fit()
    assert (result.step, result.status) == (12, "finished")
    assert_equal_weights(whole.weights(), second.weights())
    one, two = whole.trainer.optimizer, second.trainer.optimizer
    for name in ("master", "exp_avg", "exp_avg_sq", "good_steps"):
        assert torch.equal(getattr(one, name), getattr(two, name)), name
    together = first.recorder.records + second.recorder.records
    assert [(r.step, r.loss_sum, r.gradient_norm, r.learning_rate) for r in together] == [
        (r.step, r.loss_sum, r.gradient_norm, r.learning_rate) for r in whole.recorder.records
    ]
    assert result.counters == whole.trainer.counters


def test_resume_without_moments_would_be_noticed(tmp_path: Path) -> None:
    """The equality above means something: weights alone do not give it."""
    whole = make_run(num_steps=8)
    whole.trainer.fit()
    first = make_run(num_steps=8, folder=tmp_path)
    calls = iter([False] * 3 + [True])
    first.trainer.fit(stop=lambda: next(calls))
    second = make_run(num_steps=8, resume=latest(tmp_path))
    second.trainer.optimizer.exp_avg.zero_()
    second.trainer.fit()
    assert not torch.equal(whole.weights()["fc"], second.weights()["fc"])


def damage_pack(bad_pack: int, value: float):
    def damage(pack_id: int, hidden: Tensor) -> None:
        if pack_id == bad_pack:
            hidden[10, 1, 3] = value

    return damage


def loss_with(bad_step: int, what: str, value: float):
    def loss(**arguments):
        sums = toy_loss(**arguments)
        if arguments["batch"].step != bad_step:
            return sums
        if what == "loss":
            return sums.__class__(**{**vars(sums), "loss_sum": sums.loss_sum + value})
        hidden = arguments["hidden_NBD"]
        hidden.register_hook(lambda gradient: gradient * value)
        return sums

    return loss


class StateAtEachStep(Hook):
    def __init__(self) -> None:
        self.states = []
        self.optimizer = None

    def after_step(self, step, records):
        self.states.append(self.optimizer.state())


def run_with_states(**keys):
    watcher = StateAtEachStep()
    run = make_run(num_steps=6, extra_hooks=(watcher,), **keys)
    watcher.optimizer = run.trainer.optimizer
    run.trainer.fit()
    return run, watcher.states


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("what", ["row", "loss", "gradient"])
def test_a_step_that_is_not_finite_changes_nothing(what: str, value: float, dtype: torch.dtype) -> None:
    if what == "row":
        run, states = run_with_states(dtype=dtype, source=ToySource(damage=damage_pack(5, value)))
        bad = [4, 5]
    else:
        run, states = run_with_states(dtype=dtype, loss=loss_with(3, what, value))
        bad = [3]
    skipped = [record for record in run.recorder.records if record.skipped]
    assert [record.step for record in skipped] == bad
    assert run.trainer.counters.skipped_steps == len(bad)
    assert run.trainer.counters.bad_rows == (2 if what == "row" else 0)
    assert [record.bad_rows for record in skipped] == [1.0 if what == "row" else 0.0] * len(bad)
    assert math.isfinite(skipped[0].loss_sum) == (what == "gradient" or (what == "row" and not reads_row(run)))
    for step in bad:
        before, after = states[step - 1], states[step]
        for part in ("master", "exp_avg", "exp_avg_sq"):
            old, new = getattr(before, part), getattr(after, part)
            assert all(torch.equal(old[name], new[name]) for name in old), part
        assert torch.equal(before.good_steps, after.good_steps)
    assert int(states[-1].good_steps) == 6 - len(bad)
    assert all(torch.isfinite(weight).all() for weight in run.weights().values())


def reads_row(run) -> bool:
    """Whether an anchor of the damaged pack reads the damaged row (token 10), in its first bad step."""
    use = ToyPlanner(num_columns=2).use(4, 1)
    return 11 in use.anchors[use.anchor_valid]


def test_a_step_with_nothing_supervised_is_counted_and_harmless() -> None:
    run = make_run(num_steps=5, planner=ToyPlanner(num_columns=2, empty_steps=(2,)))
    run.trainer.fit()
    assert run.trainer.counters.unsupervised_steps == 1
    assert run.trainer.counters.skipped_steps == 0
    assert run.recorder.records[2].gradient_norm == 0
    assert run.recorder.records[2].loss is None


def test_divergence_ends_the_run_with_a_diagnosis(tmp_path: Path) -> None:
    def loss(**arguments):
        sums = toy_loss(**arguments)
        factor = math.nan if arguments["batch"].step >= 4 else 1.0
        return sums.__class__(**{**vars(sums), "loss_sum": sums.loss_sum * factor})

    run = make_run(num_steps=20, loss=loss, folder=tmp_path)
    with pytest.raises(TrainingDiverged, match=r"3 steps in a row.*step 4: the loss \(nan\).*step 5.*step 6") as caught:
        run.trainer.fit()
    assert "optimizer.max_bad_steps = 3" in str(caught.value)
    assert run.recorder.records[-1].step == 6
    assert all(torch.isfinite(weight).all() for weight in run.weights().values())


def test_bad_steps_that_are_not_in_a_row_do_not_end_the_run() -> None:
    def loss(**arguments):
        sums = toy_loss(**arguments)
        factor = 1.0 if arguments["batch"].step % 3 == 0 else math.nan
        return sums.__class__(**{**vars(sums), "loss_sum": sums.loss_sum * factor})

    run = make_run(num_steps=12, loss=loss)
    run.trainer.fit()
    assert run.trainer.counters.skipped_steps == 8


def test_bad_steps_in_a_row_are_counted_over_a_resume(tmp_path: Path) -> None:
    def loss(**arguments):
        sums = toy_loss(**arguments)
        return sums.__class__(**{**vars(sums), "loss_sum": sums.loss_sum * math.nan})

    first = make_run(num_steps=9, loss=loss, folder=tmp_path)
    calls = iter([False, True])
    first.trainer.fit(stop=lambda: next(calls))
    second = make_run(num_steps=9, loss=loss, resume=latest(tmp_path))
    with pytest.raises(TrainingDiverged):
        second.trainer.fit()
    assert second.recorder.records[-1].step == 2


def test_stop_finishes_the_step_and_saves(tmp_path: Path) -> None:
    run = make_run(num_steps=9, folder=tmp_path)
    result = run.trainer.fit(stop=lambda: True)
    assert (result.step, result.status) == (1, "interrupted")
    assert [path.name for path in complete_checkpoints(tmp_path)] == [checkpoint_name(1)]
    assert run.recorder.calls[-1] == ("end", 1, "interrupted")
    assert [record.step for record in run.recorder.records] == [0]


def test_a_stop_that_comes_within_a_step_ends_with_that_step() -> None:
    asked = False

    def damage(pack_id: int, hidden: Tensor) -> None:
        nonlocal asked
        asked = asked or pack_id == 4

    run = make_run(num_steps=9, source=ToySource(damage=damage))
    assert run.trainer.fit(stop=lambda: asked).step == 5


def test_checkpoints_keep_the_newest_and_the_best(tmp_path: Path) -> None:
    best = {2: 1.5, 4: 2.5, 6: 2.0, 8: 2.1, 10: 2.2}
    run = make_run(num_steps=10, folder=tmp_path, every=2, keep=2, acceptance_at=best.get)
    run.trainer.fit()
    assert [path.name for path in complete_checkpoints(tmp_path)] == [checkpoint_name(step) for step in (4, 8, 10)]


def test_a_disk_that_fails_ends_the_run_at_the_next_step(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    run = make_run(num_steps=50, folder=folder, every=2)
    folder.rmdir()
    folder.write_text("in the way")
    with pytest.raises(CheckpointError, match="could not be written"):
        run.trainer.fit()
    assert run.recorder.calls[-1][0] != "end"


def test_hidden_states_of_another_target_are_refused() -> None:
    run = make_run(num_steps=2, source=ToySource(fingerprint="other"))
    with pytest.raises(TargetError, match="pack 0"):
        run.trainer.fit()


def test_an_error_while_preparing_reaches_the_loop() -> None:
    class Broken(ToyPlanner):
        def pack(self, pack_id):
            if pack_id == 4:
                raise ValueError("corpus is gone")
            return super().pack(pack_id)

    run = make_run(num_steps=9, planner=Broken(num_columns=2))
    with pytest.raises(ValueError, match="corpus is gone"):
        run.trainer.fit()
    assert run.recorder.calls[-1][:2] == ("after", 4)


def test_the_account_of_the_loop_sums_to_wall_time() -> None:
    run = make_run(num_steps=5)
    run.trainer.fit()
    wall, states = run.account.read()
    assert sum(states.values()) == wall
    assert {"forward", "backward", "optimizer", "wait_input", "hooks", "idle"} <= states.keys()
    assert states["forward"] > 0


def test_rates_follow_the_plan_not_the_good_steps() -> None:
    plain = make_run(num_steps=8)
    plain.trainer.fit()
    bad = make_run(num_steps=8, loss=loss_with(2, "loss", math.nan))
    bad.trainer.fit()
    assert [r.learning_rate for r in plain.recorder.records] == [r.learning_rate for r in bad.recorder.records]
    assert plain.recorder.records[-1].learning_rate < SECTION.lr
