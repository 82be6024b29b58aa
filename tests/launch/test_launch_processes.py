"""Law 12: children end by their own handles, politely first; how one ended is said in words."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from stub_children import DEAF, STUBBORN, UNTIL_STOPPED, stub

from slipstream.launch import processes
from slipstream.launch.processes import Child, end_all, log_tail


def wait_ready(child: Child) -> None:
    assert child.control.poll(30)
    assert child.control.recv()[0] == "ready"


def test_the_end_of_a_child_in_words(tmp_path: Path) -> None:
    child = stub(tmp_path, "worker", "print('the reason', flush=True); sys.exit(7)")
    child.process.wait(30)
    assert child.describe_end() == f"worker (exit code 7), log {tmp_path / 'worker.log'}:\nthe reason"
    child.failure = "TargetError: what it reported itself"
    assert child.describe_end().endswith(":\nTargetError: what it reported itself")
    end_all([child], grace_seconds=1)


def test_the_signal_that_ended_a_child_is_named(tmp_path: Path) -> None:
    child = stub(tmp_path, "worker", DEAF)
    assert child.describe_end() == f"worker (still runs), log {tmp_path / 'worker.log'}"
    child.process.send_signal(signal.SIGSEGV)
    child.process.wait(30)
    assert "worker (signal SIGSEGV)" in child.describe_end()
    end_all([child], grace_seconds=1)


def test_the_tail_of_a_log(tmp_path: Path) -> None:
    assert log_tail(tmp_path / "none.log") == ""
    log = tmp_path / "long.log"
    log.write_bytes(b"x" * 9000 + b"\xff end\n")
    tail = log_tail(log)
    assert tail.endswith("\ufffd end")
    assert len(tail) < processes.TAIL_BYTES


def test_each_child_ends_as_gently_as_it_lets_us(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One heeds the wish, one SIGTERM, one nothing but SIGKILL; all in one go, each waited for and reaped."""
    monkeypatch.setattr(processes, "TERMINATE_SECONDS", 0.5)
    scripts = {"polite": UNTIL_STOPPED, "deaf": DEAF, "stubborn": STUBBORN}
    children = [stub(tmp_path, name, script) for name, script in scripts.items()]
    for child in children:
        wait_ready(child)
    began = time.monotonic()
    end_all(children, grace_seconds=1.0)
    assert time.monotonic() - began < 10
    assert [child.process.returncode for child in children] == [0, -signal.SIGTERM, -signal.SIGKILL]
    assert all(child.control.closed for child in children)


def test_ending_many_takes_one_grace_not_one_each(tmp_path: Path) -> None:
    children = [stub(tmp_path, f"deaf-{index}", DEAF) for index in range(4)]
    for child in children:
        wait_ready(child)
    began = time.monotonic()
    end_all(children, grace_seconds=1.0)
    assert 1 <= time.monotonic() - began < 3
    end_all(children, grace_seconds=1.0)  # what has ended already takes no time and raises nothing


_LEAVING = """
import sys, threading
from slipstream.launch.child import _leave
threading.Thread(target=threading.Event().wait, args=[float(sys.argv[2])]).start()
_leave(int(sys.argv[1]))
"""


def test_a_child_that_failed_waits_for_nothing_that_it_left_running() -> None:
    """As a group of ranks that is taken down waits for the others; one that succeeded is left in order."""
    for code, seconds in ((4, 600), (0, 0.2)):
        ended = subprocess.run([sys.executable, "-c", _LEAVING, str(code), str(seconds)], timeout=60, check=False)
        assert ended.returncode == code
