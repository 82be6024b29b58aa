"""Validation prompts and the answers kept of them: what is read, under which key, and when the target answers again."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from launch_material import tiny_recipe

from slipstream.config import Recipe, read_target_info
from slipstream.errors import PlanError, PreflightError
from slipstream.launch.answers import (
    ANSWERS_FILE,
    Answer,
    answers_key,
    chat_encoder,
    read_answers,
    read_prompts,
    write_answers,
)
from slipstream.launch.roles import answers as role
from slipstream.observe import Account
from slipstream.runfolder import RunFolder
from slipstream.target.generate import greedy_answers
from slipstream.target.loading import load_full

ANSWERS = [Answer(prompt_ids=(1, 2, 3), answer_ids=(4, 2)), Answer(prompt_ids=(5,), answer_ids=(6, 7, 8))]


class FakeControl:
    """Hears reports; wants a stop from a given report on."""

    def __init__(self, *, stop_after: int | None = None) -> None:
        self.reports: list[tuple[str, Any]] = []
        self._stop_after = stop_after

    def report(self, kind: str, payload: object) -> None:
        self.reports.append((kind, payload))

    def stopping(self) -> bool:
        return self._stop_after is not None and len(self.reports) >= self._stop_after


def validating(material: dict[str, str], runs: Path, **changes: Any) -> Recipe:
    given = {"validation__prompts": material["prompts"], "validation__max_new_tokens": 6, "validation__batch_size": 2}
    return tiny_recipe(material, runs, name="answered", **(given | changes))


def play(recipe: Recipe, *, control: FakeControl | None = None) -> dict[str, Any]:
    folder = RunFolder(Path(recipe.runs) / recipe.name)
    folder.validation.mkdir(parents=True, exist_ok=True)
    job = {"recipe": recipe.model_dump(mode="json"), "folder": str(folder.root), "device": "cpu"}
    return role.play_answers(job, control or FakeControl(), Account("answers"))  # type: ignore[arg-type]


def kept(recipe: Recipe) -> list[Answer]:
    return read_answers(RunFolder(Path(recipe.runs) / recipe.name).validation / ANSWERS_FILE)


def test_answers_are_read_back_as_written(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "answers.jsonl"
    write_answers(path=file, answers=ANSWERS)
    assert read_answers(file) == ANSWERS
    assert [path.name for path in file.parent.iterdir()] == ["answers.jsonl"], "nothing half-written is left"


@pytest.mark.parametrize(
    ("spoil", "value"),
    [
        (lambda text: text[:-9], "damaged"),
        (lambda text: text.replace("answer_ids", "answers"), "damaged"),
        (lambda text: "3\n", "damaged"),
        (lambda text: "", "empty"),
    ],
)
def test_a_torn_or_foreign_file_is_refused(tmp_path: Path, spoil: Any, value: str) -> None:
    file = tmp_path / "answers.jsonl"
    write_answers(path=file, answers=ANSWERS)
    file.write_text(spoil(file.read_text()))
    with pytest.raises(PlanError) as caught:
        read_answers(file)
    assert (caught.value.key, caught.value.value) == (str(file), value)
    assert "remove it" in caught.value.hint


def test_answers_that_are_missing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="holds the answers to the validation prompts"):
        read_answers(tmp_path / "none")


def test_the_key_changes_with_all_that_changes_an_answer(material: dict[str, str], tmp_path: Path) -> None:
    base: dict[str, Any] = {
        "prompts": [[1, 2], [3]],
        "recipe": validating(material, tmp_path),
        "target_fingerprint": "abc",
        "stop_token_ids": (2,),
    }
    changes: list[dict[str, Any]] = [
        {"target_fingerprint": "abd"},
        {"prompts": [[1, 2], [4]]},
        {"prompts": [[1], [2, 3]]},
        {"stop_token_ids": (2, 5)},
        {"recipe": validating(material, tmp_path, target__dtype="bfloat16")},
        {"recipe": validating(material, tmp_path, validation__max_new_tokens=7)},
        {"recipe": validating(material, tmp_path, validation__batch_size=3)},
    ]
    keys = [answers_key(**(base | change)) for change in [{}, *changes]]
    assert len(set(keys)) == len(keys)
    same = validating(material, tmp_path, placement__mode="colocated", plan__seed=9, validation__every_steps=3)
    assert answers_key(**(base | {"recipe": same})) == keys[0]


def test_prompts_are_those_of_evaluate(material: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Through the last user turn; without one, or too long for the target's positions, a conversation is left out."""
    user, assistant = {"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3"}
    long = {"role": "user", "content": "w5 " * 600}
    rows = [[user, assistant, user, assistant], [assistant], [user], [long], [user]]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    recipe = validating(material, tmp_path, validation__prompts=str(file), validation__max_prompts=2)
    info = read_target_info(recipe.target.model)
    encoder = chat_encoder(recipe=recipe, info=info)
    prompts = read_prompts(recipe=recipe, info=info, encoder=encoder)
    assert len(prompts) == 2
    assert prompts[0][-len(prompts[1]) :] == prompts[1], "both end with the same question"
    assert len(prompts[0]) > len(prompts[1])
    assert "1 conversations" in caplog.text
    file.write_text(json.dumps({"messages": [long]}) + "\n")
    with pytest.raises(PreflightError, match=r"validation.prompts = .*no usable prompt \(1 without a user turn or above 506"):
        read_prompts(recipe=recipe, info=info, encoder=encoder)


def test_the_target_answers_with_the_stop_tokens_of_its_template(
    material: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same as `regenerate` and `evaluate` take, which the config's end tokens alone need not be."""
    asked: list[Any] = []

    def recording(**arguments: Any) -> list[list[int]]:
        asked.append(arguments["stop_token_ids"])
        return greedy_answers(**arguments)

    monkeypatch.setattr("slipstream.target.generate.greedy_answers", recording)
    recipe = validating(material, tmp_path)
    assert play(recipe) == {"answers": 4, "reused": False}
    info = read_target_info(recipe.target.model)
    encoder = chat_encoder(recipe=recipe, info=info)
    assert asked == [encoder.stop_token_ids]
    prompts = read_prompts(recipe=recipe, info=info, encoder=encoder)
    model = load_full(info=info, dtype="float32", device="cpu")
    found = greedy_answers(model=model, prompts=prompts, max_new_tokens=6, stop_token_ids=encoder.stop_token_ids, batch_size=2)
    assert [list(answer.answer_ids) for answer in kept(recipe)] == found
    assert [list(answer.prompt_ids) for answer in kept(recipe)] == prompts


def test_answers_are_kept_for_this_run_and_for_others(
    material: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = validating(material, tmp_path)
    control = FakeControl()
    play(recipe, control=control)
    assert [payload["done"] for kind, payload in control.reports if kind == "progress"] == [2, 4]
    before = kept(recipe)

    def loaded(**arguments: Any) -> None:
        raise AssertionError("the target is not needed")

    monkeypatch.setattr("slipstream.target.loading.load_full", loaded)
    assert play(recipe) == {"answers": 4, "reused": True}
    other = recipe.model_copy(update={"name": "other"})
    assert play(other) == {"answers": 4, "reused": True}
    assert kept(other) == before
    for file in (tmp_path / role.CACHE_FOLDER).iterdir():
        file.unlink()
    assert play(recipe) == {"answers": 4, "reused": True}, "a run has its own copy"


def test_a_run_resumed_with_other_prompts_or_limits_is_answered_again(material: dict[str, str], tmp_path: Path) -> None:
    play(validating(material, tmp_path))
    fewer = validating(material, tmp_path, validation__max_prompts=3)
    assert play(fewer) == {"answers": 3, "reused": False}
    assert len(kept(fewer)) == 3
    shorter = validating(material, tmp_path, validation__max_new_tokens=3)
    assert play(shorter) == {"answers": 4, "reused": False}
    assert all(len(answer.answer_ids) <= 3 for answer in kept(shorter))
    assert play(validating(material, tmp_path)) == {"answers": 4, "reused": True}, "the first ones are kept as well"
    assert any(len(answer.answer_ids) > 3 for answer in kept(shorter))


def test_a_wish_to_stop_is_heeded_between_batches(material: dict[str, str], tmp_path: Path) -> None:
    recipe = validating(material, tmp_path)
    control = FakeControl(stop_after=2)
    assert play(recipe, control=control) == {"answers": 0, "reused": False}
    assert [payload["done"] for kind, payload in control.reports if kind == "progress"] == [2]
    assert not (tmp_path / "answered" / "validation" / ANSWERS_FILE).exists()
    assert play(recipe)["answers"] == 4


def test_an_answer_is_plain_json(tmp_path: Path) -> None:
    write_answers(path=tmp_path / "a", answers=ANSWERS)
    rows = [json.loads(line) for line in (tmp_path / "a").read_text().splitlines()]
    assert rows == json.loads(json.dumps([asdict(answer) for answer in ANSWERS]))
