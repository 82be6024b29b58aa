"""Material that every test of launch shares."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from slipstream.corpus.prepare import prepare

sys.path.insert(0, str(Path(__file__).parent))

from launch_material import write_conversations, write_target


@pytest.fixture(scope="session")
def material(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Paths of a tiny target, a prepared corpus and validation prompts."""
    root = tmp_path_factory.mktemp("material")
    target = write_target(root / "target")
    conversations = write_conversations(root / "train.jsonl", count=60, seed=1)
    prepare([conversations], target=target, out=root / "corpus")
    prompts = write_conversations(root / "prompts.jsonl", count=4, seed=2)
    return {"target": str(target), "corpus": str(root / "corpus"), "prompts": str(prompts)}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Two threads on busy cores take a hundred times as long over matrices as small as these."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
