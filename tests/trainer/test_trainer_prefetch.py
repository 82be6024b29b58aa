"""Steps prepared ahead: in order, bounded, closed while blocked, errors where they are awaited."""

from __future__ import annotations

import threading

import pytest

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
