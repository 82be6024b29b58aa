"""Embedding and head straight from the files, and the fingerprint of those files."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_targets import HIDDEN, VOCAB, make_pack, save_target

from slipstream.config import read_target_info
from slipstream.errors import TargetError
from slipstream.target.ends import load_frozen_ends
from slipstream.target.fake import FakeTarget
from slipstream.target.fingerprint import CHUNK_BYTES, WHOLE_BYTES, fingerprint_target
from slipstream.target.huggingface import load_full


def rewrite(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["llama", "hybrid"])
def test_ends_are_the_models_own(tmp_path, kind, tied):
    info = save_target(tmp_path, kind, tied=tied)
    ends, model = load_frozen_ends(info=info, dtype="float32"), load_full(info=info, dtype="float32")
    assert torch.equal(ends.embedding_VD, model.get_input_embeddings().weight)
    assert torch.equal(ends.head_VD, model.get_output_embeddings().weight)
    assert (ends.head_VD is ends.embedding_VD) == tied
    assert not ends.embedding_VD.requires_grad
    assert load_frozen_ends(info=info, dtype="bfloat16").head_VD.dtype == torch.bfloat16


def test_ends_of_a_sharded_multi_modal_folder(tmp_path):
    info = save_target(tmp_path, "llama")
    weights = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    save_file({"model.language_model.embed_tokens.weight": weights["model.embed_tokens.weight"]}, tmp_path / "a.safetensors")
    save_file({"lm_head.weight": weights["lm_head.weight"]}, tmp_path / "b.safetensors")
    ends = load_frozen_ends(info=info, dtype="float32")
    assert torch.equal(ends.embedding_VD, weights["model.embed_tokens.weight"])
    assert torch.equal(ends.head_VD, weights["lm_head.weight"])


def test_tied_with_a_second_different_head_is_refused(tmp_path):
    info = save_target(tmp_path, "llama", tied=True)
    copy = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"].clone()
    rewrite(tmp_path, lambda weights: weights.update({"lm_head.weight": copy}))
    ends = load_frozen_ends(info=info, dtype="float32")
    assert ends.head_VD is ends.embedding_VD, "an equal copy is no conflict"
    rewrite(tmp_path, lambda weights: weights.update({"lm_head.weight": copy + 0.01}))
    with pytest.raises(TargetError, match=r"is tied, but holds lm_head\.weight with other values"):
        load_frozen_ends(info=info, dtype="float32")


@pytest.mark.parametrize(
    ("missing", "rule"), [("lm_head.weight", "has no head"), ("model.embed_tokens.weight", "has no token embedding")]
)
def test_missing_ends_are_named(tmp_path, missing, rule):
    info = save_target(tmp_path, "llama")
    rewrite(tmp_path, lambda weights: weights.pop(missing))
    with pytest.raises(TargetError, match=rule):
        load_frozen_ends(info=info, dtype="float32")


def test_ends_of_another_shape_are_refused(tmp_path):
    info = save_target(tmp_path, "llama")
    rewrite(tmp_path, lambda weights: weights.update({"lm_head.weight": torch.zeros(VOCAB - 1, HIDDEN)}))
    with pytest.raises(TargetError, match=rf"\[{VOCAB - 1}, {HIDDEN}\], config.json says \[{VOCAB}, {HIDDEN}\]"):
        load_frozen_ends(info=info, dtype="float32")


def test_fingerprint_follows_config_and_weights_not_the_folder(tmp_path):
    info = save_target(tmp_path / "a", "llama")
    first = fingerprint_target(info)
    assert fingerprint_target(save_target(tmp_path / "b", "llama")) == first
    rewrite(tmp_path / "a", lambda weights: weights["model.norm.weight"].mul_(1.001))
    second = fingerprint_target(info)
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    (tmp_path / "a" / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-4}))
    assert len({first, second, fingerprint_target(read_target_info(str(tmp_path / "a")))}) == 3


def test_fingerprint_of_a_large_file_reads_samples_of_it(tmp_path):
    info = save_target(tmp_path, "llama")
    rewrite(tmp_path, lambda weights: weights.update({"big": torch.zeros(8 * WHOLE_BYTES // 4)}))
    first = fingerprint_target(info)
    assert fingerprint_target(info) == first
    file = tmp_path / "model.safetensors"
    with file.open("r+b") as stream:
        stream.seek(-CHUNK_BYTES // 2, os.SEEK_END)
        stream.write(b"\1")
    assert fingerprint_target(info) != first


def test_truncated_weights_and_missing_weights_are_refused(tmp_path):
    info = save_target(tmp_path, "llama")
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:100])
    with pytest.raises(TargetError, match="truncated or not safetensors"):
        fingerprint_target(info)
    with pytest.raises(TargetError, match="is damaged"):
        load_frozen_ends(info=info, dtype="float32")
    file.unlink()
    with pytest.raises(TargetError, match="has no"):
        fingerprint_target(info)


def test_fingerprint_needs_no_torch():
    code = "import sys, slipstream.target.fingerprint; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_fake_target_depends_on_the_documents_own_prefix_alone():
    fake = FakeTarget(seed=1, num_taps=2, hidden_size=8, vocab_size=VOCAB)
    pack, slot = make_pack(), torch.full((96, 2, 8), float("nan"))
    assert fake.capture(pack, hidden_TKD=slot) == pack.num_tokens
    assert torch.isfinite(slot).all()
    assert not slot[pack.num_tokens :].any()
    begin, end = int(pack.starts[1]), int(pack.starts[2])
    ids = pack.token_ids[begin:end]
    table = fake._table_VKD
    expected = sum(table[int(ids[7 - back])] * 0.6**back for back in range(8))
    assert torch.allclose(slot[begin + 7], expected, atol=1e-5)
    from slipstream.target.isolation import pack_documents

    alone = torch.zeros(32, 2, 8)
    fake.capture(pack_documents([ids], capacity_tokens=32), hidden_TKD=alone)
    assert torch.equal(alone[: len(ids)], slot[begin:end])
    twin = FakeTarget(seed=1, num_taps=2, hidden_size=8, vocab_size=VOCAB)
    assert twin.fingerprint == fake.fingerprint
    assert torch.equal(twin.ends().head_VD, fake.ends().head_VD)
    other = FakeTarget(seed=2, num_taps=2, hidden_size=8, vocab_size=VOCAB)
    assert other.fingerprint != fake.fingerprint
    assert not torch.equal(other._table_VKD, table)


def test_fake_target_waits_as_told(monkeypatch):
    waited = []
    monkeypatch.setattr("time.sleep", waited.append)
    fake = FakeTarget(seed=1, num_taps=1, hidden_size=4, vocab_size=VOCAB, delay_seconds=lambda pack_id: 0.5 + pack_id)
    fake.capture(make_pack(), hidden_TKD=torch.zeros(96, 1, 4))
    assert waited == [0.5]
