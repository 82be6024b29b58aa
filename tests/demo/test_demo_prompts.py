"""The demo's material: families share patterns, never words, and the shipped answers are those of the prompts."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from slipstream.demo import prompts as module
from slipstream.demo.prompts import Prompt, Split, build_prompts, write_prompts
from slipstream.demo.run import HELD_OUT, TRAIN

FILES: dict[Split, Path] = {"training": TRAIN, "held_out": HELD_OUT}


def test_there_are_hundreds_of_prompts_in_a_dozen_families() -> None:
    training, held_out = build_prompts("training"), build_prompts("held_out")
    assert len(training) >= 480
    assert len(held_out) >= 48
    assert len({prompt.text for prompt in training}) == len(training)
    assert len({prompt.text for prompt in held_out}) == len(held_out)
    families = Counter(prompt.family for prompt in training)
    assert len(families) >= 12
    assert set(families) == {prompt.family for prompt in held_out}
    assert len(set(families.values())) == 1


def test_held_out_prompts_share_no_filler_with_any_training_prompt() -> None:
    training = {word for prompt in build_prompts("training") for word in prompt.fillers}
    held_out = {word for prompt in build_prompts("held_out") for word in prompt.fillers}
    assert held_out
    assert training & held_out == set()
    assert {word.lower() for word in training} & {word.lower() for word in held_out} == set()


def test_every_filler_stands_in_its_prompt() -> None:
    for prompt in [*build_prompts("training"), *build_prompts("held_out")]:
        assert all(word in prompt.text for word in prompt.fillers)
        assert "{" not in prompt.text
        assert len(set(prompt.fillers)) == len(prompt.fillers)


def test_the_first_prompts_hold_every_family() -> None:
    training = build_prompts("training")
    families = {prompt.family for prompt in training}
    assert {prompt.family for prompt in training[: len(families)]} == families


@pytest.mark.parametrize("split", ["training", "held_out"])
def test_shipped_answers_belong_to_the_prompts(split: Split) -> None:
    rows = [json.loads(line) for line in FILES[split].read_text().splitlines()]
    assert {row["messages"][0]["content"] for row in rows} == {prompt.text for prompt in build_prompts(split)}
    for row in rows:
        assert [message["role"] for message in row["messages"]] == ["user"]
        assert row["answer_token_ids"]
        assert (row["answer_token_ids"][-1] in row["options"]["stop_token_ids"]) == (row["finish"] == "stop")
    assert len({row["target_fingerprint"] for row in rows}) == 1


def test_written_prompts_read_back(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    write_prompts(prompts=[Prompt(family="sum", fillers=("1",), text="What is 1?")], file=file)
    assert [json.loads(line) for line in file.read_text().splitlines()] == [
        {"messages": [{"role": "user", "content": "What is 1?"}], "family": "sum"}
    ]


def test_a_word_can_stand_twice_and_places_differ() -> None:
    pools = {"name": ["Anna", "Tom", "Eve", "Max"]}
    family = {"name": "f", "template": "{name}, {name.2} and {name}"}
    prompt = module._fill(family=family, pools=pools, index=1)
    first, second = prompt.fillers
    assert first != second
    assert prompt.text == f"{first}, {second} and {first}"
