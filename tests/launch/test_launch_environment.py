"""What a run folder says of the machine, the code and the command it was made with."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch
from preflight_ground import recipe_of, write_ground

import slipstream
from slipstream.launch.environment import code_version, record_environment
from slipstream.launch.preflight import preflight
from slipstream.launch.resources import Resources


def test_a_start_says_what_it_ran_on(tmp_path: Path) -> None:
    write_ground(tmp_path / "ground")
    resources = Resources.of(preflight(recipe_of(tmp_path / "ground")))
    path = tmp_path / "environment.jsonl"
    record_environment(path, resources=resources)
    record_environment(path, resources=replace(resources, gpus=()))
    first, second = [json.loads(line) for line in path.read_text().splitlines()]
    assert first["command"] == sys.argv
    assert first["code"] == code_version()
    assert first["code"]["version"] == slipstream.__version__
    assert first["versions"]["torch"] == torch.__version__
    assert first["cores"] >= first["cores_allowed"] >= 1
    assert first["memory_allowed_bytes"] > 1 << 20
    assert second["gpus"] == []


def test_code_is_told_by_commit_and_by_content(tmp_path: Path) -> None:
    package = tmp_path / "src" / "slipstream"
    package.mkdir(parents=True)
    (package / "one.py").write_text("a = 1\n")
    before = code_version(package)
    assert before["commit"] is None

    def git(*arguments: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(["git", "-C", str(tmp_path), *who, *arguments], check=True, capture_output=True, text=True).stdout

    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    committed = code_version(package)
    assert git("rev-parse", "HEAD").startswith(committed["commit"])
    assert committed["sources"] == before["sources"]
    (package / "one.py").write_text("a = 2\n")
    changed = code_version(package)
    assert changed["commit"] == f"{committed['commit']}-dirty"
    assert changed["sources"] != before["sources"]


def test_a_checkout_of_something_else_is_not_ours(tmp_path: Path) -> None:
    installed = tmp_path / "venv" / "slipstream"
    installed.mkdir(parents=True)
    (tmp_path / ".git").mkdir()
    assert code_version(installed)["commit"] is None
