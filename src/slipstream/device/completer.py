"""The thread that sleeps until the device has got somewhere, so that no loop has to. Waits for: events, in turn."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Protocol

from slipstream.device.streams import Event, Streams

_LOG = logging.getLogger(__name__)


class Completer(Protocol):
    """Does something once an event is reached."""

    def submit(self, event: Event, done: Callable[[], None]) -> None:
        """Call `done` when the event, recorded by now, is reached. Events of one completer are waited for in turn."""
        ...

    def close(self) -> None:
        """Do what was submitted, then end. May be called twice."""
        ...


class Background(Protocol):
    """Where completers and the locks that they share with a loop come from: threads, or a test that takes their steps."""

    def condition(self) -> threading.Condition:
        """What a loop waits on while completers work."""
        ...

    def completer(self, name: str, *, failed: Callable[[Exception], None]) -> Completer:
        """A completer at work. An error in what it does goes to `failed`."""
        ...


class Threads:
    """The background of a process on a device: a thread for each completer."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams

    def condition(self) -> threading.Condition:
        """Contract: `Background.condition`."""
        return threading.Condition()

    def completer(self, name: str, *, failed: Callable[[Exception], None]) -> Completer:
        """Contract: `Background.completer`."""
        return CompleterThread(streams=self._streams, name=name, failed=failed)


class CompleterThread:
    """A `Completer` with a thread of its own. An error in `done` goes to `failed`, and nothing more is done."""

    def __init__(self, *, streams: Streams, name: str, failed: Callable[[Exception], None]) -> None:
        self._streams, self._failed = streams, failed
        self._queue: queue.SimpleQueue[tuple[Event, Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, event: Event, done: Callable[[], None]) -> None:
        """Contract: `Completer.submit`. From any thread."""
        self._queue.put((event, done))

    def close(self) -> None:
        """Do what was submitted, then end the thread. May be called twice."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._streams.adopt_thread()
            while (item := self._queue.get()) is not None:
                event, done = item
                event.synchronize()
                done()
        except Exception as error:  # a thread's border: in silence, whoever waits for the work would wait for good
            _LOG.debug("%s ends", self._thread.name, exc_info=True)
            self._failed(error)
