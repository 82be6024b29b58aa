"""Figures of a run: times sum to wall time, queues have percentiles, memory is told beside what was predicted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from run_maker import BEGAN, make_run

from slipstream.report.figures import run_figures
from slipstream.report.html import to_json
from slipstream.report.reading import read_run
from slipstream.report.times import account_totals, split_by_kind, stage_rows, training_window, worker_times


def line(pid: int, wall: float, **states: float) -> dict[str, object]:
    return {"worker": "drafter-0", "pid": pid, "time": 0.0, "wall_seconds": wall, "states": states, "closed": False}


def test_totals_of_a_worker_are_summed_over_its_processes() -> None:
    lines = [
        line(1, 5, forward=5),
        line(1, 9, forward=6, idle=3),
        line(2, 2, forward=2),
        line(2, 1, idle=1),
        line(3, 4, idle=4),
    ]
    wall, states = account_totals(lines)
    assert wall == 9 + 2 + 1 + 4
    assert states == {"forward": 8, "idle": 8}
    assert account_totals([]) == (0.0, {})


def test_states_sum_to_wall_time_and_to_the_window(tmp_path: Path) -> None:
    make_run(tmp_path / "one", steps=50)
    run = read_run(tmp_path / "one")
    window = training_window(run)
    assert window is not None
    assert window[0] == pytest.approx(BEGAN + 3 + 0.55, abs=0.1)
    workers = worker_times(run)
    assert [entry["worker"] for entry in workers] == ["target-0", "target-1", "drafter-0"]
    for entry in workers:
        assert sum(entry["whole"].values()) == pytest.approx(entry["wall_seconds"])
        assert sum(entry["training"].values()) == pytest.approx(window[1] - window[0])
        assert sum(entry["gpu_training"].values()) == pytest.approx(window[1] - window[0])
    assert split_by_kind(workers[2]["training"])["wait"] == pytest.approx(0.33, abs=0.01)


def test_time_before_the_first_step_is_no_training(tmp_path: Path) -> None:
    """The first validation belongs to step 0 and comes before it; samples of that time are in no mean."""
    folder = make_run(tmp_path / "one", steps=50, workers=("worker-0",))
    path = folder.spans / "worker-0.jsonl"
    header, *rows = path.read_text().splitlines()
    early = [["cpu", "hooks", 900_000, 50_000, None, 0], ["cpu", "validate", 1_000_000, 1_900_000, None, 0]]
    path.write_text("\n".join([header, *map(json.dumps, early), *rows]) + "\n")
    idle = {"gpu": 0, "utilisation": 0.0, "rank": 0, "ready": 0, "free": 0, "slots": 8}
    for samples in (folder.gpus, folder.queues):
        samples.write_text(
            "".join(json.dumps({"time": BEGAN + time, **idle}) + "\n" for time in range(3)) + samples.read_text()
        )
    run = read_run(folder.root)
    window = training_window(run)
    assert window is not None
    assert window[0] == pytest.approx(BEGAN + 3)
    figures = run_figures(run)
    assert figures["workers"][0]["training"].get("validate") is None
    assert figures["gpus"][0]["utilisation"] == pytest.approx(0.75, abs=0.1)
    assert figures["gpus"][0]["samples"] == figures["queues"][0]["samples"] == 25


def test_a_worker_without_an_account_has_the_times_of_its_spans(tmp_path: Path) -> None:
    """The process that answers validation prompts, which ends before anything is trained: its memory is that of its time."""
    folder = make_run(tmp_path / "one", steps=50)
    header = {
        "kind": "start",
        "worker": "answers",
        "role": "answers",
        "rank": 0,
        "gpu": 0,
        "pid": 9,
        "unix_ns": int(BEGAN * 1e9),
    }
    rows = [header, ["cpu", "load", 0, 1_000_000, None, None], ["cpu", "target", 1_000_000, 3_000_000, None, None]]
    (folder.spans / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prediction = json.loads(folder.prediction.read_text())
    prediction["memory"].append({"role": "answers", "rank": 0, "bytes": 2e9, "parts": {}})
    folder.prediction.write_text(json.dumps(prediction))
    samples = [json.loads(line) for line in folder.gpus.read_text().splitlines()]
    early = {**samples[0], "time": BEGAN + 1, "gpu": 0, "memory_bytes": 3e9}
    folder.gpus.write_text(
        "".join(json.dumps(row) + "\n" for row in [early, *(row for row in samples if row["time"] > BEGAN + 4)])
    )
    figures = run_figures(read_run(folder.root))
    [answers] = [worker for worker in figures["workers"] if worker["worker"] == "answers"]
    assert answers["whole"] == {"target": 3.0, "load": 1.0}
    assert answers["wall_seconds"] == 4.0
    assert [row["gpu_bytes"] for row in figures["memory"] if row["role"] == "answers"] == [3e9]


def test_kinds_are_shares_and_unknown_states_are_work() -> None:
    assert split_by_kind({"forward": 2, "wait_input": 1, "idle": 1, "mystery": 4}) == {
        "work": 0.75,
        "wait": 0.125,
        "idle": 0.125,
    }
    assert split_by_kind({}) == {"work": 0, "wait": 0, "idle": 0}


def test_stages_have_their_counts_and_percentiles(tmp_path: Path) -> None:
    make_run(tmp_path / "one", steps=50)
    rows = {(row["worker"], row["lane"], row["state"]): row for row in stage_rows(read_run(tmp_path / "one"))}
    forward = rows["drafter-0", "cpu", "forward"]
    assert forward["count"] == 100
    assert forward["seconds"] == pytest.approx(forward["mean"] * 100)
    assert forward["mean"] == pytest.approx(0.5 / 2 * 0.26, rel=0.1)
    assert forward["seconds_per_step"] == pytest.approx(2 * forward["mean"])
    assert forward["p50"] <= forward["p90"] <= forward["p99"] <= forward["longest"]
    assert rows["target-0", "gpu", "target"]["seconds_per_step"] is None
    assert ("drafter-0", "cpu", "warm_up") not in rows


def test_pieces_of_a_span_count_as_one(tmp_path: Path) -> None:
    """Spans are written while they go on, so that long ones come in pieces; a validation is interrupted besides."""
    folder = make_run(tmp_path / "one", steps=50)
    path = folder.spans / "drafter-0.jsonl"
    last = json.loads(path.read_text().splitlines()[-1])
    at = last[2] + last[3] + 1000
    pieces = [
        ["cpu", "backward", at, 400, 100, 50], ["cpu", "backward", at + 400, 600, 100, 50],
        ["cpu", "validate", at + 1000, 1000, None, 50], ["cpu", "wait_gpu", at + 2000, 500, None, 50],
        ["cpu", "validate", at + 2500, 3000, None, 50],
    ]  # fmt: skip
    path.write_text(path.read_text() + "".join(json.dumps(row) + "\n" for row in pieces))
    rows = {(row["lane"], row["state"]): row for row in stage_rows(read_run(folder.root)) if row["worker"] == "drafter-0"}
    assert rows["cpu", "backward"]["count"] == 101
    assert (rows["cpu", "validate"]["count"], rows["cpu", "validate"]["longest"]) == (1, pytest.approx(0.004, abs=1e-6))


def test_figures_tell_the_whole_run(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "one", steps=60)
    with folder.metrics.open("a") as file:
        file.write(json.dumps({"kind": "memory", "step": 60, "role": "drafter", "rank": 0, "peak_bytes": 56e9}) + "\n")
    folder.schedule.mkdir()
    (folder.schedule / "schedule.json").write_text(json.dumps({"summary": {"packs": 120}}))
    figures = run_figures(read_run(folder.root))
    assert json.loads(to_json(figures)) == figures
    assert (figures["status"], figures["step"], figures["steps"]) == ("finished", 60, 60)
    assert figures["time_left_seconds"] is None
    assert figures["rates"]["context_tokens_per_second"] == pytest.approx(16_280 / 0.5, rel=0.05)
    assert figures["rates"]["predicted_tokens_per_second"] == 36_000
    assert figures["results"]["validation"]["last"]["step"] == 60
    [queue] = figures["queues"]
    assert (queue["rank"], queue["slots"]) == (0, 8)
    assert queue["ready_p10"] <= queue["ready_p50"] <= queue["ready_p90"] <= 4
    assert 0 < queue["share_empty"] < 1
    assert [gpu["gpu"] for gpu in figures["gpus"]] == [0, 1, 2]
    memory = {row["role"]: row for row in figures["memory"]}
    assert memory["drafter"]["gpu"] == 2
    assert 61e9 < memory["drafter"]["gpu_bytes"] < 62e9
    assert (memory["drafter"]["peak_bytes"], memory["drafter"]["host_bytes"]) == (56e9, None)
    assert memory["drafter"]["off"] == pytest.approx(58 / 56 - 1)
    assert memory["target"]["peak_bytes"] is None
    assert figures["plan"] == {"packs": 120}


def test_a_run_that_goes_on_has_time_left(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "going", steps=40)
    folder.state.write_text(json.dumps({"status": "training", "step": 40, "steps": 100}))
    figures = run_figures(read_run(folder.root))
    assert figures["time_left_seconds"] == pytest.approx(60 * 0.5, rel=0.1)


def test_without_gpus_the_hosts_memory_counts(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "cpu", steps=10)
    folder.gpus.unlink()
    for path in folder.spans.iterdir():
        path.write_text(path.read_text().replace('"gpu": 2', '"gpu": null'))
    memory = {row["role"]: row for row in run_figures(read_run(folder.root))["memory"]}
    assert memory["drafter"]["host_bytes"] == 9_000_009_000
    assert memory["target"]["host_bytes"] is memory["drafter"]["gpu_bytes"] is memory["drafter"]["off"] is None
