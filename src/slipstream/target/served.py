"""The target's answers from a server that speaks OpenAI's chat completions: SGLang, vLLM.

The server renders the chat template and draws the tokens; what it rendered must be the prompt that the target's own folder
gives, token by token where it says its tokens (`return_token_ids`), in their number otherwise. Defaults of sampling that a
server takes from the model's files are overridden. Faults that pass (429, 5xx, timeouts, broken connections) are waited out.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import httpx2

from slipstream.errors import ServerFailed, TargetError
from slipstream.target.answer_file import Prompt

CONNECT_SECONDS = 10.0
LONGEST_WAIT_SECONDS = 30.0
PASSING = (408, 425, 429)
"""Statuses below 500 that the same request can get over."""
NOT_ALLOWED = (401, 403)
QUOTED = 300
"""Characters of what a server said that a message repeats."""


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked of the server besides a prompt. Temperature 0 takes the likeliest token; without a seed chance decides."""

    model: str
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """What the server answered: text and thoughts as it parted them, its token ids if it gave them, and why it ended.

    `matched_stop` is the stop token where the server names it apart.
    """

    content: str
    reasoning: str
    token_ids: tuple[int, ...] | None
    finish: str
    matched_stop: int | None


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model by the name that requests use; `longest` is its longest sequence in tokens, where the server says it."""

    name: str
    longest: int | None


class RequestRefused(Exception):
    """The server will not answer this prompt, today or tomorrow."""


class RequestFailed(Exception):
    """The server was there but failed on this request until patience ended."""


class _Fault(Exception):
    """A failure that may pass. `reached` tells whether the server answered at all, `wait` how long it asks to wait."""

    def __init__(self, said: str, *, reached: bool, wait: float | None = None) -> None:
        self.said, self.reached, self.wait = said, reached, wait
        super().__init__(said)


class Server:
    """A connection to one server, a context. `url` with or without `/v1`; `retries` after the first try of each request."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout_seconds: float = 1200.0,
        retries: int = 8,
        concurrency: int = 64,
        first_wait_seconds: float = 0.5,
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._retries, self._first_wait = retries, first_wait_seconds
        try:
            parts = httpx2.URL(self.url)
        except httpx2.InvalidURL as error:
            raise TargetError(key="--server", value=url, rule=f"is no address: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.host:
            raise TargetError(key="--server", value=url, rule="is no address of a server", hint="http://HOST:PORT")
        self._client = httpx2.AsyncClient(
            headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
            timeout=httpx2.Timeout(timeout_seconds, connect=CONNECT_SECONDS, pool=None),
            limits=httpx2.Limits(max_connections=concurrency, max_keepalive_connections=concurrency),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.aclose()

    async def find_model(self, *names: str, key: str) -> ServedModel:
        """The model that the server lists under one of these names, or as loaded from one of them.

        Raises `TargetError`, naming the option `key`, when it serves another one, and when it cannot be reached.
        """
        try:
            listed = await self._ask("GET", "/v1/models", None, retries=min(self._retries, 1))
            models = [dict(model) for model in listed["data"]]
        except (_Fault, RequestRefused, KeyError, TypeError, ValueError) as error:
            raise TargetError(key="--server", value=self.url, rule=f"gives no list of models: {_said(error)}") from error
        for model in models:
            if model.get("id") in names or model.get("root") in names:
                longest = model.get("max_model_len")
                return ServedModel(name=str(model["id"]), longest=longest if isinstance(longest, int) else None)
        served = ", ".join(str(model.get("id")) for model in models) or "nothing"
        hint = f"it serves {served}; if that is the target, --served-model says so"
        raise TargetError(key=key, value=names[0], rule=f"is not what {self.url} serves", hint=hint)

    async def answer(self, prompt: Prompt, *, request: Request) -> Reply:
        """The model's answer to a prompt.

        Raises `RequestRefused` and `RequestFailed` for this prompt; `ServerFailed` when the server can no longer be reached;
        `TargetError` when it wants another key, knows no chat completions, or renders another prompt than the target.
        """
        try:
            said = await self._ask("POST", "/v1/chat/completions", _body(prompt, request), retries=self._retries)
        except _Fault as fault:
            if fault.reached:
                raise RequestFailed(fault.said) from fault
            raise ServerFailed(f"{self.url} cannot be reached any more: {fault.said}") from fault
        self._check_prompt(said, prompt=prompt)
        return _reply(said)

    async def _ask(self, method: str, path: str, body: Mapping[str, Any] | None, *, retries: int) -> Any:
        """A request, tried again with growing pauses. Raises the last `_Fault`, or what no patience changes."""
        for attempt in range(retries + 1):
            try:
                return await self._try(method, path, body)
            except _Fault as fault:
                if attempt == retries:
                    raise
                # Pauses differ at random: many requests that failed together must not come back together.
                pause = min(LONGEST_WAIT_SECONDS, self._first_wait * 2.0**attempt) * random.uniform(0.5, 1.0)
                await asyncio.sleep(pause if fault.wait is None else max(fault.wait, pause))
        raise AssertionError("a loop that returns or raises")

    async def _try(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        try:
            response = await self._client.request(method, self.url + path, json=body)
        except httpx2.TransportError as error:
            # A connection that broke while the answer was read reached somebody, as a timeout of reading did.
            reached = not isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout | httpx2.UnsupportedProtocol)
            raise _Fault(f"{type(error).__name__} {error}".strip(), reached=reached) from error
        said = f"{response.status_code} {_quoted(response.text)}"
        if response.status_code in NOT_ALLOWED:
            hint = "--api-key-env names the variable that holds the key"
            raise TargetError(key="--server", value=self.url, rule=f"refuses us: {said}", hint=hint)
        if response.status_code in PASSING or response.status_code >= 500:
            raise _Fault(said, reached=True, wait=_seconds(response.headers.get("retry-after")))
        if response.status_code == 404:
            raise TargetError(key="--server", value=self.url, rule=f"does not know {path} or the model: {said}")
        if response.status_code >= 400:
            raise RequestRefused(said)
        try:
            answered = response.json()
            if method == "POST":
                _reply(answered)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise _Fault(f"is not an answer: {_quoted(response.text)}", reached=True) from error
        return answered

    def _check_prompt(self, said: Any, *, prompt: Prompt) -> None:
        ours = list(prompt.token_ids)
        theirs = said["choices"][0].get("prompt_token_ids") or said.get("prompt_token_ids")
        number = len(theirs) if theirs else (said.get("usage") or {}).get("prompt_tokens")
        if theirs == ours or (not theirs and number == len(ours)):
            return
        found = f"{number} tokens where the target's own chat template gives {len(ours)}"
        if theirs and len(theirs) == len(ours):
            place = next(place for place in range(len(ours)) if theirs[place] != ours[place])
            found = f"token {theirs[place]} at place {place} where the target's own chat template gives {ours[place]}"
        raise TargetError(
            key="--server",
            value=self.url,
            rule=f"renders another prompt: {found}",
            hint="it serves another model, or with another --chat-template or other arguments of it (--template-arg)",
        )


def _body(prompt: Prompt, request: Request) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": request.model,
        "messages": [_sent(message) for message in prompt.messages],
        "max_tokens": request.max_new_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop_token_ids": list(request.stop_token_ids),
        "return_token_ids": True,
        "stream": False,
    }
    if request.seed is not None:
        body["seed"] = request.seed
    if request.template_arguments:
        body["chat_template_kwargs"] = dict(request.template_arguments)
    return body


def _sent(message: Mapping[str, object]) -> dict[str, object]:
    """SGLang reads an earlier turn's thoughts as `reasoning_content`; vLLM as `reasoning`, and drops the other in silence."""
    thoughts = message.get("reasoning_content")
    return {**message, "reasoning": thoughts} if thoughts else dict(message)


def _reply(said: Any) -> Reply:
    choice = said["choices"][0]
    message, token_ids, matched = choice["message"], choice.get("token_ids"), choice.get("matched_stop")
    return Reply(
        content=_text(message.get("content")),
        reasoning=_text(message.get("reasoning_content") or message.get("reasoning")),
        token_ids=tuple(int(token) for token in token_ids) if token_ids else None,
        finish=str(choice.get("finish_reason")),
        matched_stop=matched if type(matched) is int else None,
    )


def _text(text: object) -> str:
    """Half of a surrogate pair, which JSON can spell and UTF-8 cannot, becomes a question mark."""
    if text is not None and not isinstance(text, str):
        raise TypeError(f"a text is {type(text).__name__}")
    return (text or "").encode(errors="replace").decode()


def _seconds(header: str | None) -> float | None:
    """What `Retry-After` asks for in seconds, at most two minutes; none for a date."""
    return min(120.0, float(header)) if header is not None and header.isdigit() else None


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, _Fault | RequestRefused) else "its answer is none"


def _quoted(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= QUOTED else line[: QUOTED - 3] + "..."
