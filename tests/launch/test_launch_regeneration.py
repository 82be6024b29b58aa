"""Talks that this process answers go turn by turn, in rounds, and end where an answer is cut or a prompt is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

from served_stub import STOP, write_target
from slipstream.corpus.chat import ChatEncoder
from slipstream.errors import UsageError
from slipstream.launch.regeneration import Counts, Regeneration, answer_here, option_record, served_fingerprint
from slipstream.target.answer_file import Answer, AnswerFile, Prompt

ROWS = [
    {"messages": [{"role": "assistant" if at % 2 else "user", "content": text} for at, text in enumerate(texts)]}
    for texts in (
        ("one?", "x", "two?", "y"),
        ("cut here", "x", "never asked", "y"),
        ("short",),
        ("one?", "z", "another?"),
        ("grows?", "x", "long " * 60, "y", "never asked"),
    )
]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> ChatEncoder:
    return ChatEncoder(write_target(tmp_path_factory.mktemp("target")))


def regenerate(encoder: ChatEncoder, folder: Path, **given: Any) -> tuple[list[list[str]], list[tuple[int, int]], Counts]:
    """The last words of each round's prompts, the progress, and the counts."""
    (folder / "src.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given.get("rows", ROWS)))
    file = AnswerFile(folder / "out.jsonl", target_fingerprint="f", options={})
    run = Regeneration(encoder=encoder, file=file, room=300)
    talks = run.open([str(folder / "src.jsonl")], limit=given.get("limit"))
    rounds: list[list[str]] = []
    progress: list[tuple[int, int]] = []

    def answer(prompts: Sequence[Prompt], report: Callable[[int, int], None]) -> None:
        rounds.append([str(prompt.messages[-1]["content"]) for prompt in prompts])
        for prompt in {file.key(prompt.token_ids): prompt for prompt in prompts}.values():
            text, cut = f"answer {len(prompt.messages)}", prompt.messages[-1]["content"] == "cut here"
            ids = encoder._tokenize([text])[0]
            finish: Literal["stop", "length"] = "length" if cut else "stop"
            if file.key(prompt.token_ids) not in file:
                file.append([(prompt, Answer(token_ids=tuple(ids if cut else [*ids, STOP]), text=text, finish=finish))])
        report(1, 2)

    answer_here(run, talks, answer=answer, on_progress=lambda done, total: progress.append((done, total)))
    run.check_answers(["src.jsonl"], talks=talks)
    return rounds, progress, run.finish(talks)


def test_rounds(encoder: ChatEncoder, tmp_path: Path) -> None:
    rounds, progress, counts = regenerate(encoder, tmp_path)
    assert rounds == [["one?", "cut here", "short", "one?", "grows?"], ["two?", "another?"]]
    assert counts == Counts(
        answered=6, already_answered=0, duplicates=1, cut=1, from_text=0, unanswered=0, refused={"prompt_too_long": 1}
    )
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    said = [[message["content"] for message in record["messages"]] for record in records]
    assert said == [
        ["one?"],
        ["one?", "answer 1", "two?"],
        ["cut here"],
        ["short"],
        ["one?", "answer 1", "another?"],
        ["grows?"],
    ]
    assert progress[-1] == (10, 10)
    assert progress == sorted(progress)


def test_called_again_it_asks_nothing_anew_and_reads_the_turns_before(encoder: ChatEncoder, tmp_path: Path) -> None:
    regenerate(encoder, tmp_path)
    lines = (tmp_path / "out.jsonl").read_bytes()
    assert regenerate(encoder, tmp_path)[2].already_answered == 6
    assert (tmp_path / "out.jsonl").read_bytes() == lines
    (tmp_path / "out.jsonl").write_bytes(b"".join(lines.splitlines(keepends=True)[::3]))
    counts = regenerate(encoder, tmp_path)[2]
    assert (counts.answered, counts.already_answered) == (4, 2)
    assert (tmp_path / "out.jsonl").read_bytes() == lines


def test_a_limit_is_of_conversations(encoder: ChatEncoder, tmp_path: Path) -> None:
    assert regenerate(encoder, tmp_path, limit=2)[0] == [["one?", "cut here"], ["two?"]]


def test_nothing_to_answer_is_an_error_with_the_reasons(encoder: ChatEncoder, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"give no answer \(refused: {'no_user_turn': 1, 'unknown_form': 1}\)"):
        regenerate(encoder, tmp_path, rows=[{"text": "a"}, {"messages": [{"role": "system", "content": "a"}]}])
    assert not (tmp_path / "out.jsonl").exists()


def test_how_a_prompt_is_answered_names_arguments_of_the_template_only_where_there_are_any() -> None:
    """Files of answers that were made before there were any go on."""
    assert option_record({"dtype": "float32"}, template_arguments={}) == {"dtype": "float32"}
    assert option_record({}, template_arguments={"a": 1}) == {"template_arguments": {"a": 1}}


def test_a_served_target_is_known_by_its_files(tmp_path: Path) -> None:
    from slipstream.config import read_target_info

    prints = set()
    for name, changes in (("a", {}), ("b", {}), ("c", {"positions": 99}), ("d", {"template": "{{ messages }}"})):
        prints.add(served_fingerprint(read_target_info(str(write_target(tmp_path / name, **changes)))))  # type: ignore[arg-type]
    assert len(prints) == 3
