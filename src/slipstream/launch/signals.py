"""SIGTERM as an exception, so that what is entered is left in order. Imports nothing but the standard library."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn


@contextmanager
def sigterm_raises(make: Callable[[], BaseException]) -> Iterator[None]:
    """While entered, SIGTERM raises `make()` where the main thread is, as Ctrl-C raises `KeyboardInterrupt`.

    Does nothing in another thread, where no handler may be set.
    """

    def terminate(number: int, frame: FrameType | None) -> NoReturn:
        raise make()

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
