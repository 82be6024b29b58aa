"""Opens what a worker process records of its time: its account, and its spans if the recipe asks for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from slipstream.observe.accounts import Account, AccountWriter
from slipstream.observe.spans import SpanLog, WorkerFacts
from slipstream.runfolder import RunFolder


@contextmanager
def open_account(folder: RunFolder, facts: WorkerFacts, *, spans: bool) -> Iterator[Account]:
    """The account of a worker from here on, in state "load", written to the run folder while the context lasts.

    Of the process that answers validation prompts only spans are kept: it is over before the run is. Raises `OSError`.
    """
    name = f"{facts.worker}.jsonl"
    with ExitStack() as stack:
        log = stack.enter_context(SpanLog(facts, path=folder.spans / name)) if spans else None
        account = Account(facts.worker, spans=log, base="load")
        if facts.role != "answers":
            stack.enter_context(AccountWriter(account, path=folder.accounts / name))
        stack.callback(account.end)
        stack.callback(lambda: account.stages.close() if account.stages is not None else None)
        yield account
