"""The demo's target: what the conversion puts back, and what it refuses."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from slipstream.config import read_target_info
from slipstream.demo.target import ensure_target, find_gguf
from slipstream.errors import TargetError


def test_a_missing_package_is_named() -> None:
    with pytest.raises(TargetError, match="is not installed") as caught:
        find_gguf("no_such_package_at_all")
    assert caught.value.value == "no_such_package_at_all"


def test_a_package_without_model_is_refused() -> None:
    with pytest.raises(TargetError, match="0 GGUF files"):
        find_gguf("slipstream")


def test_a_folder_that_is_there_is_kept(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert ensure_target(tmp_path, gguf=tmp_path / "none.gguf") == tmp_path
    assert (tmp_path / "config.json").read_text() == "{}"


def _write_gguf(file: Path, *, pre: str, head: bool) -> Path:
    numpy, gguf = importlib.import_module("numpy"), importlib.import_module("gguf")
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_tokenizer_pre(pre)
    for name in ("token_embd.weight", *(["output.weight"] if head else [])):
        writer.add_tensor(name, numpy.zeros((4, 32), dtype=numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.mark.parametrize(("pre", "head", "rule"), [("smollm", True, "output.weight"), ("qwen2", False, "pre-tokeniser")])
def test_other_models_are_refused_and_leave_nothing(tmp_path: Path, pre: str, head: bool, rule: str) -> None:
    gguf = _write_gguf(tmp_path / "m.gguf", pre=pre, head=head)
    with pytest.raises(TargetError, match=rule):
        ensure_target(tmp_path / "out" / "model", gguf=gguf)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.slow
def test_the_real_target_reads_like_any_other(tmp_path: Path) -> None:
    from safetensors import safe_open
    from transformers import AutoTokenizer

    folder = ensure_target(tmp_path / "model")
    info = read_target_info(str(folder))
    assert (info.num_layers, info.hidden_size, info.vocab_size, info.tie_word_embeddings) == (30, 576, 49152, True)
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    with safe_open(folder / "model.safetensors", "pt") as weights:
        names = set(weights.keys())
        assert str(weights.get_tensor("model.embed_tokens.weight").dtype) == "torch.bfloat16"
    assert "lm_head.weight" not in names
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.tokenize("x 2024") == ["x", "Ġ", "2", "0", "2", "4"]
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
