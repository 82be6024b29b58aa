"""The site, built once; and the way to the browser that the report is tested with."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST_SECONDS = 20

sys.path.append(str(ROOT / "tests" / "report"))


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of pages. A warning of MkDocs fails it, and so does a build that takes long."""
    place = tmp_path_factory.mktemp("site")
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(place)],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert time.monotonic() - began < MOST_SECONDS
    return place
