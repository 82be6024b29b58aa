"""Where the target's embedding and head lie while a drafter trains: no table of the vocabulary twice on a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from launch_material import write_target
from safetensors.torch import load_file, save_file

from slipstream.config import TargetInfo, read_target_info
from slipstream.errors import TargetError
from slipstream.launch.borrowed import borrowed_ends
from slipstream.target.ends import load_frozen_ends
from slipstream.target.huggingface import load_target


@pytest.fixture
def tied(tmp_path: Path) -> TargetInfo:
    return read_target_info(str(write_target(tmp_path / "tied")))


@pytest.fixture
def untied(tied: TargetInfo) -> TargetInfo:
    """The same with a head of its own."""
    config = json.loads((tied.folder / "config.json").read_text())
    (tied.folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    _add_head(tied, by=1.0)
    return read_target_info(str(tied.folder))


def _add_head(info: TargetInfo, *, by: float) -> None:
    file = info.folder / "model.safetensors"
    weights = load_file(file)
    save_file({**weights, "lm_head.weight": weights["model.embed_tokens.weight"] + by}, file, metadata={"format": "pt"})


def test_an_embedding_of_its_own_stays_in_host_memory(untied: TargetInfo) -> None:
    ends = borrowed_ends(info=untied, dtype="float32", device="meta")
    assert (ends.embedding_VD.device.type, ends.head_VD.device.type) == ("cpu", "meta")
    assert torch.equal(ends.embedding_VD, load_frozen_ends(info=untied, dtype="float32").embedding_VD)


def test_beside_a_target_the_embedding_is_not_copied_either(untied: TargetInfo) -> None:
    theirs = torch.empty(untied.vocab_size, untied.hidden_size, device="meta")
    ends = borrowed_ends(info=untied, dtype="float32", device="meta", target_embedding_VD=theirs)
    assert (ends.embedding_VD.device.type, ends.head_VD.device.type) == ("cpu", "meta")


def test_a_tied_table_is_on_the_device_once(tied: TargetInfo) -> None:
    ends = borrowed_ends(info=tied, dtype="bfloat16", device="meta")
    assert ends.embedding_VD is ends.head_VD
    assert ends.head_VD.device.type == "meta"
    theirs = torch.empty(tied.vocab_size, tied.hidden_size, dtype=torch.bfloat16, device="meta")
    beside = borrowed_ends(info=tied, dtype="bfloat16", device="meta", target_embedding_VD=theirs)
    assert beside.embedding_VD is beside.head_VD is theirs
    other = borrowed_ends(info=tied, dtype="float32", device="meta", target_embedding_VD=theirs)
    assert other.head_VD.dtype == torch.float32, "a target of another type has another table"


def test_a_head_with_other_values_is_refused_beside_a_target_too(tied: TargetInfo) -> None:
    _add_head(tied, by=1.0)
    theirs = torch.empty(tied.vocab_size, tied.hidden_size, device="meta")
    with pytest.raises(TargetError, match="is tied, but holds lm_head"):
        borrowed_ends(info=tied, dtype="float32", device="meta", target_embedding_VD=theirs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_target_s_own_table_holds_what_its_files_do(tied: TargetInfo, dtype: str) -> None:
    target = load_target(info=tied, dtype=dtype, tap_layers=[1, 3])
    assert torch.equal(target.embedding_VD, load_frozen_ends(info=tied, dtype=dtype).head_VD)
    assert not target.embedding_VD.requires_grad


def test_on_a_cpu_nothing_is_apart(untied: TargetInfo) -> None:
    theirs = torch.empty(untied.vocab_size, untied.hidden_size)
    ends = borrowed_ends(info=untied, dtype="float32", device="cpu", target_embedding_VD=theirs)
    assert ends.embedding_VD is not theirs
    assert ends.embedding_VD.device == ends.head_VD.device
