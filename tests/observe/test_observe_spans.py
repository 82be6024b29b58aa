"""Spans: they sum to wall time, long ones are seen while they last, what cannot be written is counted."""

from __future__ import annotations

import itertools
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from slipstream.observe.accounts import Account
from slipstream.observe.recording import open_account
from slipstream.observe.spans import SpanLog, WorkerFacts
from slipstream.runfolder import RunFolder

FACTS = WorkerFacts(worker="drafter-1", role="drafter", rank=1, gpu=3)


class Clock:
    def __init__(self) -> None:
        self.now = 5_000_000

    def __call__(self) -> int:
        return self.now


def read(path: Path) -> tuple[list[dict[str, Any]], list[list[Any]]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if isinstance(line, dict)], [line for line in lines if isinstance(line, list)]


def test_states_become_spans_without_a_gap(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "spans.jsonl"
    log = SpanLog(FACTS, path=path, clock=clock)
    account = Account("drafter-1", clock=clock, spans=log)
    clock.now += 1_500
    with account.state("wait_input", pack=7, step=2):
        clock.now += 10_000
        with account.state("target", pack=8):
            clock.now += 100_700
        clock.now += 20_000
    clock.now += 700
    with account.state("forward", pack=7, step=2):
        clock.now += 3_300
    log.close()
    (header,), spans = read(path)
    expected = {"kind": "start", "worker": "drafter-1", "role": "drafter", "rank": 1, "gpu": 3, "clock_ns": 5_000_000}
    assert expected.items() <= header.items()
    assert abs(header["unix_ns"] - time.time_ns()) < 60e9
    assert spans == [
        ["cpu", "idle", 0, 1, None, None],
        ["cpu", "wait_input", 1, 10, 7, 2],
        ["cpu", "target", 11, 101, 8, None],
        ["cpu", "wait_input", 112, 20, 7, 2],
        ["cpu", "forward", 132, 4, 7, 2],
    ]  # the idle time of 0.7 µs ends in the microsecond in which it starts
    assert (account.step, log.dropped) == (2, 0)


def test_nothing_is_told_apart_in_a_whole_state(tmp_path: Path) -> None:
    clock = Clock()
    account = Account("drafter-1", clock=clock)
    with account.state("warm_up", whole=True):
        clock.now += 5
        with account.state("forward"), account.state("wait_slot"):
            clock.now += 7
        clock.now += 1
    with account.state("forward"):
        clock.now += 2
    assert account.read() == (15, {"idle": 0, "warm_up": 13, "forward": 2})


def test_a_long_state_is_seen_while_it_lasts(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    with SpanLog(FACTS, path=path, every_seconds=0.01) as log:
        account = Account("drafter-1", spans=log)
        with account.state("load"):
            deadline = time.monotonic() + 30
            while len(read(path)[1]) < 3 and time.monotonic() < deadline:
                time.sleep(0.01)
            spans = read(path)[1]
    assert len(spans) >= 3
    assert [span[1] for span in spans[-2:]] == ["load", "load"]


def test_spans_sum_to_wall_time_with_real_clocks_and_threads(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.create()
    with open_account(folder, FACTS, spans=True) as account:
        assert account.spans is not None
        time.sleep(0.01)
        account.rest()

        def build() -> None:
            for index in range(50):
                with account.aside("loader", "build", step=index):
                    time.sleep(0.001)

        thread = threading.Thread(target=build)
        thread.start()
        for index in range(300):
            with account.state("forward", pack=index), account.state("wait_slot"):
                time.sleep(0.0005)
        thread.join()
    (line,) = [json.loads(line) for line in (folder.accounts / "drafter-1.jsonl").read_text().splitlines()]
    _, spans = read(folder.spans / "drafter-1.jsonl")
    cpu = [span for span in spans if span[0] == "cpu"]
    assert all(one[2] + one[3] <= two[2] for one, two in itertools.pairwise(cpu))
    # each span is rounded to a microsecond; nothing else may be between them, whatever came between closing the two files
    assert sum(span[3] for span in cpu) == pytest.approx(line["wall_seconds"] * 1e6, abs=len(cpu))
    assert sum(line["states"].values()) == pytest.approx(line["wall_seconds"], abs=1e-9)
    for state, seconds in line["states"].items():
        assert sum(span[3] for span in cpu if span[1] == state) == pytest.approx(seconds * 1e6, abs=len(cpu)), state
    assert [span[5] for span in spans if span[0] == "loader"] == list(range(50))


def test_before_the_work_begins_a_worker_loads(tmp_path: Path) -> None:
    clock = Clock()
    account = Account("target-0", clock=clock, base="load")
    clock.now += 5
    with account.state("warm_up"):
        clock.now += 3
        with pytest.raises(AssertionError, match="is in state warm_up"):
            account.rest()
    clock.now += 2
    account.rest()
    clock.now += 1
    assert account.read() == (11, {"idle": 1, "load": 7, "warm_up": 3})


def test_the_answers_leave_spans_alone(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.create()
    facts = WorkerFacts(worker="answers", role="answers", rank=0, gpu=None)
    with open_account(folder, facts, spans=True) as account, account.state("target"):
        time.sleep(0.001)
    assert [span[1] for span in read(folder.spans / "answers.jsonl")[1]] == ["load", "target", "load"]
    assert list(folder.accounts.iterdir()) == []


def test_without_spans_there_is_no_file(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.create()
    with open_account(folder, FACTS, spans=False) as account, account.state("load"), account.aside("loader", "build"):
        pass
    assert list(folder.spans.iterdir()) == []
    assert (folder.accounts / "drafter-1.jsonl").read_text().count("\n") == 1


def test_a_second_start_appends_below_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    path.write_text('{"kind": "start"}\n["cpu","idle",0,')
    SpanLog(FACTS, path=path).close()
    lines = path.read_text().splitlines()
    assert lines[:2] == ['{"kind": "start"}', '["cpu","idle",0,']
    assert json.loads(lines[2])["kind"] == "start"


def test_what_comes_too_fast_is_dropped_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "spans.jsonl"
    log = SpanLog(FACTS, path=path, limit=10, every_seconds=1000)
    for index in range(25):
        log.add("cpu", "forward", 1000 * index, 1000 * index + 1000, None, None)
    log.close()
    assert log.dropped == 15
    headers, spans = read(path)
    assert len(spans) == 10
    assert headers[-1] == {"kind": "dropped", "spans": 15}
    assert "15 spans of drafter-1" in caplog.text


def test_a_full_disk_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("needs /dev/full")
    log = SpanLog(FACTS, path=full, every_seconds=0.005)
    for index in range(20):
        log.add("cpu", "forward", 1000 * index, 1000 * index + 1000, None, None)
        time.sleep(0.002)
    log.close()
    messages = [record.getMessage() for record in caplog.records]
    assert sum("cannot be written" in message for message in messages) == 1
    assert log.dropped == 20


def test_a_change_of_state_costs_little(tmp_path: Path) -> None:
    """Twelve states a pack at under 12 µs each are under 1 % of a pack that takes 15 ms, the shortest that was measured."""
    with SpanLog(FACTS, path=tmp_path / "spans.jsonl") as log:
        account = Account("drafter-1", spans=log)
        rounds = []
        for _ in range(20):
            began = time.perf_counter()
            for index in range(500):
                with account.state("forward", pack=index, step=3):
                    pass
            rounds.append((time.perf_counter() - began) / 500)
    assert min(rounds) < 12e-6
    assert log.dropped == 0
