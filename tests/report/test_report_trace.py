"""The trace: events that a viewer takes, spans that neither overlap nor get lost, an arrow for each use of a pack."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

from run_maker import BEGAN, make_run

from slipstream.report.reading import read_run
from slipstream.report.trace import write_trace


def events_of(folder: Path, path: Path) -> list[dict[str, Any]]:
    count = write_trace(read_run(folder), path)
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    events = json.loads(text)["traceEvents"]
    assert len(events) == count
    return list(events)


def test_every_span_is_there_once_and_none_overlap(tmp_path: Path) -> None:
    make_run(tmp_path / "one", steps=30)
    run = read_run(tmp_path / "one")
    events = events_of(tmp_path / "one", tmp_path / "trace.json.gz")
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == sum(map(len, run.spans.values()))
    lanes: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in spans:
        lanes.setdefault((event["pid"], event["tid"]), []).append(event)
    for lane in lanes.values():
        for one, following in pairwise(lane):
            assert one["ts"] + one["dur"] <= following["ts"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert list(names.values()) == ["queues and GPUs", "target-0 (GPU 0)", "target-1 (GPU 1)", "drafter-0 (GPU 2)"]
    assert {event["cat"] for event in spans} == {"work", "wait"}


def test_an_arrow_leads_from_the_target_to_each_use(tmp_path: Path) -> None:
    make_run(tmp_path / "one", steps=30)
    events = events_of(tmp_path / "one", tmp_path / "trace.json")
    spans = [event for event in events if event["ph"] == "X"]
    out = {event["id"]: event for event in events if event["ph"] == "s"}
    into = {event["id"]: event for event in events if event["ph"] == "f"}
    assert len(out) == len(into) == 60

    def under(flow: dict[str, Any]) -> dict[str, Any]:
        [span] = [
            span
            for span in spans
            if (span["pid"], span["tid"]) == (flow["pid"], flow["tid"]) and span["ts"] <= flow["ts"] < span["ts"] + span["dur"]
        ]
        return span

    for number, flow in out.items():
        made, used = under(flow), under(into[number])
        assert (made["name"], used["name"]) == ("target", "forward")
        assert made["args"]["pack"] == used["args"]["pack"]
        assert used["args"]["step"] == used["args"]["pack"] // 2
        assert flow["ts"] < into[number]["ts"]


def test_replays_and_packs_made_again_have_arrows_of_their_own(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "replays", steps=0, workers=("target-0", "drafter-0"))
    rows = {
        "target-0": [["cpu", "target", 0, 10, 7, None], ["cpu", "target", 500, 10, 7, None]],
        "drafter-0": [["cpu", "forward", at, 50, 7, step] for step, at in enumerate((100, 300, 600))],
    }
    for worker, added in rows.items():
        with (folder.spans / f"{worker}.jsonl").open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in added)
    events = events_of(folder.root, tmp_path / "trace.json")
    arrows = {event["id"]: [event["ts"]] for event in events if event["ph"] == "s"}
    for event in events:
        if event["ph"] == "f":
            arrows[event["id"]].append(event["ts"])
    assert sorted(arrows.values()) == [[9, 100], [9, 300], [509, 600]]


def test_queues_and_gpus_are_counters(tmp_path: Path) -> None:
    make_run(tmp_path / "one", steps=30)
    counters = [event for event in events_of(tmp_path / "one", tmp_path / "trace.json") if event["ph"] == "C"]
    assert Counter(event["name"] for event in counters) == {"queue of rank 0": 15, "GPU 0": 15, "GPU 1": 15, "GPU 2": 15}
    first = next(event for event in counters if event["name"] == "queue of rank 0")
    assert set(first["args"]) == {"ready", "issued", "free"}
    assert first["ts"] == 3_000_000
    assert json.loads((tmp_path / "trace.json").read_text())["otherData"]["begin_unix_seconds"] == BEGAN
