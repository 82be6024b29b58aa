"""The client of a server: what passes is waited out, what does not is said, and another prompt than the target's is refused."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import closing
from pathlib import Path
from socket import socket
from typing import Any, TypeVar

import pytest

from served_stub import STOP, TEMPLATE, StubServer, write_target
from slipstream.corpus.chat import ChatEncoder
from slipstream.corpus.conversation import Message
from slipstream.errors import ServerFailed, TargetError
from slipstream.target.answer_file import Prompt
from slipstream.target.served import Reply, Request, RequestFailed, RequestRefused, Server

R = TypeVar("R")
REQUEST = Request(model="tiny", max_new_tokens=64, stop_token_ids=(STOP,))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def prompt(folder: Path) -> Prompt:
    messages = [Message("user", "Why?")]
    return Prompt(token_ids=tuple(ChatEncoder(folder).encode_prompt(messages)), messages=(messages[0].as_dict(),))


def ask(url: str, use: Callable[[Server], Coroutine[Any, Any, R]], **given: Any) -> R:
    async def main() -> R:
        async with Server(url, **{"first_wait_seconds": 0.01, "retries": 4, **given}) as server:
            return await use(server)

    return asyncio.run(main())


def answer(stub: StubServer | str, prompt: Prompt, *, request: Request = REQUEST, **given: Any) -> Reply:
    url = stub if isinstance(stub, str) else stub.url
    return ask(url, lambda server: server.answer(prompt, request=request), **given)


def free_port() -> int:
    with closing(socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@pytest.mark.parametrize("fault", ["500", "503", "429", "408", "disconnect", "garbage", "torn"])
def test_faults_that_pass_are_waited_out(folder: Path, prompt: Prompt, fault: str) -> None:
    with StubServer(folder) as well:
        expected = answer(well, prompt)
    with StubServer(folder, fault=lambda number, body: fault if number < 4 else None) as stub:
        assert answer(stub, prompt) == expected
        assert len(stub.bodies) == 4
        assert all(body == stub.bodies[0] for body in stub.bodies)


def test_patience_ends(folder: Path, prompt: Prompt) -> None:
    with StubServer(folder, fault=lambda number, body: "500") as stub:
        with pytest.raises(RequestFailed, match=r"500 .*scripted 500"):
            answer(stub, prompt)
        assert len(stub.bodies) == 5
        with pytest.raises(RequestFailed):
            answer(stub, prompt, retries=0)
        assert len(stub.bodies) == 6


def test_a_slow_answer_is_asked_for_again(folder: Path, prompt: Prompt) -> None:
    with StubServer(folder, slow=lambda number: 1.0 if number == 1 else 0.0) as stub:
        assert answer(stub, prompt, timeout_seconds=0.4).finish == "stop"
        assert len(stub.bodies) == 2


def test_pauses_grow(folder: Path, prompt: Prompt) -> None:
    def seconds(first_wait: float) -> float:
        with StubServer(folder, fault=lambda number, body: "500" if number < 4 else None) as stub:
            began = time.monotonic()
            answer(stub, prompt, first_wait_seconds=first_wait)
            return time.monotonic() - began

    # 0.1 + 0.2 + 0.4 s, each shortened by half at most.
    assert seconds(0.1) >= 0.35


@pytest.mark.parametrize("status", ["400", "413", "422"])
def test_a_prompt_that_is_refused_is_not_asked_again(folder: Path, prompt: Prompt, status: str) -> None:
    with StubServer(folder, fault=lambda number, body: status) as stub:
        with pytest.raises(RequestRefused, match=f"{status} .*scripted"):
            answer(stub, prompt)
        assert len(stub.bodies) == 1


@pytest.mark.parametrize(("status", "said"), [("401", "--api-key-env"), ("403", "refuses us"), ("404", "does not know")])
def test_what_only_the_user_can_change(folder: Path, prompt: Prompt, status: str, said: str) -> None:
    with StubServer(folder, fault=lambda number, body: status) as stub, pytest.raises(TargetError, match=said):
        answer(stub, prompt)


def test_nobody_there(prompt: Prompt) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(TargetError, match="gives no list of models: ConnectError") as caught:
        ask(url, lambda server: server.find_model("tiny", key="--target"))
    assert (caught.value.key, caught.value.value) == ("--server", url)
    with pytest.raises(ServerFailed, match=f"{url} cannot be reached any more"):
        answer(url, prompt)


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://host:port", "http://"])
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(TargetError, match="is no address"):
        ask(url, lambda server: server.find_model("tiny", key="--target"))


def test_a_model_is_found_by_its_name_or_by_what_was_loaded(folder: Path) -> None:
    with StubServer(folder) as stub:
        for url in (stub.url, stub.url + "/", stub.url + "/v1", stub.url + "/v1/"):
            for name in ("tiny", str(folder)):
                model = ask(url, lambda server, name=name: server.find_model("another", name, key="--target"))  # type: ignore[misc]
                assert (model.name, model.longest) == ("tiny", 512)
        with pytest.raises(TargetError, match=r"--target = 'big': is not what .* serves \(it serves tiny; .*--served-model"):
            ask(stub.url, lambda server: server.find_model("big", key="--target"))


def test_a_server_of_something_else_is_no_server(folder: Path) -> None:
    with StubServer(folder) as stub:
        stub.models = lambda: {"models": []}  # type: ignore[method-assign]
        with pytest.raises(TargetError, match="gives no list of models"):
            ask(stub.url, lambda server: server.find_model("tiny", key="--target"))
        with pytest.raises(TargetError, match="does not know /v1/models"):
            ask(stub.url + "/elsewhere", lambda server: server.find_model("tiny", key="--target"))


@pytest.mark.parametrize("style", ["vllm", "sglang", "plain"])
def test_a_server_that_renders_another_prompt_is_refused(folder: Path, prompt: Prompt, tmp_path: Path, style: str) -> None:
    longer = write_target(
        tmp_path / "longer", template=TEMPLATE.replace("assistant\n{% endif %}", "assistant\n<think>{% endif %}")
    )
    with (
        StubServer(longer, style=style) as stub,
        pytest.raises(TargetError, match="tokens where the target's own chat template"),
    ):
        answer(stub, prompt)
    other = write_target(tmp_path / "other", template=TEMPLATE.replace("<|im_end|>", "<|im_start|>"))
    with StubServer(other, style=style) as stub:
        if style == "plain":
            assert answer(stub, prompt).finish == "stop", "only its number of tokens is told, which is right"
        else:
            with pytest.raises(TargetError, match="token 1 at place 10 where the target's own chat template gives 2"):
                answer(stub, prompt)


def test_nothing_of_the_drawing_is_left_to_the_servers_defaults(folder: Path, prompt: Prompt) -> None:
    drawn = Request("tiny", 8, (STOP, 9), {"keep_thoughts": True}, temperature=0.7, top_p=0.9, top_k=20, seed=3)
    with StubServer(folder) as stub:
        answer(stub, prompt, api_key="secret")
        answer(stub, prompt, request=drawn)
        plain, second = stub.bodies
        assert [headers.get("authorization") for headers in stub.headers] == ["Bearer secret", None]
    assert plain == {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Why?"}],
        "max_tokens": 64,
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop_token_ids": [STOP],
        "return_token_ids": True,
        "stream": False,
    }
    changed = {"max_tokens": 8, "temperature": 0.7, "top_p": 0.9, "top_k": 20, "seed": 3, "stop_token_ids": [STOP, 9]}
    assert second == {**plain, **changed, "chat_template_kwargs": {"keep_thoughts": True}}
