"""The supervisor's decisions, with children of a few lines: who is started again, what ends the run, and what it then says."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from stub_children import DEAF, UNTIL_STOPPED, stub

from slipstream.errors import Interrupted, PeerDied, WorkerFailed
from slipstream.launch import supervisor as module
from slipstream.launch.processes import Child
from slipstream.launch.supervisor import Supervisor
from slipstream.transport.broker import Broker
from slipstream.transport.connections import connection_pair
from slipstream.transport.ledger import PackOrder
from slipstream.transport.stats import Silence

DIES = "print('out of luck', flush=True); os._exit(3)"
HANGS = """
import faulthandler
faulthandler.register(signal.SIGUSR1)
def somewhere_deep():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    say("ready")
    time.sleep(600)
somewhere_deep()
"""
STUCK = """
from slipstream.launch.hangs import Pulse
import faulthandler
faulthandler.register(signal.SIGUSR1)
def somewhere_deep():
    say("ready")
    for _ in range(600):
        say("pulse", Pulse(changes=41, state="backward", step=7))
        time.sleep(0.2)
somewhere_deep()
"""
WAITS = """
from slipstream.launch.hangs import Pulse
say("ready")
for _ in range(15):
    say("pulse", Pulse(changes=41, state="wait_input", step=7))
    time.sleep(0.2)
say("done", {"status": "finished"})
"""
WORKS = """
say("ready")
control.recv()
say("done", {"packs": 5, "bad_rows": 2})
"""


@dataclass
class Stage:
    """A supervisor, its stub children, and all that it said to whom."""

    folder: Path
    drafter: str = UNTIL_STOPPED
    targets: list[str] = field(default_factory=list)
    """Scripts of target worker 0, one for each attempt; the last one for all further."""
    ready_seconds: float = 30
    max_restarts: int = 2
    stall_seconds: float = 30
    silent: Callable[[int], Silence | None] = lambda index: None
    on_report: Callable[[str, str, Any], None] = lambda worker, kind, payload: None
    started: list[Child] = field(default_factory=list)
    detached: list[int] = field(default_factory=list)
    reports: list[tuple[str, str, Any]] = field(default_factory=list)
    closed: list[tuple[str, str | None]] = field(default_factory=list)

    def start(self, index: int, attempt: int) -> Child:
        self.started.append(stub(self.folder, f"target-{index}", self.targets[min(attempt, len(self.targets) - 1)]))
        return self.started[-1]

    def detach(self, index: int, cause: str) -> None:
        self.detached.append(index)
        assert not self.started[-1].alive, "a worker that is taken back from can write no more"

    def silence(self, index: int) -> Silence | None:
        return self.silent(index)

    def close_broker(self, reason: str, lost: str | None) -> None:
        """The broker's close tells the targets, who end; here a message does."""
        self.closed.append((reason, lost))

    def hear(self, worker: str, kind: str, payload: Any) -> None:
        self.reports.append((worker, kind, payload))
        self.on_report(worker, kind, payload)

    def run(self) -> dict[str, Any]:
        self.started.append(stub(self.folder, "drafter-0", self.drafter))
        supervisor = Supervisor(
            drafters=self.started[:1],
            starter=self,
            num_targets=1 if self.targets else 0,
            max_restarts=self.max_restarts,
            ready_seconds=self.ready_seconds,
            stall_seconds=self.stall_seconds,
            on_report=self.hear,
            close_broker=self.close_broker,
        )
        try:
            return supervisor.run()
        finally:
            assert not any(child.alive for child in self.started), "nobody is left"

    def tell_drafter(self) -> None:
        self.started[0].ask_to_stop()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRACE_SECONDS", 3.0)


def test_a_target_worker_that_died_is_started_again_and_the_run_goes_on(tmp_path: Path) -> None:
    stage = Stage(tmp_path, targets=[DIES, WORKS])

    def on_report(worker: str, kind: str, payload: Any) -> None:
        if (worker, kind) == ("target-0", "ready"):
            stage.started[-1].control.send(("more",))
            stage.tell_drafter()

    stage.on_report = on_report
    assert stage.run() == {"status": "interrupted"}
    assert ("target-0", "restart", {"attempt": 1}) in stage.reports
    assert stage.detached == [0]
    assert ("target-0", "done", {"packs": 5, "bad_rows": 2}) in stage.reports, "heard though the drafters were done first"
    assert stage.closed == [("the run is over", None)]


def test_a_target_worker_that_dies_too_often_ends_the_run_and_is_named_to_all(tmp_path: Path) -> None:
    stage = Stage(tmp_path, targets=[DIES])
    with pytest.raises(
        WorkerFailed, match=r"(?s)ended 3 times, more than placement.max_restarts = 2.*exit code 3.*out of luck"
    ):
        stage.run()
    assert len(stage.started) == 1 + 3
    assert stage.detached == [0, 0, 0]
    assert [payload["attempt"] for _, kind, payload in stage.reports if kind == "restart"] == [1, 2]
    assert stage.closed[0][1] == "target-0", "consumers get PeerDied with its name"
    assert stage.closed[0][0].startswith("target worker 0 ended 3 times")


def test_a_target_worker_that_hangs_says_where_it_is_and_is_started_again(tmp_path: Path) -> None:
    """One that is quiet for less stays; one that waits for a slot has nothing in hand, and is not asked how long."""
    stage = Stage(tmp_path, targets=[HANGS, WORKS], stall_seconds=0.2)
    quiet = iter([None, 0.1, 1500.0])

    def silent(index: int) -> Silence | None:
        assert index == 0
        seconds = next(quiet, None)
        return None if seconds is None else Silence(seconds=seconds, packs=(7, 8))

    def on_report(worker: str, kind: str, payload: Any) -> None:
        if (worker, kind) == ("target-0", "ready") and len(stage.started) == 3:
            stage.started[-1].control.send(("more",))
            stage.tell_drafter()

    stage.silent, stage.on_report = silent, on_report
    assert stage.run() == {"status": "interrupted"}
    hung = stage.started[1]
    assert hung.process.returncode == -signal.SIGKILL
    assert hung.failure is not None
    assert "it had pack 7, 8 in hand and handed none over for 1500 s, longer than placement.stall_seconds = 0.2" in hung.failure
    assert "in somewhere_deep" in hung.log.read_text()
    assert stage.detached == [0]
    assert [payload for _, kind, payload in stage.reports if kind == "restart"] == [{"attempt": 1}]


def test_a_drafter_that_hangs_within_a_step_ends_the_run_and_says_where_it_was(tmp_path: Path) -> None:
    stage = Stage(tmp_path, drafter=STUCK, targets=[WORKS], stall_seconds=1.0)
    with pytest.raises(
        WorkerFailed,
        match=r'^drafter-0 hangs: in state "backward" of step 7 for \d+ s, longer than placement.stall_seconds = 1; .*-0.log',
    ):
        stage.run()
    assert "in somewhere_deep" in (tmp_path / "drafter-0.log").read_text()
    assert not [kind for _, kind, _ in stage.reports if kind == "pulse"], "signs of life are no news"


def test_a_drafter_that_waits_for_others_does_not_hang(tmp_path: Path) -> None:
    stage = Stage(tmp_path, drafter=WAITS, stall_seconds=1.0)
    assert stage.run() == {"status": "finished"}


def test_a_target_worker_that_no_signal_ends_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process in a driver outlives its SIGKILL; it is killed, and told of, once."""
    stage = Stage(tmp_path, targets=[DEAF], stall_seconds=0.2)
    stage.silent = lambda index: Silence(seconds=1500.0, packs=(3,))
    killed: list[str] = []

    def outlives(child: Child, why: str) -> None:
        killed.append(why)
        child.killed_at, child.failure = time.monotonic(), why

    monkeypatch.setattr(Child, "kill_hung", outlives)
    monkeypatch.setattr(module, "STUCK_SECONDS", 1.5)
    with pytest.raises(WorkerFailed, match=r"target-0 does not even end when killed.*: killed, since it had pack 3 in hand"):
        stage.run()
    assert len(killed) == 1
    assert stage.closed[0][1] == "target-0"


def test_a_mistake_of_the_user_is_not_tried_again(tmp_path: Path) -> None:
    script = 'say("failed", {"kind": "TargetError", "message": "target.model = x: is damaged"}); sys.exit(2)'
    stage = Stage(tmp_path, targets=[script])
    with pytest.raises(WorkerFailed, match=r"(?s)would fail again.*TargetError: target.model = x: is damaged"):
        stage.run()
    assert len(stage.started) == 2
    assert stage.closed[0][1] == "target-0"


def test_a_worker_that_does_not_become_ready_is_named_with_its_log(tmp_path: Path) -> None:
    stage = Stage(tmp_path, drafter="time.sleep(600)", targets=[WORKS], ready_seconds=1.0)
    with pytest.raises(WorkerFailed) as caught:
        stage.run()
    message = str(caught.value)
    assert "drafter-0 did not become ready within placement.ready_seconds = 1" in message
    assert str(tmp_path / "drafter-0.log") in message
    assert "target-0" not in message, "that one was ready"


def test_a_drafter_that_fails_speaks_for_itself(tmp_path: Path) -> None:
    script = 'say("failed", {"kind": "TrainingDiverged", "message": "10 steps in a row"}); sys.exit(1)'
    stage = Stage(tmp_path, drafter=script, targets=[WORKS])
    with pytest.raises(WorkerFailed, match=r"drafter-0 \(exit code 1\), log .*:\nTrainingDiverged: 10 steps in a row"):
        stage.run()
    assert stage.detached == []
    assert stage.closed[0][1] is None


def test_a_drafter_that_is_killed_shows_the_end_of_its_log(tmp_path: Path) -> None:
    stage = Stage(tmp_path, drafter="print('last words', flush=True); os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(WorkerFailed, match=r"drafter-0 \(signal SIGKILL\), log .*:\nlast words"):
        stage.run()


LOSES_ANOTHER = """
say("ready")
say("failed", {"kind": "PeerDied", "message": "lost another rank"})
sys.exit(1)
"""
FAILS_LATER = """
say("ready")
time.sleep(0.5)
say("failed", {"kind": "CheckpointError", "message": "no space left"})
sys.exit(2)
"""


@pytest.mark.parametrize("scripts", [(LOSES_ANOTHER, FAILS_LATER), (FAILS_LATER, LOSES_ANOTHER), (LOSES_ANOTHER, DIES)])
def test_of_drafters_that_end_together_the_one_that_the_others_lost_is_named(tmp_path: Path, scripts: tuple[str, str]) -> None:
    drafters = [stub(tmp_path, f"drafter-{rank}", script) for rank, script in enumerate(scripts)]
    cause = next(rank for rank, script in enumerate(scripts) if script != LOSES_ANOTHER)
    with pytest.raises(WorkerFailed, match=rf"^drafter-{cause} "):
        over(drafters).run()
    assert not any(child.alive for child in drafters)


def test_a_loss_that_nobody_explains_is_told_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CAUSE_SECONDS", 0.5)
    drafters = [stub(tmp_path, "drafter-0", LOSES_ANOTHER), stub(tmp_path, "drafter-1", UNTIL_STOPPED)]
    with pytest.raises(WorkerFailed, match=r"^drafter-0 .*\n?.*lost another rank"):
        over(drafters).run()


def over(drafters: list[Child]) -> Supervisor:
    """A supervisor of drafters alone."""
    return Supervisor(
        drafters=drafters,
        starter=None,
        num_targets=0,
        max_restarts=0,
        ready_seconds=30,
        stall_seconds=30.0,
        on_report=lambda worker, kind, payload: None,
        close_broker=lambda reason, lost: None,
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_signal_ends_the_run_in_order(tmp_path: Path, number: signal.Signals) -> None:
    before = signal.getsignal(number)
    stage = Stage(tmp_path, on_report=lambda worker, kind, payload: os.kill(os.getpid(), number) if kind == "ready" else None)
    with pytest.raises(Interrupted, match=f"in order after {number.name}; continue with --resume") as caught:
        stage.run()
    assert caught.value.exit_code == 128 + number
    assert ("drafter-0", "done", {"status": "interrupted"}) in stage.reports
    assert signal.getsignal(number) is before, "handlers are put back"


def test_a_second_signal_ends_the_run_at_once(tmp_path: Path) -> None:
    def on_report(worker: str, kind: str, payload: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)

    began = time.monotonic()
    stage = Stage(tmp_path, drafter=DEAF, on_report=on_report)
    with pytest.raises(Interrupted, match="a second time") as caught:
        stage.run()
    assert time.monotonic() - began < 3.0, "no grace"
    assert caught.value.exit_code == 130
    assert stage.started[0].process.returncode == -signal.SIGTERM


def test_a_signal_after_the_last_step_changes_nothing(tmp_path: Path) -> None:
    script = 'say("ready"); control.recv(); say("done", {"status": "finished", "step": 9})'
    stage = Stage(tmp_path, drafter=script)
    stage.on_report = lambda worker, kind, payload: os.kill(os.getpid(), signal.SIGTERM) if kind == "ready" else None
    assert stage.run() == {"status": "finished", "step": 9}


def test_an_error_of_whoever_listens_ends_the_run_and_is_not_taken_for_a_lost_child(tmp_path: Path) -> None:
    def on_report(worker: str, kind: str, payload: Any) -> None:
        raise BrokenPipeError("the terminal is gone")

    with pytest.raises(BrokenPipeError):
        Stage(tmp_path, on_report=on_report).run()


def test_who_waits_for_packs_of_a_target_that_is_given_up_hears_its_name(tmp_path: Path) -> None:
    broker = Broker(order=[PackOrder(pack_id=0, rank=0, slot=0, kept=False)], slot_bytes=1)
    ours, theirs = connection_pair()
    broker.attach_consumer("drafter-0", 0, ours)
    broker.start()
    stage = Stage(tmp_path, targets=[DIES], max_restarts=0)
    stage.close_broker = lambda reason, lost: broker.close(reason=reason, lost=lost)  # type: ignore[method-assign]
    with pytest.raises(WorkerFailed, match="ended 1 times"):
        stage.run()
    error = theirs.recv().error()
    theirs.close()
    assert isinstance(error, PeerDied)
    assert str(error).startswith("target-0 died: target worker 0 ended 1 times")
