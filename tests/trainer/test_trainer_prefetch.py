"""Steps prepared ahead: in order, bounded, closed while blocked, errors where they are awaited."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from slipstream.observe import Account, SpanLog, WorkerFacts
from slipstream.trainer.prefetch import PreparedStep, StepPrefetch


def step(index: int) -> PreparedStep:
    return PreparedStep(index=index, epoch=0, denominator=1.0, columns=())


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "step-prefetch"]


def test_in_order_and_all() -> None:
    with StepPrefetch(step, steps=range(3, 50), depth=2) as prefetch:
        assert [prepared.index for prepared in prefetch] == list(range(3, 50))
    assert not threads()


def test_never_further_ahead_than_its_depth() -> None:
    made: list[int] = []
    blocked = threading.Event()

    def prepare(index: int) -> PreparedStep:
        made.append(index)
        if index == 2:
            blocked.set()
        return step(index)

    with StepPrefetch(prepare, steps=range(100), depth=2) as prefetch:
        assert blocked.wait(timeout=30)
        for taken, prepared in enumerate(prefetch):
            assert prepared.index == taken
            assert len(made) <= taken + 1 + 2 + 1  # taken, two in the queue, one waiting to be put
            if taken == 20:
                break
    assert len(made) <= 25
    assert not threads()


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_closing_while_the_thread_waits_for_room(depth: int) -> None:
    for _ in range(20):
        with StepPrefetch(step, steps=range(1000), depth=depth) as prefetch:
            next(iter(prefetch))
    assert not threads()


def test_an_error_comes_after_the_steps_before_it() -> None:
    def prepare(index: int) -> PreparedStep:
        if index == 3:
            raise KeyError("no such document")
        return step(index)

    seen = []
    with pytest.raises(KeyError, match="no such document"), StepPrefetch(prepare, steps=range(9), depth=2) as prefetch:  # noqa: PT012
        for prepared in prefetch:
            seen.append(prepared.index)
    assert seen == [0, 1, 2]
    assert not threads()


def test_waits_are_told_apart_by_their_cause(tmp_path: Path) -> None:
    """Building takes 30 ms a step and the device 60 ms more, of which none is the builder's fault."""
    path = tmp_path / "spans.jsonl"
    with SpanLog(WorkerFacts(worker="drafter-0", role="drafter", rank=0, gpu=None), path=path) as spans:
        account = Account("drafter-0", spans=spans)

        def prepare(index: int) -> PreparedStep:
            time.sleep(0.03)
            return step(index)

        with StepPrefetch(prepare, steps=range(5), depth=2, account=account, room=lambda: time.sleep(0.06)) as prefetch:
            assert len(list(prefetch)) == 5
    _, states = account.read()
    assert states["wait_gpu"] > 4 * 60e6
    assert states["wait_loader"] > 4 * 30e6
    assert path.read_text().count('["loader","build",') == 5


def test_steps_that_lie_ready_cost_no_wait() -> None:
    account = Account("drafter-0")
    with StepPrefetch(step, steps=range(3), depth=3, account=account) as prefetch:
        while len(prefetch._ready) < 3:
            time.sleep(0.001)
        assert len(list(prefetch)) == 3
    assert set(account.read()[1]) == {"idle"}


def test_an_error_of_the_device_is_raised_where_steps_are_awaited() -> None:
    def room() -> None:
        raise RuntimeError("the device is lost")

    with pytest.raises(RuntimeError, match="lost"), StepPrefetch(step, steps=range(3), depth=2, room=room) as prefetch:
        next(iter(prefetch))
