"""`slipstream regenerate --server`: the same file whatever goes wrong on the way, and words for what cannot be mended."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from served_stub import STOP, StubServer, write_target
from slipstream.cli.main import app
from slipstream.corpus.chat import ChatEncoder
from slipstream.corpus.conversation import Message
from slipstream.corpus.store import CorpusStore


def turns(*texts: str) -> list[dict[str, str]]:
    return [{"role": "assistant" if at % 2 else "user", "content": text} for at, text in enumerate(texts)]


ROWS: list[dict[str, Any]] = [
    {"messages": turns("Count to three.", "not this")},
    {"question": "Why is the sky blue?"},
    {"messages": [{"role": "system", "content": "Be odd."}, *turns("Hi.", "Hello.", "What now?", "Nothing.", "Bye.")]},
    {"oops": 1},
    {"messages": [{"role": "assistant", "content": "nobody asked"}]},
    {"question": "Why is the sky blue?"},
    {"messages": turns("Use a tool."), "tools": [{"name": "sum"}]},
    {"messages": [*turns("Sum.", ""), {"role": "tool", "content": "4"}]},
    {"question": "long " * 100},
    *({"messages": turns(f"Question {n}?", "no", f"And {n}?", "no")} for n in range(6)),
]
REFUSED = {"no_user_turn": 1, "prompt_too_long": 1, "tools_not_answered": 2, "unknown_form": 1}
NUM_ANSWERS = 1 + 1 + 3 + 6 * 2
Run = Callable[..., Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def regenerate(folder: Path, tmp_path: Path) -> Run:
    (tmp_path / "src.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))

    def call(stub: StubServer | str, *more: object, out: str = "out.jsonl") -> Any:
        url = stub if isinstance(stub, str) else stub.url
        return CliRunner().invoke(app, [str(word) for word in words(folder, tmp_path, url, out, *more)])

    return call


def words(folder: Path, tmp_path: Path, url: str, out: str, *more: object) -> list[object]:
    places = (tmp_path / "src.jsonl", "--target", folder, "--out", tmp_path / out)
    return ["regenerate", *places, "--server", url, "--max-new-tokens", 100, "--retries", 5, *more]


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def whole(folder: Path, regenerate: Run, tmp_path: Path) -> bytes:
    """The file of a call in which nothing goes wrong."""
    with StubServer(folder) as stub:
        assert regenerate(stub, out="whole.jsonl").exit_code == 0
    return (tmp_path / "whole.jsonl").read_bytes()


def test_every_turn_is_answered_after_the_targets_own_answers(folder: Path, regenerate: Run, tmp_path: Path) -> None:
    with StubServer(folder) as stub:
        result = regenerate(stub, "--json")
        assert result.exit_code == 0, result.output
    counts = json.loads(result.stdout)
    assert (counts["answered"], counts["already_answered"], counts["duplicates"]) == (NUM_ANSWERS, 0, 1)
    assert (counts["cut"], counts["from_text"], counts["unanswered"], counts["refused"]) == (0, 0, 0, REFUSED)
    assert len(stub.bodies) == NUM_ANSWERS, "the same prompt is asked once"
    found, encoder = records(tmp_path / "out.jsonl"), ChatEncoder(folder)
    talk = [record for record in found if record["messages"][0]["content"] == "Be odd."]
    assert [len(record["messages"]) for record in talk] == [2, 4, 6]
    assert [m["content"] for m in talk[2]["messages"]] == [
        "Be odd.", "Hi.", talk[0]["answer"], "What now?", talk[1]["answer"], "Bye.",
    ]  # fmt: skip
    for record in found:
        messages = [Message(message["role"], message["content"]) for message in record["messages"]]
        ids = [*encoder.encode_prompt([*messages]), *record["answer_token_ids"]]
        text = encoder._render([*messages, Message("assistant", record["answer"])], tools=(), generation_prompt=False)
        assert ids == encoder._tokenize([text])[0][: len(ids)]
        assert record["answer_token_ids"][-1] == STOP
        assert "Be odd." in record["answer"] or record["answer"].endswith(record["messages"][-1]["content"])


def test_its_records_are_those_of_the_local_path_and_prepare_reads_them(folder: Path, regenerate: Run, tmp_path: Path) -> None:
    with StubServer(folder) as stub:
        regenerate(stub)
    found = records(tmp_path / "out.jsonl")
    local = ["messages", "answer", "answer_token_ids", "finish", "target_fingerprint", "options", "key"]
    assert all(list(record) == local for record in found)
    drawn = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "seed": None}
    assert found[0]["options"] == {"served_model": "tiny", "max_new_tokens": 100, "stop_token_ids": [STOP], **drawn}
    made = ["prepare", tmp_path / "out.jsonl", "--target", folder, "--out", tmp_path / "corpus", "--json"]
    result = CliRunner().invoke(app, [str(word) for word in made])
    assert result.exit_code == 0, result.output
    meta = json.loads(result.stdout)
    assert meta["num_supervised"] == sum(len(record["answer_token_ids"]) for record in found)
    assert (meta["num_documents"], meta["num_joined"]) == (9, NUM_ANSWERS - 9), "one document for each conversation"
    assert [CorpusStore.open(tmp_path / "corpus").origin(place)[1] for place in range(3)] == [1, 2, 5]


@pytest.mark.parametrize("concurrency", [1, 7])
def test_lines_are_in_the_order_of_the_sources_whoever_is_done_first(
    folder: Path, regenerate: Run, tmp_path: Path, concurrency: int
) -> None:
    expected = whole(folder, regenerate, tmp_path)
    pauses = random.Random(concurrency)
    with StubServer(folder, slow=lambda number: pauses.uniform(0.02, 0.08)) as stub:
        result = regenerate(stub, "--concurrency", concurrency)
        assert result.exit_code == 0
        assert concurrency // 2 < stub.most_at_once <= concurrency
    assert (tmp_path / "out.jsonl").read_bytes() == expected
    asked = [record["messages"][-1]["content"] for record in records(tmp_path / "out.jsonl")]
    assert asked[:5] == ["Count to three.", "Why is the sky blue?", "Hi.", "What now?", "Bye."]


@pytest.mark.parametrize("style", ["sglang", "plain"])
def test_other_servers_give_the_same_file(folder: Path, regenerate: Run, tmp_path: Path, style: str) -> None:
    expected = whole(folder, regenerate, tmp_path)
    with StubServer(folder, style=style) as stub:
        result = regenerate(stub)
    assert (tmp_path / "out.jsonl").read_bytes() == expected
    assert ("came as text, without token ids" in result.stdout) == (style == "plain")


def test_faults_leave_no_trace(folder: Path, regenerate: Run, tmp_path: Path) -> None:
    expected = whole(folder, regenerate, tmp_path)
    kinds = ["500", None, "429", None, None, "disconnect", None, "garbage", "torn", None]
    with StubServer(folder, fault=lambda number, body: kinds[number % len(kinds)]) as stub:
        result = regenerate(stub, "--concurrency", 4)
        assert result.exit_code == 0, result.output
        assert len(stub.bodies) > NUM_ANSWERS
    assert (tmp_path / "out.jsonl").read_bytes() == expected


@pytest.mark.parametrize("style", ["vllm", "sglang", "plain"])
@pytest.mark.parametrize("keep", [False, True])
def test_thoughts_are_in_the_answer_and_where_the_template_wants_them(
    folder: Path, regenerate: Run, tmp_path: Path, style: str, keep: bool
) -> None:
    arguments = ("--template-arg", f"keep_thoughts={json.dumps(keep)}")
    with StubServer(folder, style=style, think=True) as stub:
        result = regenerate(stub, *arguments)
        assert result.exit_code == 0, result.output
        assert f"--template-arg keep_thoughts={json.dumps(keep)} --out DIR" in result.stdout
        second = next(body for body in stub.bodies if body["messages"][-1]["content"] == "And 0?")
        prompt = ChatEncoder(folder)._tokenizer.decode(stub.prompt_ids(second))
    assert ("a thought of" in prompt) == keep
    found = records(tmp_path / "out.jsonl")
    assert all(record["answer"].startswith("<think>\na thought of ") for record in found)
    assert all(record["message"]["content"].startswith("answer ") for record in found)
    assert all(record["message"]["reasoning_content"].startswith("a thought of ") for record in found)
    made = ["prepare", tmp_path / "out.jsonl", "--target", folder, *arguments, "--out", tmp_path / "corpus", "--json"]
    meta = json.loads(CliRunner().invoke(app, [str(word) for word in made]).stdout)
    assert meta["num_supervised"] == sum(len(record["answer_token_ids"]) for record in found)
    assert meta["num_documents"] == (9 if keep else NUM_ANSWERS), "thoughts that are dropped keep turns apart"


@pytest.mark.parametrize("style", ["vllm", "sglang", "plain"])
@pytest.mark.parametrize("think", [False, True])
def test_a_cut_answer_is_kept_and_is_the_last(folder: Path, regenerate: Run, tmp_path: Path, style: str, think: bool) -> None:
    with StubServer(folder, style=style, think=think) as stub:
        result = regenerate(stub, "--max-new-tokens", 12, "--json")
    if style == "plain" and think:
        assert "give no answer (refused: {'cut_in_thought': 10," in result.stderr, "half a thought as text has no known form"
        return
    counts, found = json.loads(result.stdout), records(tmp_path / "out.jsonl")
    assert len(found) == counts["answered"] == counts["cut"] == 9
    assert all(record["finish"] == "length" and len(record["answer_token_ids"]) == 12 for record in found)
    assert all(len(record["messages"]) <= 2 for record in found)
    assert not any(STOP in record["answer_token_ids"] for record in found)


def test_drawn_answers(folder: Path, regenerate: Run, tmp_path: Path) -> None:
    drawing = ("--temperature", 0.7, "--top-p", 0.9, "--top-k", 20, "--seed", 3)
    with StubServer(folder) as stub:
        assert regenerate(stub, *drawing).exit_code == 0
        assert all(
            (body["temperature"], body["top_p"], body["top_k"], body["seed"]) == (0.7, 0.9, 20, 3) for body in stub.bodies
        )
        assert records(tmp_path / "out.jsonl")[0]["options"]["seed"] == 3
        other = regenerate(stub, *drawing[:-1], 4)
    assert other.exit_code == 2
    assert "was answered in another way than now" in other.stderr


def start(folder: Path, tmp_path: Path, url: str, *more: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "slipstream.cli.main", *words(folder, tmp_path, url, "out.jsonl", *more)]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # in a shell's background it is ignored, by children too
    try:
        return subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("stop", "code"),
    [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 143), (signal.SIGINT, 130)],
    ids=lambda x: str(int(x)),
)
def test_stopped_in_the_middle_it_goes_on_to_the_same_file(
    folder: Path, regenerate: Run, tmp_path: Path, stop: signal.Signals, code: int
) -> None:
    expected, out = whole(folder, regenerate, tmp_path), tmp_path / "out.jsonl"
    with StubServer(folder, slow=lambda number: 0.0 if number <= 8 else 3.0) as stub:
        process = start(folder, tmp_path, stub.url, "--concurrency", 3)
        deadline = time.monotonic() + 60
        while process.poll() is None and (not out.exists() or out.read_bytes().count(b"\n") < 8):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(stop)
        said = process.communicate(timeout=60)
    assert process.returncode == code, said
    assert "Traceback" not in said[1]
    assert out.read_bytes().count(b"\n") == 8
    with out.open("ab") as file:
        file.write(expected.splitlines(keepends=True)[-1][:40])
    with StubServer(folder) as stub:
        result = regenerate(stub, "--json")
        assert result.exit_code == 0, result.output
        assert len(stub.bodies) == NUM_ANSWERS - 8, "what is there is not asked for"
        assert out.read_bytes() == expected
        counts = json.loads(result.stdout)
        assert (counts["answered"], counts["already_answered"]) == (NUM_ANSWERS - 8, 8)
        assert "0 answered" in regenerate(stub).stdout
        assert len(stub.bodies) == NUM_ANSWERS - 8
    assert out.read_bytes() == expected


def test_a_server_that_dies_ends_the_call_in_words(folder: Path, regenerate: Run, tmp_path: Path) -> None:
    expected, stubs = whole(folder, regenerate, tmp_path), []

    def fault(number: int, body: dict[str, Any]) -> str | None:
        if number == 5:
            stubs[0]._http.socket.close()
        return "disconnect" if number >= 5 else None

    with StubServer(folder, fault=fault) as stub:
        stubs.append(stub)
        result = regenerate(stub, "--concurrency", 1, "--retries", 1)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: {stub.url} cannot be reached any more: ConnectError")
    assert f"what was answered is in {tmp_path / 'out.jsonl'}, and the same call goes on from there" in result.stderr
    assert len(records(tmp_path / "out.jsonl")) == 4
    with StubServer(folder) as again:
        assert regenerate(again).exit_code == 0
    assert (tmp_path / "out.jsonl").read_bytes() == expected


def test_what_the_server_fails_on_is_left_and_counted(folder: Path, regenerate: Run, tmp_path: Path) -> None:
    expected = whole(folder, regenerate, tmp_path)
    with StubServer(
        folder, fault=lambda number, body: "500" if body["messages"][-1]["content"] == "What now?" else None
    ) as stub:
        result = regenerate(stub, "--retries", 1)
    assert result.exit_code == 1
    assert "unanswered: 1 conversations that the server failed on; the same call asks again" in result.stdout
    assert f"{NUM_ANSWERS - 2} answered" in result.stdout
    with StubServer(folder) as stub:
        assert regenerate(stub).exit_code == 0
        assert len(stub.bodies) == 2
    assert (tmp_path / "out.jsonl").read_bytes() == expected


def test_a_server_that_fails_on_everything_is_not_asked_forever(folder: Path, regenerate: Run, tmp_path: Path) -> None:
    with StubServer(folder, fault=lambda number, body: "500") as stub:
        result = regenerate(stub, "--retries", 0, "--concurrency", 2)
        assert len(stub.bodies) <= 10
    assert result.exit_code == 1
    assert "failed on 8 requests in a row, the last time with: 500" in result.stderr
    assert not (tmp_path / "out.jsonl").exists()


def test_a_prompt_that_the_server_refuses_is_counted(folder: Path, regenerate: Run) -> None:
    with StubServer(folder, fault=lambda number, body: "400" if "sky" in body["messages"][-1]["content"] else None) as stub:
        counts = json.loads(regenerate(stub, "--json").stdout)
    assert counts["refused"] == {**REFUSED, "server_refused": 2}
    assert counts["answered"] == NUM_ANSWERS - 1


def test_the_key_is_read_from_the_environment(
    folder: Path, regenerate: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUR_KEY", "a-secret")
    with StubServer(folder) as stub:
        assert regenerate(stub, "--api-key-env", "OUR_KEY").exit_code == 0
        assert {headers["authorization"] for headers in stub.headers} == {"Bearer a-secret"}
        assert "a-secret" not in (tmp_path / "out.jsonl").read_text()
        monkeypatch.delenv("OUR_KEY")
        result = regenerate(stub, "--api-key-env", "OUR_KEY", out="other.jsonl")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--api-key-env = 'OUR_KEY': is not set" in result.stderr


def test_refusals_name_the_value_the_rule_and_the_key(folder: Path, regenerate: Run, tmp_path: Path) -> None:
    with StubServer(folder, name="another") as stub:
        stub.root = "elsewhere"
        cases: list[tuple[tuple[object, ...], str]] = [
            ((), f"--target = '{folder}': is not what {stub.url} serves (it serves another;"),
            (("--served-model", "tiny"), f"--served-model = 'tiny': is not what {stub.url} serves"),
            (("--local",), "--local or --server = '" + stub.url + "': cannot both answer"),
            (("--batch-size", 4), "--batch-size = 4: belongs to --local"),
            (("--dtype", "float32"), "--dtype = 'float32': belongs to --local"),
            (("--device", "cpu"), "--device = 'cpu': belongs to --local"),
            (("--seed", 1), "--seed = 1: has no effect at temperature 0"),
            (("--top-p", 0.5, "--temperature", 0), "--top-p = 0.5: has no effect at temperature 0"),
            (("--max-new-tokens", 511, "--served-model", "another"), "give no answer (refused: {"),
        ]
        for more, said in cases:
            result = regenerate(stub, *more)
            assert (result.exit_code, result.stdout) == (2, ""), result.output
            assert said in result.stderr
        assert stub.bodies == []
        assert regenerate(stub, "--served-model", "another", "--limit", 1).exit_code == 0
    (tmp_path / "out.jsonl").unlink()
    gone = regenerate(stub)
    assert gone.exit_code == 2
    assert f"--server = '{stub.url}': gives no list of models: ConnectError" in gone.stderr
    assert not (tmp_path / "out.jsonl").exists()
