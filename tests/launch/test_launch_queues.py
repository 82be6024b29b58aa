"""Queue depths: what waits for its first use, what is held for another, and what is free."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from slipstream.launch.queues import QueueFile, QueueSampler
from slipstream.plan import Schedule
from slipstream.transport.ledger import Ledger, PackOrder

SLOT_BYTES = 1000
FIRST_STEP = np.array([0, 0, 1, 1, 2, 2, 3, 3])


def ledger() -> Ledger:
    """Eight packs of two ranks in three slots each, and a kept one of rank 0."""
    kept = [PackOrder(pack_id=8, rank=0, slot=3, kept=True)]
    return Ledger(
        kept + [PackOrder(pack_id=pack, rank=pack % 2, slot=pack // 2 % 3) for pack in range(8)], slot_bytes=SLOT_BYTES
    )


def write_queue(path: Path, packs: Ledger, *, trained: int, start_step: int = 0) -> None:
    """The line that is written at the end."""
    file = QueueFile(path)
    QueueSampler(
        depths=packs.depths,
        trained=lambda: trained,
        schedule=cast(Schedule, SimpleNamespace(first_step=FIRST_STEP)),
        start_step=start_step,
        slot_bytes=SLOT_BYTES,
        put=file.write,
        every_seconds=1000,
    ).close()
    file.close()


def lines(path: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(abs(line.pop("time") - time.time()) < 60 for line in found)
    return found


def publish(packs: Ledger, count: int) -> list[int]:
    made = []
    for _ in range(count):
        assignment = packs.issue("target-0")
        assert assignment is not None
        assert packs.published("target-0", assignment)
        made.append(assignment.pack_id)
    return made


def test_depths_by_rank_leave_kept_packs_out(tmp_path: Path) -> None:
    packs = ledger()
    assert publish(packs, 4) == [8, 0, 1, 2]
    packs.issue("target-0")
    write_queue(tmp_path / "q.jsonl", packs, trained=-1)
    zero, one = lines(tmp_path / "q.jsonl")
    assert zero == {"rank": 0, "ready": 2, "ready_bytes": 2000, "held": 0, "issued": 0, "free": 1, "slots": 3}
    assert one == {"rank": 1, "ready": 1, "ready_bytes": 1000, "held": 0, "issued": 1, "free": 1, "slots": 3}
    packs.worker_lost("target-0")
    assert packs.depths()[1].issued == 1  # it waits to be written again


def test_packs_that_were_trained_on_are_held(tmp_path: Path) -> None:
    packs = ledger()
    publish(packs, 7)
    write_queue(tmp_path / "q.jsonl", packs, trained=1)
    zero, _ = lines(tmp_path / "q.jsonl")
    assert (zero["ready"], zero["held"], zero["free"]) == (1, 2, 0)  # packs 0 and 2 were used in steps 0 and 1
    packs.released(0)
    assert packs.depths()[0].free == 1


def test_what_a_resumed_run_makes_again_is_new_until_it_trained(tmp_path: Path) -> None:
    packs = ledger()
    publish(packs, 7)
    for trained, expected in ((-1, (3, 0)), (2, (0, 3))):
        path = tmp_path / f"{trained}.jsonl"
        write_queue(path, packs, trained=trained, start_step=2)
        zero, _ = lines(path)
        assert (zero["ready"], zero["held"]) == expected


def test_a_rank_that_has_left_has_no_queue(tmp_path: Path) -> None:
    packs = ledger()
    packs.rank_left(0)
    write_queue(tmp_path / "q.jsonl", packs, trained=-1)
    assert [line["rank"] for line in lines(tmp_path / "q.jsonl")] == [1]


def test_lines_come_about_as_often_as_asked(tmp_path: Path) -> None:
    taken: list[int] = []
    with QueueSampler(
        depths=ledger().depths,
        trained=lambda: -1,
        schedule=cast(Schedule, SimpleNamespace(first_step=FIRST_STEP)),
        start_step=0,
        slot_bytes=SLOT_BYTES,
        put=lambda lines: taken.append(len(lines)),
        every_seconds=0.01,
    ):
        deadline = time.monotonic() + 30
        while len(taken) < 5 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert len(taken) >= 6
    assert set(taken) == {2}


def test_no_line_no_file(tmp_path: Path) -> None:
    file = QueueFile(tmp_path / "q.jsonl")
    file.close()
    assert not (tmp_path / "q.jsonl").exists()


def test_a_full_disk_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("needs /dev/full")
    write_queue(full, ledger(), trained=-1)
    assert [record.getMessage() for record in caplog.records] == [
        "queue depths cannot be written; the run goes on without them"
    ]
