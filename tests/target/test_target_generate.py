"""Greedy answers are the argmax loop's, in batches as alone; an interrupted file of answers is resumed without loss."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest
import torch
from tiny_targets import KINDS, VOCAB, save_target

from slipstream.errors import TargetError
from slipstream.target import answers as answers_module
from slipstream.target.answer_file import Answer, AnswerFile, Prompt
from slipstream.target.answers import Greedy, answer_resumably
from slipstream.target.generate import greedy_answers, plan_batches
from slipstream.target.huggingface import load_full

MAX_NEW = 24


def make_prompts(count=7, seed=5):
    generator = np.random.default_rng(seed)
    return [generator.integers(3, VOCAB, size=length).tolist() for length in generator.integers(1, 40, size=count)]


def argmax_loop(model, prompt, *, stops, max_new_tokens=MAX_NEW):
    """Greedy decoding with neither cache nor batch: the whole text through the model for each token."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(max_new_tokens):
            ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
            if ids[-1] in stops:
                break
    return ids[len(prompt) :]


@pytest.fixture(scope="module", params=KINDS)
def model(request, tmp_path_factory):
    info = save_target(tmp_path_factory.mktemp(request.param), request.param)
    model = load_full(info=info, dtype="float32")
    # A target's own defaults must not matter: greedy is greedy.
    model.generation_config.repetition_penalty, model.generation_config.do_sample = 3.0, True
    return model


@pytest.fixture(scope="module")
def looped(model):
    """Stop tokens that some answers meet, and the loop's answers with them."""
    prompts = make_prompts()
    free = [argmax_loop(model, prompt, stops=()) for prompt in prompts]
    stops = sorted({free[0][3], free[2][10]})
    expected = [argmax_loop(model, prompt, stops=stops) for prompt in prompts]
    assert len({len(answer) for answer in expected}) > 1, "rows must finish at different times"
    return stops, expected


@pytest.mark.parametrize("batch_size", [1, 3, 7])
def test_answers_are_the_argmax_loops_whatever_the_batch(model, looped, batch_size):
    prompts, (stops, expected) = make_prompts(), looped
    seen = []
    found = greedy_answers(
        model=model,
        prompts=prompts,
        max_new_tokens=MAX_NEW,
        stop_token_ids=stops,
        batch_size=batch_size,
        on_progress=lambda done, total: seen.append((done, total)),
    )
    assert found == expected
    assert seen[-1] == (7, 7)
    assert len(seen) == -(-7 // batch_size)


def test_batches_are_of_like_lengths_longest_first():
    prompts = [[1] * length for length in (3, 9, 1, 9, 5)]
    assert plan_batches(prompts=prompts, batch_size=2) == [[1, 3], [4, 0], [2]]


@pytest.mark.parametrize(("prompt", "rule"), [([], "is empty"), ([3] * 500, "exceeds the 512 positions")])
def test_prompts_that_cannot_be_answered_are_refused(tmp_path, prompt, rule):
    model = load_full(info=save_target(tmp_path, "llama"), dtype="float32")
    with pytest.raises(TargetError, match=rule) as caught:
        greedy_answers(model=model, prompts=[[3], prompt], max_new_tokens=13, stop_token_ids=[2], batch_size=2)
    assert caught.value.key == "prompts[1]"


OPTIONS = {"dtype": "float32", "max_new_tokens": 8, "stop_token_ids": (2, 9)}


def make_jobs():
    return [Prompt(token_ids=tuple(ids), messages=({"role": "user", "content": str(ids[0])},)) for ids in make_prompts(9)]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return load_full(info=save_target(tmp_path_factory.mktemp("small"), "llama"), dtype="float32")


def open_file(path, **changes):
    return AnswerFile(path, **{"target_fingerprint": "f" * 32, "options": OPTIONS, **changes})


def answer(model, path, jobs):
    """Answer into a file; the keys of its lines, in order."""
    file = open_file(path)
    greedy = Greedy(max_new_tokens=8, stop_token_ids=(2, 9), batch_size=4)
    answer_resumably(model=model, prompts=jobs, file=file, decode=lambda ids: " ".join(map(str, ids)), greedy=greedy)
    return file


def test_answers_are_written_with_their_origin(small, tmp_path):
    jobs = make_jobs()
    file = answer(small, tmp_path / "deep" / "out.jsonl", [*jobs, jobs[0]])
    records = [json.loads(line) for line in (tmp_path / "deep" / "out.jsonl").read_text().splitlines()]
    assert len(records) == 9
    by_user = {record["messages"][0]["content"]: record for record in records}
    for job in jobs:
        record = by_user[job.messages[0]["content"]]
        ids = record["answer_token_ids"]
        assert ids == argmax_loop(small, job.token_ids, stops=(2, 9), max_new_tokens=8)
        stopped = ids[-1] in (2, 9)
        assert record["finish"] == ("stop" if stopped else "length")
        assert record["messages"] == list(job.messages)
        assert record["answer"] == " ".join(map(str, ids[:-1] if stopped else ids))
        assert record["target_fingerprint"] == "f" * 32
        assert record["options"] == {"dtype": "float32", "max_new_tokens": 8, "stop_token_ids": [2, 9]}
        assert record == file.record(file.key(job.token_ids))


def test_killed_in_the_middle_of_a_line_it_resumes_to_the_same_answers(small, tmp_path, monkeypatch):
    jobs, whole, torn = make_jobs(), tmp_path / "whole.jsonl", tmp_path / "torn.jsonl"
    answer(small, whole, jobs)
    lines = whole.read_bytes().splitlines(keepends=True)
    torn.write_bytes(b"".join(lines[:5]) + lines[5][: len(lines[5]) // 2])
    calls = []
    real = answers_module.answer_batch
    monkeypatch.setattr(answers_module, "answer_batch", lambda **given: calls.append(len(given["prompts"])) or real(**given))
    file = answer(small, torn, jobs)
    assert torn.read_bytes() == whole.read_bytes()
    assert len(file.found) == 5
    assert calls == [4, 1], "the finished batch is not run again"
    assert len(answer(small, torn, jobs).found) == 9
    assert calls == [4, 1]


def test_answers_made_in_another_way_are_not_mixed_in(small, tmp_path):
    answer(small, tmp_path / "out.jsonl", make_jobs()[:2])
    for change in ({"target_fingerprint": "other"}, {"options": {**OPTIONS, "max_new_tokens": 9}}):
        with pytest.raises(TargetError, match="answered in another way"):
            open_file(tmp_path / "out.jsonl", **change)
    (tmp_path / "else.jsonl").write_text('{"messages": []}\n')
    with pytest.raises(TargetError, match="is not an answer"):
        open_file(tmp_path / "else.jsonl")


def test_files_of_before_are_continued(tmp_path):
    """The key of a prompt is what it was when options and fingerprint were one record."""
    key = open_file(tmp_path / "out.jsonl").key((5, 6))
    content = {"dtype": "float32", "max_new_tokens": 8, "stop_token_ids": [2, 9], "target_fingerprint": "f" * 32}
    assert key == hashlib.sha256(json.dumps([[5, 6], content], sort_keys=True).encode()).hexdigest()[:32]


def test_lines_are_put_in_order_and_stay_readable(tmp_path):
    file = open_file(tmp_path / "out.jsonl")
    jobs = [Prompt(token_ids=(number,), messages=({"role": "user", "content": "é" * number},)) for number in range(6)]
    file.append([(job, Answer(token_ids=(7, 2), text="ü", finish="stop")) for job in jobs])
    keys = [file.key(job.token_ids) for job in jobs]
    file.arrange([keys[4], keys[1], keys[4], "another", keys[5]])
    expected = [4, 1, 5, 0, 2, 3]
    for known in (file, open_file(tmp_path / "out.jsonl")):
        lines = [json.loads(line)["key"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
        assert lines == [keys[number] for number in expected]
        assert all(known.record(key)["messages"] == list(job.messages) for key, job in zip(keys, jobs, strict=True))
    file.append(
        [(Prompt(token_ids=(9,), messages=()), Answer(token_ids=(1,), text="a", finish="length", message={"content": ""}))]
    )
    assert file.record(file.key((9,)))["message"] == {"content": ""}
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]
