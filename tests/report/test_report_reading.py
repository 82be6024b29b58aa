"""A run folder as data: fast, incremental, and not misled by torn lines or by a resumed run."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import numpy as np
import pytest
from run_maker import BEGAN, make_run, train_line, validation_line

from slipstream.errors import UsageError
from slipstream.report.reading import RunReader, column, read_run
from slipstream.report.spans import Samples


def append(path: Path, text: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def start(worker: str, *, unix: float) -> str:
    line = {"kind": "start", "worker": worker, "role": "drafter", "rank": 0, "gpu": None, "pid": 7, "unix_ns": int(unix * 1e9)}
    return json.dumps(line) + "\n"


def test_a_whole_run_is_read(tmp_path: Path) -> None:
    make_run(tmp_path / "one", steps=20)
    run = read_run(tmp_path / "one")
    assert run.name == "one"
    assert run.ended
    assert [line["step"] for line in run.train] == list(range(20))
    assert [line["step"] for line in run.validations] == [0, 20]
    assert [line["kind"] for line in run.events] == ["start", "checkpoint", "end"]
    assert set(run.spans) == set(run.accounts) == {"target-0", "target-1", "drafter-0"}
    assert run.torn_lines == 0
    drafter = run.spans["drafter-0"]
    assert (drafter.role, drafter.rank, drafter.gpu, drafter.pid, drafter.starts) == ("drafter", 0, 2, 102, (BEGAN,))
    cpu = drafter.of_lane("cpu")
    np.testing.assert_allclose(cpu.end[:-1], cpu.start[1:], atol=1e-6)
    assert cpu.seconds.sum() == pytest.approx(run.accounts["drafter-0"][-1]["wall_seconds"], abs=1e-3)
    by_state = cpu.seconds_by_state()
    for state, seconds in run.accounts["drafter-0"][-1]["states"].items():
        assert by_state.get(state, 0.0) == pytest.approx(seconds, abs=1e-3)
    assert run.begin == pytest.approx(BEGAN)
    assert run.end == pytest.approx(float(max(spans.end.max() for spans in run.spans.values())))
    assert set(run.queues["rank"]) == {0.0}
    assert len(run.gpus.where("gpu", 1)) == len(run.gpus) // 3


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run folder"):
        read_run(tmp_path)


def test_refreshing_finds_what_reading_it_all_finds(tmp_path: Path) -> None:
    whole = make_run(tmp_path / "whole", steps=30)
    growing = make_run(tmp_path / "growing", steps=0)
    pairs = [(whole.metrics, growing.metrics), (whole.queues, growing.queues), (whole.gpus, growing.gpus)]
    pairs += [(path, growing.spans / path.name) for path in whole.spans.iterdir()]
    pairs += [(path, growing.accounts / path.name) for path in whole.accounts.iterdir()]
    texts = [(source.read_bytes(), there) for source, there in pairs]
    for _, there in texts:
        there.write_bytes(b"")
    reader = RunReader(growing.root)
    for part in range(7):  # cuts fall within lines
        for text, there in texts:
            with there.open("ab") as file:
                file.write(text[len(text) * part // 7 : len(text) * (part + 1) // 7])
        seen = reader.refresh()
    expected = read_run(whole.root)
    assert seen.train == expected.train
    assert seen.validations == expected.validations
    assert seen.accounts == expected.accounts
    assert seen.torn_lines == 0
    for worker, spans in expected.spans.items():
        other = seen.spans[worker]
        assert [other.lane_names[code] for code in other.lane] == [spans.lane_names[code] for code in spans.lane]
        assert [other.state_names[code] for code in other.state] == [spans.state_names[code] for code in spans.state]
        for name in ("start", "seconds", "pack", "step"):
            np.testing.assert_array_equal(getattr(other, name), getattr(spans, name))
    np.testing.assert_array_equal(seen.gpus["power_watts"], expected.gpus["power_watts"])


def test_a_torn_last_line_waits_and_one_in_the_middle_is_skipped(tmp_path: Path) -> None:
    run = make_run(tmp_path / "torn", steps=3)
    rng = np.random.default_rng(0)
    whole = json.dumps(train_line(3, seconds=1.0, rng=rng))
    append(run.metrics, whole[:50])
    reader = RunReader(run.root)
    assert len(reader.refresh().train) == 3
    append(run.metrics, whole[50:] + "\n")
    assert len(reader.refresh().train) == 4
    append(run.metrics, whole[:50] + "\n" + json.dumps(train_line(4, seconds=1.0, rng=rng)) + "\n")
    seen = reader.refresh()
    assert [line["step"] for line in seen.train] == [0, 1, 2, 3, 4]
    assert seen.torn_lines == 1


def test_a_start_behind_a_torn_line_is_not_lost(tmp_path: Path) -> None:
    run = make_run(tmp_path / "again", steps=2)
    path = run.spans / "drafter-0.jsonl"
    before = len(read_run(run.root).spans["drafter-0"])
    again = BEGAN + 500
    append(path, '["cpu","forw' + start("drafter-0", unix=again) + '["cpu","forward",1000000,2000000,5,9]\n')
    spans = read_run(run.root).spans["drafter-0"]
    assert len(spans) == before + 1
    assert spans.starts == (BEGAN, again)
    assert spans.gpu is None
    assert spans.start[-1] == pytest.approx(again + 1)
    assert (spans.seconds[-1], spans.pack[-1], spans.step[-1]) == (2.0, 5, 9)


def test_dropped_spans_are_counted_over_all_starts(tmp_path: Path) -> None:
    run = make_run(tmp_path / "dropped", steps=2)
    path = run.spans / "drafter-0.jsonl"
    for count in (15, 4):
        append(path, json.dumps({"kind": "dropped", "spans": count}) + "\n" + start("drafter-0", unix=BEGAN + 100))
    spans = read_run(run.root).spans
    assert spans["drafter-0"].dropped == 19
    assert spans["target-0"].dropped == 0


def test_a_resumed_run_replaces_the_steps_it_makes_again(tmp_path: Path) -> None:
    run = make_run(tmp_path / "resumed", steps=10, validate_every=5)
    rng = np.random.default_rng(1)
    append(run.metrics, json.dumps({"kind": "start", "step": 5, "run": "resumed", "num_steps": 10}) + "\n")
    append(run.metrics, json.dumps(validation_line(5, acceptance=9.0)) + "\n")
    append(run.metrics, json.dumps(train_line(5, seconds=77.0, rng=rng) | {"loss": "nan"}) + "\n")
    seen = read_run(run.root)
    assert [line["step"] for line in seen.train] == [0, 1, 2, 3, 4, 5]
    assert seen.train[-1]["seconds"] == 77.0
    assert math.isnan(column(seen.train, "loss")[-1])
    assert [(line["step"], line["acceptance_length"]) for line in seen.validations][1:] == [(5, 9.0)]


def test_a_file_that_was_made_anew_is_read_from_its_start(tmp_path: Path) -> None:
    run = make_run(tmp_path / "anew", steps=10)
    reader = RunReader(run.root)
    reader.refresh()
    run.metrics.write_text(json.dumps({"kind": "start", "step": 0}) + "\n")
    (run.spans / "drafter-0.jsonl").write_text(start("drafter-0", unix=BEGAN))
    seen = reader.refresh()
    assert seen.train == []
    assert len(seen.spans["drafter-0"]) == 0
    assert len(seen.spans["target-0"])


def test_windows_cut_spans_and_keep_their_sum(tmp_path: Path) -> None:
    make_run(tmp_path / "cut", steps=10)
    cpu = read_run(tmp_path / "cut").spans["drafter-0"].of_lane("cpu")
    window = cpu.between(BEGAN + 4.01, BEGAN + 6.02)
    assert window.seconds.sum() == pytest.approx(2.01, abs=1e-5)
    assert len(cpu.between(BEGAN - 10, BEGAN - 5)) == 0


def test_samples_are_columns_with_nan_where_a_row_has_none() -> None:
    samples = Samples.of([{"time": 1.0, "gpu": 0, "sm_active": None}, {"time": 2.0, "gpu": 1, "sm_active": 0.5, "name": "x"}])
    assert len(samples) == 2
    assert math.isnan(samples["sm_active"][0])
    assert samples.where("gpu", 1)["time"].tolist() == [2.0]
    assert "name" not in samples.columns
    assert np.isnan(samples["power_watts"]).all()
    joined = samples.joined(Samples.of([{"time": 3.0, "power_watts": 5.0}]))
    assert np.isnan(joined["power_watts"][:2]).all()
    assert joined["power_watts"][2] == 5.0
    assert len(Samples()) == 0


def test_ten_thousand_steps_are_read_in_seconds(long_run: Path) -> None:
    began = time.process_time()
    run = read_run(long_run)
    seconds = time.process_time() - began
    assert sum(map(len, run.spans.values())) > 200_000
    assert seconds < 10
