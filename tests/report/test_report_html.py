"""The report as a file: self-contained, small, quick, exact where it says so, and safe whatever a run is called."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_maker import BEGAN, make_run

from slipstream.report.codec import decode
from slipstream.report.html import SCRIPTS, STYLES, read_asset, report_page
from slipstream.report.lanes import choose_thinning, thin
from slipstream.report.payload import Cursor, run_payload
from slipstream.report.reading import read_run
from slipstream.report.spans import Spans

COLOURED = re.compile(r"^#[0-9a-f]{6}$")


def payload_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="payload">(.*?)</script>', page, flags=re.DOTALL)
    assert found is not None
    return dict(json.loads(found.group(1)))


def decoded(lane: dict[str, Any]) -> dict[str, Any]:
    """Columns of a lane as the page's script builds them; microseconds."""
    start, at = [], 0
    for gap, micros in zip(decode(lane["gap"]).tolist(), decode(lane["micros"]).tolist(), strict=True):
        start.append(at + gap)
        at = start[-1] + micros
    names = [lane["states"][code] for code in decode(lane["state"]).tolist()]
    others = {name: decode(lane[name]).tolist() for name in ("micros", "pack", "step")}
    return {"start": start, "state": names, **others}


def test_lanes_hold_every_span_exactly(tmp_path: Path) -> None:
    make_run(tmp_path / "one", steps=40, checkpoint_every=15)
    run = read_run(tmp_path / "one")
    [payload] = payload_of(report_page([run]))["runs"]
    assert payload["exact"] is None
    assert [(lane["worker"], lane["lane"]) for lane in payload["lanes"]] == [
        (worker, lane) for worker in ("target-0", "target-1", "drafter-0") for lane in ("gpu", "cpu")
    ]
    for lane in payload["lanes"]:
        spans = run.spans[lane["worker"]].of_lane(lane["lane"])
        found = decoded(lane)
        assert found["state"] == [spans.state_names[code] for code in spans.state]
        assert found["pack"] == spans.pack.tolist()
        assert found["step"] == spans.step.tolist()
        np.testing.assert_allclose(found["start"], (spans.start - payload["begin"]) * 1e6, atol=1)
        np.testing.assert_allclose(found["micros"], spans.seconds * 1e6, atol=1)


def test_curves_hold_every_step(tmp_path: Path) -> None:
    make_run(tmp_path / "one", steps=40)
    run = read_run(tmp_path / "one")
    train = run_payload(run)["train"]
    assert decode(train["step"]).tolist() == list(range(40))
    np.testing.assert_allclose(decode(train["columns"]["loss"]), [line["loss"] for line in run.train], rtol=1e-6)
    assert "mfu" not in train["columns"]
    slots = run_payload(run)["slot_curves"]
    assert decode(slots["step"]).tolist() == list(range(40))
    for slot, column in enumerate(slots["columns"]):
        np.testing.assert_allclose(decode(column), [line["accuracy_per_slot"][slot] for line in run.train], rtol=1e-6)


def test_slots_are_thinned_to_few_means(tmp_path: Path) -> None:
    make_run(tmp_path / "one", steps=500)
    run = read_run(tmp_path / "one")
    slots = run_payload(run)["slot_curves"]
    assert slots["mean_of"] == 3
    assert decode(slots["step"]).tolist() == list(range(0, 500, 3))
    assert len(slots["columns"]) == 7
    first = [line["accuracy_per_slot"][0] for line in run.train[:3]]
    assert decode(slots["columns"][0])[0] == pytest.approx(np.mean(first), rel=1e-6)


def test_the_file_asks_for_nothing_from_outside(tmp_path: Path) -> None:
    make_run(tmp_path / "one", steps=10)
    page = report_page([read_run(tmp_path / "one")])
    assert "default-src 'none'" in page
    assert "connect-src 'none'" in page
    assert not re.search(r"""(?:src|href)\s*=\s*["']?(?:https?:)?//""", page)
    assert not re.search(r"@import|url\(", "\n".join(map(read_asset, STYLES)))
    assert not re.search(r"\b(?:XMLHttpRequest|WebSocket|EventSource|sendBeacon)\b", "\n".join(map(read_asset, SCRIPTS)))
    assert "$" not in re.findall(r"<title>(.*?)</title>", page)[0]


def test_no_name_can_leave_its_place(tmp_path: Path) -> None:
    name = "</script><script>document.title='owned'</script><!--"
    make_run(tmp_path / "one", steps=5, recipe={"name": name})
    page = report_page([read_run(tmp_path / "one")])
    assert page.count("<script") == 2
    assert "<!--" not in page.split("<body>")[1].split("<script>")[0]
    assert payload_of(page)["runs"][0]["figures"]["name"] == name


def test_ten_thousand_steps_are_small_and_quick(long_run: Path) -> None:
    began = time.process_time()
    page = report_page([read_run(long_run)])
    seconds = time.process_time() - began
    assert len(page.encode()) < 10e6
    assert seconds < 20
    assert payload_of(page)["runs"][0]["exact"] is None


def thinned(spans: Spans, lane: str, thinning: Any, begin: float) -> tuple[Spans, Spans]:
    whole = spans.of_lane(lane)
    return whole, thin(whole, thinning=thinning, begin=begin)


def test_what_does_not_fit_is_merged_without_losing_a_second(tmp_path: Path) -> None:
    make_run(tmp_path / "many", steps=2000)
    run = read_run(tmp_path / "many")
    count = sum(map(len, run.spans.values()))
    most = count // 6
    thinning = choose_thinning(run, most_spans=most)
    assert thinning is not None
    assert choose_thinning(run, most_spans=count) is None
    kept = 0
    for worker in run.spans:
        for lane in ("cpu", "gpu"):
            whole, merged = thinned(run.spans[worker], lane, thinning, run.begin)
            kept += len(merged)
            before, after = whole.seconds_by_state(), merged.seconds_by_state()
            assert after.keys() == before.keys()
            for state, seconds in before.items():
                assert after[state] == pytest.approx(seconds, rel=1e-6)
            assert (np.diff(merged.start) >= 0).all()
            if lane == "cpu":  # contiguous, so that merged spans stay where they were
                assert (merged.end[:-1] <= merged.start[1:] + 1e-5).all()
            for low, high in thinning.exact:
                inside = whole.pick((whole.start >= low) & (whole.end <= high))
                same = merged.pick((merged.start >= low) & (merged.end <= high) & np.isin(merged.start, inside.start))
                np.testing.assert_array_equal(same.seconds, inside.seconds)
                np.testing.assert_array_equal(same.pack, inside.pack)
    assert kept < most * 1.2
    lows, highs = zip(*thinning.exact, strict=True)
    assert lows[0] == pytest.approx(run.begin)
    assert highs[-1] == pytest.approx(run.end)


def test_windows_that_stay_exact_hold_the_slowest_step(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "slow", steps=1000, workers=("worker-0",))
    path = folder.spans / "worker-0.jsonl"
    lines = path.read_text().splitlines()
    rows = [json.loads(line) for line in lines[1:]]
    slow = next(place for place, row in enumerate(rows) if row[0] == "cpu" and row[5] == 437)
    for row in rows[slow + 1 :]:
        row[2] += 9_000_000
    rows[slow][3] += 9_000_000
    path.write_text("\n".join([lines[0], *map(json.dumps, rows)]) + "\n")
    run = read_run(folder.root)
    thinning = choose_thinning(run, most_spans=2000)
    assert thinning is not None
    at = BEGAN + rows[slow][2] / 1e6 + 4.5
    assert any(low <= at <= high for low, high in thinning.exact)


def test_what_is_newer_than_a_cursor_completes_what_was_there(tmp_path: Path) -> None:
    whole = make_run(tmp_path / "whole", steps=60)
    growing = make_run(tmp_path / "growing", steps=0)
    names = ["metrics.jsonl", "queues.jsonl", "gpus.jsonl", *(f"spans/{path.name}" for path in whole.spans.iterdir())]

    def grow(share: float) -> None:
        for name in names:
            lines = (whole.root / name).read_text().splitlines(keepends=True)
            (growing.root / name).write_text("".join(lines[: max(1, int(len(lines) * share))]))

    grow(0.5)
    first = run_payload(read_run(growing.root))
    cursor = Cursor.parse(first["cursor"])
    assert cursor is not None
    grow(1.0)
    second = run_payload(read_run(growing.root), since=cursor)
    assert first["whole"]
    assert not second["whole"]
    assert "recipe" not in second
    joined = decode(first["train"]["step"]).tolist() + decode(second["train"]["step"]).tolist()
    assert joined == list(range(60))
    expected = run_payload(read_run(whole.root))
    for lane in expected["lanes"]:
        parts = [
            decoded(part)
            for payload in (first, second)
            for part in payload["lanes"]
            if (part["worker"], part["lane"]) == (lane["worker"], lane["lane"])
        ]
        assert len(parts) == 2
        for name, values in decoded(lane).items():
            assert parts[0][name] + parts[1][name] == values
    samples = [len(decode(payload["gpus"][0]["time"])) for payload in (first, second, expected)]
    assert samples[0] + samples[1] == samples[2]
    again = run_payload(read_run(growing.root), since=Cursor.parse(second["cursor"]))
    assert again["lanes"] == again["gpus"] == []
    assert decode(again["train"]["step"]).tolist() == []


def test_a_cursor_from_before_a_new_start_is_answered_with_everything(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "again", steps=10)
    cursor = Cursor.parse(run_payload(read_run(folder.root))["cursor"])
    with folder.metrics.open("a") as file:
        file.write(json.dumps({"kind": "start", "step": 5}) + "\n")
    answer = run_payload(read_run(folder.root), since=cursor)
    assert answer["whole"]
    assert decode(answer["train"]["step"]).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("text", ["", "nonsense", "[1,2]", '["a",0,[],0,0,0]', '["a",0,{"x":"y"},0,0,0]', "null"])
def test_what_is_no_cursor_is_none(text: str) -> None:
    assert Cursor.parse(text) is None


def test_a_run_that_has_hardly_begun_has_a_report(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "state.json").write_text('{"status": "starting", "step": 0, "steps": null}')
    payload = payload_of(report_page([read_run(tmp_path / "new")]))
    [run] = payload["runs"]
    assert run["lanes"] == run["validations"] == run["queues"] == []
    assert run["figures"]["status"] == "starting"
    assert all(COLOURED.match(state[scheme]) for state in payload["states"].values() for scheme in ("light", "dark"))


def test_numbers_that_are_none_are_null(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "nan", steps=3)
    text = folder.metrics.read_text().replace(
        '"acceptance_length_by_request": ', '"acceptance_length_by_request": "nan", "x": '
    )
    folder.metrics.write_text(text)
    page = report_page([read_run(folder.root)])
    assert payload_of(page)["runs"][0]["validations"][0]["acceptance_length_by_request"] is None
    assert "NaN" not in re.search(r'id="payload">(.*?)</script>', page, flags=re.DOTALL).group(1)  # type: ignore[union-attr]
