"""A source that makes its packs itself, ahead of their uses: what the colocated transports on CUDA share.

A take makes the packs that are missing for the next uses, one after another, launched before the caller's own work, until the
one that is asked for was found whole. How far ahead, where packs lie and how they are checked is each transport's own.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

from slipstream.device.completer import Background
from slipstream.errors import TransportClosed, TransportError
from slipstream.records import HiddenPack
from slipstream.transport.ends import SourceStats
from slipstream.transport.ledger import Assignment, QueueDepth
from slipstream.transport.local_link import LocalLink
from slipstream.transport.operations import DeviceSlot


class MakingSource(ABC):
    """The `take` of a `HiddenSource` over packs that `produce(assignment, slot)` makes, on the calling thread's stream."""

    def __init__(self, *, produce: Callable[[Assignment, DeviceSlot], None], link: LocalLink, background: Background) -> None:
        self._produce, self._link = produce, link
        self._changed = background.condition()
        self._failure: Exception | None = None
        self._closed = False

    def take(self, pack_id: int) -> HiddenPack:
        """The pack, made now if it was not before, and those of the next uses. Contract: `HiddenSource.take`."""
        started = time.perf_counter()
        try:
            while True:
                with self._changed:
                    taken = self._look(pack_id)
                    assignment = self._next()
                    if assignment is None:
                        if taken is not None:
                            return taken
                        self._wait(pack_id)
                        continue
                self._make(assignment)
        finally:
            self._link.shelf.waiting_seconds += time.perf_counter() - started

    def stats(self) -> SourceStats:
        """So far; waiting is the time in which packs were launched and awaited."""
        with self._changed:
            return self._link.shelf.stats()

    def depths(self) -> dict[int, QueueDepth]:
        """The queue between target and drafter, now. From any thread."""
        with self._changed:
            return self._link.depths()

    @abstractmethod
    def _found(self, pack_id: int) -> HiddenPack | None:
        """The pack, taken, if it was found whole; starts what can be started on the way. `changed` is held, as below."""

    @abstractmethod
    def _missing(self) -> Iterable[int]:
        """Packs of the next uses that do not lie in their slots, those on their way there included."""

    @property
    @abstractmethod
    def _is_checking(self) -> bool:
        """Whether something is under way, beside packs that are being made, that could bring one."""

    @abstractmethod
    def _begin(self, assignment: Assignment) -> DeviceSlot:
        """Where to write it."""

    @abstractmethod
    def _cancel(self, assignment: Assignment) -> None:
        """It was begun, and will not be written to the end."""

    @abstractmethod
    def _seal(self, assignment: Assignment) -> None:
        """It was given to the device."""

    def _look(self, pack_id: int) -> HiddenPack | None:
        if self._closed:
            raise TransportClosed("the transport of this process is closed")
        taken = self._found(pack_id)
        if taken is None and self._failure is not None:
            raise self._failure
        return taken

    def _next(self) -> Assignment | None:
        """The pack to make now: while any is missing, the next of the order, if its slot is free."""
        missing = any(pack_id not in self._link.in_flight for pack_id in self._missing())
        return self._link.issue() if missing else None

    def _make(self, assignment: Assignment) -> None:
        slot = self._begin(assignment)
        try:
            self._produce(assignment, slot)
        except BaseException:
            self._cancel(assignment)
            with self._changed:
                self._link.give_up(assignment)  # a caller that catches it and takes again gets the pack issued again
            raise
        self._seal(assignment)

    def _wait(self, pack_id: int) -> None:
        """Sleep until something has landed. TransportError if nothing is on its way that could bring the pack."""
        if not (self._link.in_flight or self._is_checking):
            raise TransportError(f"pack {pack_id} cannot come: it is not in the rest of the order, or its slot is still held")
        self._changed.wait()

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._failure = error
            self._changed.notify_all()
