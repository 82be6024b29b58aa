"""Accounts of time: states sum to wall time, the inner state is charged, lines are written."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from slipstream.observe.accounts import Account, AccountWriter
from slipstream.observe.states import IDLE


class Clock:
    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


def test_nested_states_charge_the_inner_one() -> None:
    clock = Clock()
    account = Account("drafter-0", clock=clock)
    clock.now += 5
    with account.state("wait_input"):
        clock.now += 10
        with account.state("target"):
            clock.now += 100
            with account.state("pack"):
                clock.now += 1000
        clock.now += 20
    clock.now += 7
    wall, states = account.read()
    assert states == {IDLE: 12, "wait_input": 30, "target": 100, "pack": 1000}
    assert wall == 1142


def test_an_error_inside_ends_the_state() -> None:
    clock = Clock()
    account = Account("drafter-0", clock=clock)
    with pytest.raises(ValueError), account.state("forward"):  # noqa: PT012
        clock.now += 3
        raise ValueError
    clock.now += 4
    assert account.read() == (7, {IDLE: 4, "forward": 3})


def test_what_comes_after_the_end_is_charged_to_nobody() -> None:
    clock = Clock()
    account = Account("drafter-0", clock=clock)
    with account.state("forward"):
        clock.now += 3
    clock.now += 1
    account.end()
    clock.now += 100
    account.cut()
    with account.state("backward"):
        clock.now += 100
    assert account.read() == (4, {IDLE: 1, "forward": 3})


def test_two_threads_cannot_share_an_account() -> None:
    account = Account("drafter-0")
    with account.state("forward"):
        pass
    caught: list[AssertionError] = []

    def other() -> None:
        try:
            with account.state("backward"):
                pass
        except AssertionError as error:
            caught.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert "two threads" in str(caught[0])


def test_an_open_state_is_charged_up_to_now() -> None:
    clock = Clock()
    account = Account("drafter-0", clock=clock)
    with account.state("wait_input"):
        clock.now += 9
        assert account.read() == (9, {IDLE: 0, "wait_input": 9})


def test_real_time_sums_exactly_while_another_thread_reads() -> None:
    account = Account("drafter-0")
    unequal: list[tuple[int, int]] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            wall, states = account.read()
            if sum(states.values()) != wall:
                unequal.append((wall, sum(states.values())))

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(2000):
        with account.state("forward"), account.state("wait_slot"):
            pass
    done.set()
    reader.join()
    assert not unequal


def test_lines_are_written_while_a_state_lasts_and_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "drafter-0.jsonl"
    account = Account("drafter-0")
    with AccountWriter(account, path=path, every_seconds=0.02) as writer, account.state("wait_input"):
        deadline = time.monotonic() + 30
        while path.read_text().count("\n") < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
    writer.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) >= 4
    assert [line["closed"] for line in lines] == [False] * (len(lines) - 1) + [True]
    for line in lines:
        assert line["worker"] == "drafter-0"
        assert sum(line["states"].values()) == pytest.approx(line["wall_seconds"], abs=1e-9)
    assert lines[2]["states"]["wait_input"] > 0.9 * lines[2]["wall_seconds"] - 0.01


def test_a_disk_that_fails_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("needs /dev/full")
    writer = AccountWriter(Account("drafter-0"), path=full, every_seconds=0.005)
    time.sleep(0.1)
    writer.close()
    (record,) = caplog.records
    assert record.getMessage().startswith("account of drafter-0")


def test_a_file_that_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        AccountWriter(Account("drafter-0"), path=tmp_path / "nowhere" / "file", every_seconds=1)
