"""Conversations answered by a server, many at once: each worker takes a talk and asks for its turns one after the other.

An answer counts when it is on disk. Which talk is done first is the server's affair; the file is put in order at the end.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from slipstream.corpus.conversation import Conversation, ConversationRefused, Message
from slipstream.errors import ServerFailed, SlipstreamError
from slipstream.launch.regeneration import Regeneration, Talk
from slipstream.target.answer_file import Answer, AnswerFile, Prompt
from slipstream.target.served import Reply, Request, RequestFailed, RequestRefused, Server

R = TypeVar("R")

FAILURES_IN_A_ROW = 8
"""So many requests that failed for good, none answered between them, and the server is taken for broken (or one a worker)."""


class _Unusable(Exception):
    """An answer that cannot be kept, and the reason that is counted."""


class _Writer:
    """Puts answers on disk in a thread: those that come while it writes go together in the next write."""

    def __init__(self, file: AnswerFile) -> None:
        self._file = file
        self._pending: list[tuple[Prompt, Answer]] = []
        self._writing = asyncio.Lock()

    async def write(self, prompt: Prompt, answer: Answer) -> None:
        """Returns when the answer is on disk."""
        self._pending.append((prompt, answer))
        async with self._writing:
            batch, self._pending = self._pending, []
            if batch:
                await asyncio.to_thread(self._file.append, batch)


class _Interview:
    """One call: the talks that wait, and the workers that take them."""

    def __init__(
        self,
        run: Regeneration,
        talks: Sequence[Talk],
        *,
        server: Server,
        request: Request,
        decode: Callable[[Sequence[int]], str],
        on_progress: Callable[[int, int], None],
    ) -> None:
        self._run, self._server, self._request = run, server, request
        self._decode, self._on_progress = decode, on_progress
        self._waiting: Iterator[Talk] = iter(talks)
        self._writer = _Writer(run.file)
        self._locks: dict[str, asyncio.Lock] = {}
        self._failures = 0

    async def work(self, *, num_workers: int) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(num_workers):
                group.create_task(self._worker(max_failures=max(FAILURES_IN_A_ROW, num_workers)))

    async def _worker(self, *, max_failures: int) -> None:
        for talk in self._waiting:
            while (prompt := self._run.next_prompt(talk)) is not None:
                try:
                    await self._answer(prompt)
                    self._run.hear(talk, prompt)
                except RequestRefused:
                    self._run.end(talk, reason="server_refused")
                except _Unusable as unusable:
                    self._run.end(talk, reason=str(unusable))
                except RequestFailed as failed:
                    self._run.leave(talk)
                    self._failures += 1
                    if self._failures >= max_failures:
                        raise ServerFailed(
                            f"{self._server.url} failed on {self._failures} requests in a row, the last time with: {failed}"
                        ) from failed
            self._on_progress(self._run.num_done, self._run.num_turns)

    async def _answer(self, prompt: Prompt) -> None:
        """See that the file has the answer. Who asks the same at the same time waits for the first."""
        key = self._run.file.key(prompt.token_ids)
        async with self._locks.setdefault(key, asyncio.Lock()):
            if key in self._run.file:
                return
            reply = await self._server.answer(prompt, request=self._request)
            self._failures = 0
            await self._writer.write(prompt, self._kept(prompt, reply))

    def _kept(self, prompt: Prompt, reply: Reply) -> Answer:
        if reply.finish not in ("stop", "length"):
            raise _Unusable(f"finish_{reply.finish}")
        cut = reply.finish == "length"
        stops = self._request.stop_token_ids
        ids = reply.token_ids
        if ids is None:
            ids = self._tokens_of_text(prompt, reply, cut=cut)
            self._run.count_from_text()
        elif not cut and ids[-1] not in stops and reply.matched_stop in stops:
            ids = (*ids, reply.matched_stop)
        text = self._decode(ids[:-1] if ids[-1] in stops else ids)
        message = {"role": "assistant", "content": reply.content}
        if reply.reasoning:
            message["reasoning_content"] = reply.reasoning
        plain = message == {"role": "assistant", "content": text}
        return Answer(token_ids=ids, text=text, finish="length" if cut else "stop", message=None if plain else message)

    def _tokens_of_text(self, prompt: Prompt, reply: Reply, *, cut: bool) -> tuple[int, ...]:
        """The tokens that the target's tokenizer makes of an answer, written by its chat template, thoughts included."""
        if cut and not reply.content:
            raise _Unusable("cut_in_thought")
        fields = {"reasoning_content": reply.reasoning} if reply.reasoning else {}
        asked = [_message(message) for message in prompt.messages]
        whole = Conversation(messages=(*asked, Message("assistant", reply.content, fields=fields)), source="", line=0)
        try:
            token_ids, loss_mask = self._run.encoder.encode(whole)
        except ConversationRefused as refused:
            raise _Unusable(refused.reject.reason.value) from refused
        start = len(prompt.token_ids)
        supervised = np.flatnonzero(loss_mask[start:])
        if tuple(token_ids[:start].tolist()) != prompt.token_ids or not len(supervised):
            raise _Unusable("rewritten_turns")
        ids = tuple(token_ids[start : start + int(supervised[-1]) + 1].tolist())
        # The template ends every answer with a stop token; the target did not end this one.
        return ids[:-1] if cut and ids[-1] in self._request.stop_token_ids else ids


async def answer_by_server(
    run: Regeneration,
    talks: Sequence[Talk],
    *,
    server: Server,
    request: Request,
    concurrency: int,
    decode: Callable[[Sequence[int]], str],
    on_progress: Callable[[int, int], None],
) -> None:
    """Have all talks answered into the file, `concurrency` requests at a time.

    What the server fails on is left and counted. Raises `ServerFailed` when it can no longer be reached, or fails on
    everything; what was answered until then is in the file.
    """
    interview = _Interview(run, talks, server=server, request=request, decode=decode, on_progress=on_progress)
    try:
        await interview.work(num_workers=concurrency)
    except BaseExceptionGroup as group:
        ours = group.subgroup(SlipstreamError)
        if ours is None:
            raise
        raise next(_leaves(ours)) from group


def run_until_signal(coroutine: Coroutine[Any, Any, R]) -> R:
    """Run to the end. SIGTERM cancels in order, as Ctrl-C does in any event loop, and then takes its former effect."""
    if threading.current_thread() is not threading.main_thread():
        return asyncio.run(coroutine)
    before, terminated = signal.getsignal(signal.SIGTERM), False

    async def main() -> R:
        task = asyncio.current_task()
        assert task is not None

        def terminate() -> None:
            nonlocal terminated
            terminated = True
            task.cancel()

        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminate)
        return await coroutine

    try:
        return asyncio.run(main())
    except asyncio.CancelledError:
        if not terminated:
            raise
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)
    signal.raise_signal(signal.SIGTERM)
    raise AssertionError("SIGTERM has no effect here, and was the reason to stop")


def _message(fields: dict[str, object]) -> Message:
    further = {name: value for name, value in fields.items() if name not in ("role", "content")}
    return Message(str(fields["role"]), str(fields["content"]), fields=further)


def _leaves(group: BaseExceptionGroup[SlipstreamError]) -> Iterator[SlipstreamError]:
    for inner in group.exceptions:
        if isinstance(inner, BaseExceptionGroup):
            yield from _leaves(inner)
        else:
            yield inner
