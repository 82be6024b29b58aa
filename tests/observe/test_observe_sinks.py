"""Sinks: start or the run stops; a later fault is reported and never stops the run."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console
from test_observe_metrics import RECORD

from slipstream.errors import PreflightError
from slipstream.observe import sinks
from slipstream.observe.facts import RunFacts
from slipstream.observe.metrics import step_metrics
from slipstream.observe.sinks import ConsoleSink, JsonlSink, MetricLog, open_metric_log


def facts(tmp_path: Path, *, every: int = 10) -> RunFacts:
    return RunFacts(
        name="run",
        num_steps=1000,
        metrics_path=tmp_path / "metrics.jsonl",
        console_every_steps=every,
        folder=tmp_path,
        recipe={"plan": {"seed": 3}},
    )


class Listening:
    """Keeps lines; raises on those of the given steps."""

    def __init__(self, *, fails_at: tuple[int, ...] = ()) -> None:
        self.lines: list[dict] = []
        self.fails_at = fails_at
        self.closed = False

    def write(self, line) -> None:
        if line["step"] in self.fails_at:
            raise OSError("No space left on device")
        self.lines.append(dict(line))

    def close(self) -> None:
        self.closed = True


def test_jsonl_lines(tmp_path: Path) -> None:
    with open_metric_log(["jsonl"], facts=facts(tmp_path)) as log:
        log.write({"kind": "train", "step": 1, "loss": 2.5, "slots": [0.5, None]})
        assert (tmp_path / "metrics.jsonl").read_text().endswith("\n")
        log.write({"kind": "train", "step": 2, "loss": math.nan, "nested": {"norm": -math.inf}})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[0] == {"kind": "train", "step": 1, "loss": 2.5, "slots": [0.5, None]}
    assert lines[1] == {"kind": "train", "step": 2, "loss": "nan", "nested": {"norm": "-inf"}}


def test_jsonl_goes_on_below_a_torn_line(tmp_path: Path) -> None:
    where = facts(tmp_path)
    where.metrics_path.write_text('{"kind": "train", "step": 1}\n{"kind": "tra')
    sink = JsonlSink(where)
    sink.write({"kind": "train", "step": 2})
    sink.close()
    assert where.metrics_path.read_text().splitlines()[1:] == ['{"kind": "tra', '{"kind": "train", "step": 2}']


def test_a_sink_that_does_not_start_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = Listening()
    monkeypatch.setattr(sinks, "SINKS", {"listening": lambda facts: started, "jsonl": JsonlSink})
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(PreflightError, match=r"observe\.sinks = 'jsonl': this sink does not start") as caught:
        open_metric_log(["listening", "jsonl"], facts=facts(tmp_path))
    assert "metrics.jsonl" in str(caught.value)
    assert started.closed


def test_wandb_that_is_not_logged_in_may_go_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(facts: RunFacts) -> Listening:
        raise ValueError("No API key configured")

    monkeypatch.setattr(sinks, "SINKS", {"wandb": refuses})
    with pytest.raises(PreflightError, match=r"No API key configured \(observe.wandb_mode = \"offline\" needs no login"):
        open_metric_log(["wandb"], facts=facts(tmp_path))
    with pytest.raises(PreflightError, match=r"No API key configured$"):
        open_metric_log(["wandb"], facts=dataclasses.replace(facts(tmp_path), wandb_mode="offline"))


def test_an_unknown_sink_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match="console, jsonl"):
        open_metric_log(["pigeon"], facts=facts(tmp_path))


def test_a_later_fault_is_reported_and_the_sink_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    good, bad = Listening(), Listening(fails_at=(2, 3))
    log = MetricLog({"good": good, "bad": bad})
    for step in range(1, 5):
        log.write({"kind": "train", "step": step})
    log.close()
    assert [line["step"] for line in good.lines if line["kind"] == "train"] == [1, 2, 3, 4]
    assert [line["step"] for line in bad.lines] == [1, 4]
    reports = [line for line in good.lines if line["kind"] == "sink_failed"]
    assert reports == [{"kind": "sink_failed", "step": 2, "sink": "bad", "error": "OSError: No space left on device"}]
    assert log.failures == {"good": 0, "bad": 2}
    assert [record.getMessage() for record in caplog.records] == [
        "sink bad failed; training goes on",
        "sink bad failed 2 times; those lines are lost there",
    ]
    assert good.closed
    assert bad.closed


def test_a_full_disk_never_reaches_training(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    where = dataclasses.replace(facts(tmp_path), metrics_path=Path("/dev/full"))
    log = open_metric_log(["jsonl"], facts=where)
    log.write({"kind": "train", "step": 1})
    log.close()
    assert log.failures["jsonl"] >= 1


def console_text(tmp_path: Path, lines: list[dict], *, every: int = 10, clock: list[float] | None = None) -> list[str]:
    out = io.StringIO()
    sink = ConsoleSink(facts(tmp_path, every=every), console=Console(file=out, width=200, highlight=False))
    ticks = iter(clock or [])
    sink._clock = lambda: next(ticks, 0.0)
    for line in lines:
        sink.write(line)
    return out.getvalue().splitlines()


def train_line(step: int, **changes: object) -> dict:
    return {**step_metrics(RECORD, totals={}), "step": step, **changes}


def test_console_shows_due_lines_and_the_time_left(tmp_path: Path) -> None:
    shown = console_text(tmp_path, [train_line(step) for step in range(0, 21)], clock=[0.0, 20.0, 40.0])
    assert len(shown) == 3
    assert shown[0].startswith("step 1/1000")
    assert shown[0].endswith("left ?")
    assert "loss 2.5" in shown[1]
    assert "tau 1.7" in shown[1]
    assert "2,000 tokens/s" in shown[1]
    assert shown[2].endswith("left 0:32:38")  # 20 steps in 40 s, 979 to go


def test_console_always_shows_the_last_and_the_skipped_step(tmp_path: Path) -> None:
    shown = console_text(tmp_path, [train_line(3), train_line(4, skipped=True), train_line(999)])
    assert len(shown) == 2
    assert "skipped: not finite" in shown[0]
    assert shown[1].startswith("step 1000/1000")


def test_console_shows_everything_else(tmp_path: Path) -> None:
    shown = console_text(tmp_path, [{"kind": "validation", "step": 500, "acceptance_length": 3.25, "note": "[red]"}])
    assert shown == ["validation at step 500  acceptance_length 3.25  note [red]"]


def test_a_terminal_has_a_bar_below_the_lines(tmp_path: Path) -> None:
    out = io.StringIO()
    sink = ConsoleSink(facts(tmp_path), console=Console(file=out, width=100, force_terminal=True, highlight=False))
    ticks = iter([0.0, 0.0, 20.0, 20.0, 40.0, 40.0])
    sink._clock = lambda: next(ticks, 40.0)
    for step in range(0, 21, 5):
        sink.write(train_line(step))
    sink.write({"kind": "checkpoint", "step": 21})
    shown = out.getvalue()
    assert "step 21/1000  left 0:32:38" in shown
    assert "checkpoint" in shown
    assert shown.index("step 6/1000") < shown.index("step 16/1000")
    sink.close()
    sink.close()
    assert out.getvalue().endswith("\x1b[2K")  # the bar is gone and the cursor stands where it was
    assert console_text(tmp_path, [train_line(0)])[0].startswith("step 1/1000")  # no bar where there is no terminal


def test_a_package_that_is_missing_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "missing_package", lambda name: "wandb" if name == "wandb" else None)
    with pytest.raises(PreflightError, match=r"observe\.sinks = 'wandb': needs the package wandb") as caught:
        open_metric_log(["jsonl", "wandb"], facts=facts(tmp_path))
    assert "slipstream[sinks]" in caught.value.hint
    assert not (tmp_path / "metrics.jsonl").exists()
