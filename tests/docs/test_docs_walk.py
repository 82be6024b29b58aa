"""A newcomer's walk: every command of `docs/first-drafter.md` after the installation, as it stands there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from doc_pages import DOCS, ROOT, shell_blocks

IN_A_TERMINAL = {"slipstream watch first-drafter": "slipstream watch first-drafter --once"}
"""Lines that need a terminal, and the same without one."""


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_first_drafter_word_by_word(tmp_path: Path) -> None:
    for name in ("recipes", "src"):
        (tmp_path / name).symlink_to(ROOT / name)
    command = tmp_path / "bin" / "slipstream"  # whether or not this environment has installed one
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m slipstream.cli.main "$@"\n')
    command.chmod(0o755)
    given = os.environ.items()  # as a newcomer's shell has it, without what tests/conftest.py sets
    environment = {name: value for name, value in given if not name.endswith("_NUM_THREADS") and name != "OMP_WAIT_POLICY"}
    environment["PATH"] = f"{command.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    install, *blocks = shell_blocks(DOCS / "first-drafter.md")
    assert "make install" in install
    lines = [line.strip() for block in blocks for line in block.splitlines()]
    assert [line for line in lines if line.startswith("slipstream train")], "the walk trains"
    told: list[str] = []
    for line in lines:
        shell = ["bash", "-c", IN_A_TERMINAL.get(line, line)]
        done = subprocess.run(shell, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (line, done.stdout, done.stderr)
        told.append(done.stdout)
    run = tmp_path / "runs" / "first-drafter"
    assert (run / "report.html").is_file()
    assert json.loads((run / "exports" / "final" / "config.json").read_text())["architectures"] == ["DFlashDraftModel"]
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lengths = [line["acceptance_length"] for line in metrics if line["kind"] == "validation"]
    assert lengths[0] == 1.0
    assert lengths[-1] > 1.8
    assert any("14 equal, 0 near ties, 0 different" in text for text in told)
