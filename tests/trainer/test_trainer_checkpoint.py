"""Checkpoints: whole or not there, named when damaged, refused when of another run."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from toy_run import IDENTITY

from slipstream.config.drafter_shape import DrafterShape
from slipstream.config.recipe import Recipe
from slipstream.errors import CheckpointError
from slipstream.records import Cursor
from slipstream.trainer import checkpoint as module
from slipstream.trainer.checkpoint import (
    DESCRIPTION,
    OPTIMIZER,
    WEIGHTS,
    Checkpoint,
    CheckpointIdentity,
    best,
    complete_checkpoints,
    keep_checkpoints,
    latest,
    read_checkpoint,
    read_cursor,
    read_drafter_state,
    write_checkpoint,
)
from slipstream.trainer.optim import OptimizerState
from slipstream.trainer.saving import CheckpointWriter


def made(step: int, *, acceptance_length: float | None = None) -> Checkpoint:
    generator = torch.Generator().manual_seed(step)
    parts = [{"a.weight": torch.randn(4, 3, generator=generator), "b": torch.randn(5, generator=generator)} for _ in range(3)]
    return Checkpoint(
        cursor=Cursor(step=step, plan_digest=IDENTITY.plan_digest),
        state=OptimizerState(*parts, good_steps=torch.tensor(step)),
        counters={"skipped_steps": 2},
        acceptance_length=acceptance_length,
    )


def write(folder: Path, step: int, **keys) -> Path:
    return write_checkpoint(made(step, **keys), folder=folder, identity=IDENTITY, versions={"slipstream": "0"})


def test_round_trip(tmp_path: Path) -> None:
    path = write(tmp_path, 7, acceptance_length=2.5)
    assert path.name == "step-000007"
    found, expected = read_checkpoint(path, identity=IDENTITY), made(7, acceptance_length=2.5)
    assert (found.cursor, found.counters, found.acceptance_length) == (expected.cursor, {"skipped_steps": 2}, 2.5)
    for part in ("master", "exp_avg", "exp_avg_sq"):
        one, two = getattr(found.state, part), getattr(expected.state, part)
        assert one.keys() == two.keys()
        assert all(torch.equal(one[name], two[name]) for name in one)
    assert int(found.state.good_steps) == 7
    assert read_cursor(path) == expected.cursor
    shape, state = read_drafter_state(path)
    assert shape == IDENTITY.drafter_shape
    assert torch.equal(state["a.weight"], expected.state.master["a.weight"])
    assert state["b"].dtype == torch.float32


def test_latest_is_by_step_not_by_name(tmp_path: Path) -> None:
    assert latest(tmp_path) is None
    for step in (999_999, 1_000_000, 3):
        write(tmp_path, step)
    assert latest(tmp_path).name == "step-1000000"


@pytest.mark.parametrize("moment", ["weights", "description", "rename"])
def test_killed_while_writing_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    class Killed(BaseException):
        pass

    def kill(*_arguments, **_keys):
        raise Killed

    write(tmp_path, 1)
    with monkeypatch.context() as patch:
        if moment == "weights":
            patch.setattr(module, "save_file", kill)
        elif moment == "description":
            patch.setattr(module, "_fingerprint", kill)
        else:
            patch.setattr(os, "replace", kill)
        with pytest.raises(Killed):
            write(tmp_path, 2)
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step-000001"]
    read_checkpoint(latest(tmp_path), identity=IDENTITY)
    assert len(list(tmp_path.glob(".step-*"))) == 1
    CheckpointWriter(folder=tmp_path, identity=IDENTITY, keep=2)
    assert not list(tmp_path.glob(".step-*"))
    write(tmp_path, 2)
    assert latest(tmp_path).name == "step-000002"


def test_the_same_step_again_replaces(tmp_path: Path) -> None:
    write(tmp_path, 4, acceptance_length=1.0)
    path = write(tmp_path, 4, acceptance_length=3.0)
    assert read_checkpoint(path, identity=IDENTITY).acceptance_length == 3.0
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-000004"]


@pytest.mark.parametrize("name", [WEIGHTS, OPTIMIZER])
@pytest.mark.parametrize(
    ("damage", "words"), [("truncate", "truncated"), ("flip", "damaged"), ("remove", "missing"), ("grow", "longer")]
)
def test_damage_is_named(tmp_path: Path, name: str, damage: str, words: str) -> None:
    path = write(tmp_path, 7)
    file = path / name
    content = bytearray(file.read_bytes())
    if damage == "truncate":
        file.write_bytes(content[:-5])
    elif damage == "grow":
        file.write_bytes(content + b"\0")
    elif damage == "flip":
        content[-3] ^= 0x10
        file.write_bytes(content)
    else:
        file.unlink()
    with pytest.raises(CheckpointError, match=words) as caught:
        read_checkpoint(path, identity=IDENTITY)
    assert name in str(caught.value)
    if name == WEIGHTS:
        with pytest.raises(CheckpointError, match=words):
            read_drafter_state(path)


@pytest.mark.parametrize("text", ["", '{"format": 1', "[]", '{"format": 99}'])
def test_a_damaged_description_is_named(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, 7)
    (path / DESCRIPTION).write_text(text)
    with pytest.raises(CheckpointError, match=DESCRIPTION):
        read_checkpoint(path, identity=IDENTITY)


def test_no_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint"):
        read_checkpoint(tmp_path / "step-000001", identity=IDENTITY)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"keys": {"optimizer.lr": 3e-4}}, r"optimizer\.lr 0\.01 there, 0\.0003 here"),
        ({"target_fingerprint": "another"}, "target.model is another model"),
        ({"drafter_shape": {"hidden_size": 32}}, "hidden_size 16 there, 32 here"),
        ({"plan_digest": "other"}, "the corpus is another one"),
    ],
)
def test_another_run_is_refused(tmp_path: Path, change: dict, words: str) -> None:
    path = write(tmp_path, 7)
    with pytest.raises(CheckpointError, match=words):
        read_checkpoint(path, identity=replace(IDENTITY, **change))


def test_keep_newest_and_best(tmp_path: Path) -> None:
    for step, length in ((1, 3.0), (2, 5.0), (3, None), (4, 4.0), (5, None)):
        write(tmp_path, step, acceptance_length=length)
    keep_checkpoints(tmp_path, keep=2)
    assert [path.name[-1] for path in complete_checkpoints(tmp_path)] == ["2", "4", "5"]
    (tmp_path / "step-000002" / DESCRIPTION).write_text("damaged")
    keep_checkpoints(tmp_path, keep=1)
    assert [path.name[-1] for path in complete_checkpoints(tmp_path)] == ["4", "5"]


def test_of_equally_good_checkpoints_the_newest_is_the_best(tmp_path: Path) -> None:
    assert best(tmp_path) is None
    for step, length in ((1, None), (2, 4.0), (3, 5.0), (4, 5.0), (5, 3.0)):
        write(tmp_path, step, acceptance_length=length)
        assert (best(tmp_path) is None) is (step == 1)
    assert best(tmp_path) == tmp_path / "step-000004"


def test_identity_leaves_out_what_may_change() -> None:
    recipe = Recipe.model_validate({"name": "a", "target": {"model": "m"}, "corpus": {"path": "c"}})
    shape = DrafterShape(
        num_layers=1,
        block_size=4,
        mask_token_id=1,
        tap_layers=(0, 1),
        hidden_size=8,
        intermediate_size=8,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        vocab_size=8,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        max_position_embeddings=64,
        layer_types=("full",),
        sliding_window=None,
        num_target_layers=4,
        initializer_range=0.02,
    )

    def identity(**sections) -> CheckpointIdentity:
        changed = Recipe.model_validate(
            {**recipe.model_dump(), **{k: {**recipe.model_dump()[k], **v} for k, v in sections.items()}}
        )
        return CheckpointIdentity.of(recipe=changed, shape=shape, plan_digest="p", target_fingerprint="t")

    same = identity()
    assert identity(placement={"drafter_ranks": 2}, corpus={"path": "elsewhere"}, checkpoint={"keep": 9}) == same
    assert identity(target={"model": "/elsewhere"}) == same
    other = identity(optimizer={"lr": 1.0})
    assert other.recipe_digest != same.recipe_digest
    assert {key for key in same.keys if same.keys[key] != other.keys[key]} == {"optimizer.lr"}
    assert json.loads(json.dumps(same.drafter_shape)) == same.drafter_shape


def test_the_writer_works_behind_the_back_and_reports(tmp_path: Path) -> None:
    writer = CheckpointWriter(folder=tmp_path / "fine", identity=IDENTITY, keep=2)
    for step in (1, 2, 3):
        writer.save(made(step))
    writer.wait()
    assert [path.name[-1] for path in complete_checkpoints(tmp_path / "fine")] == ["2", "3"]
    (tmp_path / "gone").mkdir()
    writer = CheckpointWriter(folder=tmp_path / "gone", identity=IDENTITY, keep=2)
    (tmp_path / "gone").rmdir()
    (tmp_path / "gone").write_text("in the way")
    writer.save(made(1))
    with pytest.raises(CheckpointError, match="could not be written"):
        writer.wait()
    writer.wait()
