"""Order between streams: the one helper, the model that judges, page-locking slot by slot, and a lint."""

from __future__ import annotations

import ast
import threading
from pathlib import Path

import pytest

import slipstream
from slipstream.device.completer import Threads
from slipstream.device.pinned import PinnedSlots
from slipstream.device.stream_model import ModelStreams, StreamModel, UnorderedAccess
from slipstream.errors import PreflightError

SOURCES = Path(slipstream.__file__).parent


@pytest.fixture
def streams() -> ModelStreams:
    return ModelStreams(StreamModel(), process="here")


def test_a_stream_cannot_be_ordered_after_itself(streams: ModelStreams) -> None:
    side = streams.side("copy")
    with streams.within(side), pytest.raises(AssertionError, match="captured too late"):
        streams.order(after=side, before=streams.current(), event=streams.event())
    streams.order(after=side, before=streams.current(), event=streams.event())


def test_a_read_must_be_ordered_after_its_write(streams: ModelStreams) -> None:
    side = streams.side("copy")
    streams.work(writes=["slot"])
    with streams.within(side), pytest.raises(UnorderedAccess, match=r"here.copy reads slot, written by here.compute"):
        streams.work(reads=["slot"])
    streams.order(after=side, before=streams.current(), event=streams.event())
    with streams.within(side):
        streams.work(reads=["slot"])


def test_an_overwrite_must_be_ordered_after_every_read(streams: ModelStreams) -> None:
    first, second, done = streams.side("first"), streams.side("second"), streams.event()
    streams.work(writes=["slot"])
    for side in (first, second):
        streams.order(after=side, before=streams.current(), event=streams.event())
        with streams.within(side):
            streams.work(reads=["slot"])
    streams.record(done, on=first)
    streams.wait(done, by=streams.current())
    with pytest.raises(UnorderedAccess, match=r"here.compute writes slot, read by here.second"):
        streams.work(writes=["slot"])


def test_an_event_carries_what_was_given_before_it_not_after(streams: ModelStreams) -> None:
    side, early = streams.side("copy"), streams.event()
    streams.record(early, on=streams.current())
    streams.work(writes=["slot"])
    streams.wait(early, by=side)
    with streams.within(side), pytest.raises(UnorderedAccess):
        streams.work(reads=["slot"])


def test_the_cpu_knows_what_it_has_waited_for(streams: ModelStreams) -> None:
    done = streams.event()
    assert done.query(), "never recorded, it counts as reached"
    streams.work(writes=["seal"])
    with pytest.raises(UnorderedAccess, match=r"here.cpu reads seal"):
        streams.look(reads=["seal"])
    streams.record(done, on=streams.current())
    done.synchronize()
    streams.look(reads=["seal"])
    side = streams.side("copy")
    with streams.within(side):
        streams.work(writes=["seal"])  # given by a CPU that knows


def test_processes_know_of_each_other_by_messages_alone() -> None:
    model = StreamModel()
    target, drafter = (ModelStreams(model, process=name) for name in ("target", "drafter"))
    done = target.event()
    target.work(writes=["slot"])
    target.record(done, on=target.current())
    done.synchronize()
    with pytest.raises(UnorderedAccess):
        drafter.work(reads=["slot"])
    drafter.cpu.learn(target.cpu.clock)
    drafter.work(reads=["slot"])


def test_a_completer_does_things_in_turn_and_hands_on_what_fails(streams: ModelStreams) -> None:
    done: list[int] = []
    failed: list[Exception] = []
    completer = Threads(streams).completer("test", failed=failed.append)
    for number in range(50):
        completer.submit(streams.event(), lambda number=number: done.append(number))  # type: ignore[misc]
    completer.submit(streams.event(), lambda: [][0])
    completer.submit(streams.event(), lambda: done.append(99))
    completer.close()
    completer.close()
    assert done == list(range(50)), "nothing is done after a failure"
    assert isinstance(failed[0], IndexError)
    assert all(thread.name != "test" for thread in threading.enumerate())


class FakeDriver:
    """Notes what is page-locked, and refuses one address."""

    def __init__(self, refused: int | None = None) -> None:
        self.refused = refused
        self.locked: dict[int, int] = {}
        self.order: list[int] = []

    def cudaHostRegister(self, ptr: int, size: int, flags: int) -> int:
        assert flags == 1
        if ptr == self.refused:
            return 2
        self.locked[ptr] = size
        self.order.append(ptr)
        return 0

    def cudaHostUnregister(self, ptr: int) -> int:
        del self.locked[ptr]
        return 0


SPANS = [(4096 * (1 + 3 * slot), 3 * 4096) for slot in range(5)]


def test_slots_are_page_locked_in_the_order_of_their_use_exactly_once() -> None:
    driver = FakeDriver()
    pinned = PinnedSlots(SPANS, order=[3, 0, 4], driver=driver)
    for slot in (0, 3, 4, 0):
        pinned.ensure(slot)
    pinned.ensure(1)  # not in the order: locked when it is needed
    assert driver.locked == {SPANS[slot][0]: SPANS[slot][1] for slot in (0, 1, 3, 4)}
    assert len(driver.order) == pinned.num_registered == 4
    pinned.close()
    pinned.close()
    assert driver.locked == {}


class BusyDriver(FakeDriver):
    """Each call takes until it is let go on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[int] = []
        self.called, self.go_on = threading.Semaphore(0), {address: threading.Event() for address, _ in SPANS}

    def cudaHostRegister(self, ptr: int, size: int, flags: int) -> int:
        self.calls.append(ptr)
        self.called.release()
        assert self.go_on[ptr].wait(30)
        return super().cudaHostRegister(ptr, size, flags)


def test_who_asks_for_a_slot_does_not_queue_behind_those_that_nobody_asked_for() -> None:
    driver = BusyDriver()
    pinned = PinnedSlots(SPANS, order=[0, 1], driver=driver)
    assert driver.called.acquire(timeout=30)
    driver.go_on[SPANS[4][0]].set()
    pinned.ensure(4)  # while slot 0 is still being locked
    assert driver.locked.keys() == {SPANS[4][0]}
    waiting = threading.Thread(target=pinned.ensure, args=(0,))
    waiting.start()
    for event in driver.go_on.values():
        event.set()
    waiting.join(30)
    pinned.close()
    assert sorted(driver.calls) == sorted(SPANS[slot][0] for slot in (0, 1, 4)), "one call a slot"


def test_a_refusal_names_the_slot_and_what_to_change() -> None:
    pinned = PinnedSlots(SPANS, order=range(5), driver=FakeDriver(refused=SPANS[2][0]))
    with pytest.raises(PreflightError, match=r"refused 12288 bytes more, for slot 2 \(CUDA error 2\).*host_memory_gb"):
        pinned.ensure(2)
    pinned.close()


def test_slots_that_share_a_page_are_refused() -> None:
    with pytest.raises(PreflightError, match="whole pages"):
        PinnedSlots([(4096, 4096), (8192, 6144)], order=[], driver=FakeDriver())


def late_captures(source: str) -> list[int]:
    """Lines inside a stream's context that ask for the current stream: it is that one by then, not the producer's."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.With):
            continue
        if any(ast.unparse(item.context_expr).split("(")[0].endswith((".within", "cuda.stream")) for item in node.items):
            calls = (call for inner in node.body for call in ast.walk(inner) if isinstance(call, ast.Call))
            found += [call.lineno for call in calls if ast.unparse(call.func).endswith((".current", "current_stream"))]
    return found


def test_no_source_asks_for_the_current_stream_inside_a_streams_context() -> None:
    assert late_captures("with streams.within(copy):\n    main = streams.current()") == [2]
    assert late_captures("with torch.cuda.stream(s):\n    s.wait_stream(torch.cuda.current_stream())") == [2]
    assert late_captures("main = streams.current()\nwith streams.within(copy):\n    work()") == []
    complaints = {path.name: late_captures(path.read_text()) for path in SOURCES.rglob("*.py")}
    assert {name: lines for name, lines in complaints.items() if lines} == {}
