"""A consumer's connection to the broker: what every drafter's end shares, wherever it reads its slots."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection

from slipstream.errors import TransportError
from slipstream.records import HiddenPack
from slipstream.transport.connections import shut_down
from slipstream.transport.messages import SUPERVISOR_GONE, Closed, Leaving, Ready, ToBroker, ToConsumer

_LOG = logging.getLogger(__name__)
LEFT_HERE = Closed(reason="this end of the transport is closed")


class ConsumerEnd:
    """Owns `connection` and a thread that reads from it: `hear` is called with each pack that became ready.

    `changed` is held while it is, and notified afterwards, and when the other side closes.
    """

    def __init__(self, connection: Connection, *, changed: threading.Condition, hear: Callable[[Ready], None]) -> None:
        self._connection, self._changed, self._hear = connection, changed, hear
        self._closed: Closed | None = None
        self._sending = threading.Lock()
        self._reader = threading.Thread(target=self._read, name="transport-reader", daemon=True)
        self._reader.start()

    def check(self) -> None:
        """Raise TransportClosed or PeerDied if nothing more will come. `changed` is held."""
        if self._closed is not None:
            raise self._closed.error()

    def send(self, message: ToBroker) -> None:
        """Tell the broker, from any thread. TransportClosed or PeerDied if nobody is left to be told."""
        try:
            with self._sending:
                self._connection.send(message)
        except OSError as error:
            with self._changed:
                while self._closed is None:  # the reader is about to say why
                    self._changed.wait()
            raise self._closed.error() from error

    def close(self) -> None:
        """Leave in order; ends the reader thread. May be called twice."""
        if self._connection.closed:
            return
        with self._changed:
            self._closed = LEFT_HERE
            self._changed.notify_all()
        with self._sending, contextlib.suppress(OSError):  # nobody is left to say goodbye to
            self._connection.send(Leaving())
        shut_down(self._connection)
        self._reader.join()
        self._connection.close()

    def _read(self) -> None:
        """The reader thread: hears what the broker says until the connection ends."""
        try:
            while True:
                self._receive(self._connection.recv())
        except (EOFError, OSError):
            last = SUPERVISOR_GONE
        except Exception as error:  # a thread's border: a reader that died in silence would leave `take` waiting
            _LOG.exception("the transport reader failed")
            last = Closed(reason=f"the transport reader failed: {error!r}")
        with self._changed:
            self._closed = self._closed or last
            self._changed.notify_all()

    def _receive(self, message: ToConsumer) -> None:
        with self._changed:
            match message:
                case Ready():
                    self._hear(message)
                case Closed():
                    self._closed = self._closed or message
            self._changed.notify_all()


class OneTarget:
    """All packs of a run come from one target."""

    def __init__(self) -> None:
        self._fingerprint: str | None = None

    def check(self, taken: HiddenPack) -> None:
        """Raises TransportError for the first that does not."""
        self._fingerprint = self._fingerprint or taken.target_fingerprint
        if taken.target_fingerprint != self._fingerprint:
            raise TransportError(
                f"pack {taken.pack_id} comes from target {taken.target_fingerprint}, those before it from {self._fingerprint}"
            )
