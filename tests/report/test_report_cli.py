"""`slipstream report`: which files it writes, what it prints, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

from run_maker import make_run
from typer.testing import CliRunner

from slipstream.cli.main import app


def invoke(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.stdout, result.stderr


def test_a_run_gets_its_report_beside_it(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "one", steps=40).root
    code, out, _ = invoke("report", folder)
    assert code == 0
    assert (folder / "report.html").read_text().startswith("<!doctype html>")
    first, last = out.strip().splitlines()
    assert first.startswith("one: ")
    assert last == f"report: {folder / 'report.html'} (0.2 MB)"


def test_a_trace_or_numbers_alone_write_no_page(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "one", steps=40).root
    code, out, _ = invoke("report", folder, "--trace", tmp_path / "trace.json.gz")
    assert (code, out.startswith("trace of ")) == (0, True)
    assert (tmp_path / "trace.json.gz").stat().st_size > 1000
    code, out, _ = invoke("report", folder, "--json")
    figures = json.loads(out)
    assert (code, figures["name"], figures["step"]) == (0, "one", 40)
    assert figures["verdict"]["headline"]
    assert not (folder / "report.html").exists()


def test_several_runs_are_compared_in_a_file_that_is_named(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / name, steps=20).root for name in ("one", "two")]
    assert invoke("report", *folders)[0] == 2
    code, out, _ = invoke("report", *folders, "--out", tmp_path / "both.html")
    assert code == 0
    assert (tmp_path / "both.html").is_file()
    assert [line.split(":")[0] for line in out.splitlines()] == ["one", "two", "report"]
    code, out, _ = invoke("report", *folders, "--json")
    assert [figures["name"] for figures in json.loads(out)] == ["one", "two"]


def test_what_cannot_be_done_is_said(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / name, steps=5).root for name in ("one", "two")]
    code, _, error = invoke("report", *folders, "--trace", tmp_path / "trace.json")
    assert (code, error.startswith("error: --trace")) == (2, True)
    code, _, error = invoke("report", folders[0], "--out", tmp_path / "nowhere" / "report.html")
    assert (code, error.startswith("error: --out")) == (2, True)
    assert "cannot be written" in error
    code, _, error = invoke("report", tmp_path)
    assert (code, "no run folder" in error) == (2, True)
