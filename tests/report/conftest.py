"""What several tests of the report read."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_maker import make_run


@pytest.fixture(scope="session")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 10,000 steps with three workers: some 260,000 spans."""
    return make_run(tmp_path_factory.mktemp("runs") / "long", steps=10_000).root
