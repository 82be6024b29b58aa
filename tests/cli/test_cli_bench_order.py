"""A bench traces its work, and for that the order in which it loads libraries counts: torch before the driver is asked."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
from slipstream.device import kind

seen = []

def asked():
    seen.append("torch" in sys.modules)
    return 0

kind.torch_cuda_version = lambda: {version!r}
kind.count_gpus = asked
from slipstream.cli.main import app

try:
    app(["bench", "ceilings"])
except SystemExit as ended:
    print(ended.code, seen, "torch" in sys.modules)
"""


def run(version: str | None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", CODE.format(version=version)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_torch_is_loaded_before_the_driver_is_asked() -> None:
    done = run("13.0")
    assert done.stdout.split("\n")[-2] == "2 [True] True", done
    assert "no GPU is visible" in done.stderr


def test_a_torch_without_cuda_is_not_loaded_at_all() -> None:
    done = run(None)
    assert done.stdout.split("\n")[-2] == "2 [] False", done
    assert "built without CUDA" in done.stderr
