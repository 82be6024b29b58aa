"""Nothing may be left behind: no file descriptor, no thread, no process."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator

import psutil
import pytest


def _held() -> tuple[int, set[str], int]:
    gc.collect()
    threads = {thread.name for thread in threading.enumerate()}
    return len(os.listdir("/proc/self/fd")), threads, len(psutil.Process().children())


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    before = _held()
    yield
    assert _held() == before
