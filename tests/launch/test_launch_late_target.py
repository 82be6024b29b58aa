"""What a target worker does too late is counted from its first packs on, named, and written into the run's metrics."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import pytest

from slipstream.launch.late_target import FIRST_PACKS, LateTarget


class Counter:
    """Counts that a test sets."""

    def __init__(self) -> None:
        self.now = {"recompiles": 0, "device_allocations": 10}
        self.named: list[str] = []
        self.closed = False

    def counts(self) -> Mapping[str, int]:
        return self.now

    def names(self) -> list[str]:
        named, self.named = self.named, []
        return named

    def close(self) -> None:
        self.closed = True


def test_what_grows_after_the_first_packs_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    work, told = Counter(), []
    late = LateTarget(work, put=told.append)
    for pack in range(FIRST_PACKS):
        work.now = {**work.now, "device_allocations": 11 + pack}
        work.named.append("kernel of warm-up")
        late.look(pack)
    late.look(90)
    assert told == []
    work.now = {"recompiles": 2, "device_allocations": 11 + FIRST_PACKS}
    work.named.append("graph 1/0")
    with caplog.at_level(logging.WARNING, logger="slipstream.launch.late_target"):
        late.look(91)
    late.look(92)
    assert told == [{"pack": 91, "recompiles": 2, "device_allocations": 1, "names": ["graph 1/0"]}]
    assert "by pack 91: 2 recompiles, 1 device_allocations (graph 1/0)" in caplog.text
    late.close()
    assert work.closed
