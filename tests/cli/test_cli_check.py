"""`slipstream regenerate`, `prepare` and `check`, one after the other on a tiny target with a real tokenizer."""

from __future__ import annotations

import json

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from slipstream.cli.main import app

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ROWS = [
    {"messages": [{"role": "user", "content": "Count to three."}, {"role": "assistant", "content": "not this"}]},
    {"question": "Why is the sky blue?"},
    {"messages": [{"role": "user", "content": text} if at % 2 == 0 else {"role": "assistant", "content": text}
                  for at, text in enumerate(["Hi.", "Hello.", "What now?", "Nothing."])]},
    {"oops": 1},
    {"messages": [{"role": "assistant", "content": "nobody asked"}]},
    {"question": "Why is the sky blue?"},
]  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    specials = ["<mask>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*specials, *alphabet])}
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>", additional_special_tokens=specials)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(vocab),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=2,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def run(*args):
    return CliRunner().invoke(app, [str(arg) for arg in args])


def regenerate(target, folder, *more):
    (folder / "src.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    options = (
        "--out",
        folder / "out.jsonl",
        "--max-new-tokens",
        40,
        "--batch-size",
        2,
        "--dtype",
        "float32",
        "--device",
        "cpu",
    )
    return run("regenerate", folder / "src.jsonl", "--target", target, *options, *more)


def write_recipe(folder, target):
    (folder / "recipe.toml").write_text(
        f'name = "tiny"\n[target]\nmodel = "{target}"\ndtype = "float32"\nnum_taps = 2\n'
        f'[corpus]\npath = "{folder / "corpus"}"\n[plan]\npack_tokens = 512\npack_anchors = 32\n'
        '[drafter]\nnum_layers = 2\nblock_size = 8\nmask_token_id = 0\nlayer_types = ["full", "sliding"]\nsliding_window = 16\n'
        '[placement]\ndevice = "cpu"\n'
    )
    return folder / "recipe.toml"


def test_regenerate_prepare_check(target, tmp_path):
    result = regenerate(target, tmp_path, "--local", "--json")
    assert result.exit_code == 0, result.output
    counts = json.loads(result.stdout)
    assert (counts["already_answered"], counts["duplicates"]) == (0, 1)
    assert counts["refused"] == {"unknown_form": 1, "no_user_turn": 1}
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert counts["answered"] == len(records)
    prompts = [record["messages"][-1]["content"] for record in records]
    hi = records[2]
    later = ["What now?"] if hi["finish"] == "stop" else []
    assert prompts == ["Count to three.", "Why is the sky blue?", "Hi.", *later]
    assert all(record["finish"] in ("stop", "length") for record in records)
    again = regenerate(target, tmp_path, "--local")
    assert f"0 answered, {len(records)} already there" in again.stdout

    prepared = run("prepare", tmp_path / "out.jsonl", "--target", target, "--out", tmp_path / "corpus", "--json")
    assert prepared.exit_code == 0, prepared.output
    supervised = sum(len(record["answer_token_ids"]) for record in records)
    assert json.loads(prepared.stdout)["num_supervised"] == supervised, "the corpus supervises exactly the answers' tokens"

    checked = run("check", write_recipe(tmp_path, target), "--json")
    assert checked.exit_code == 0, checked.output
    results = {entry["name"]: entry for entry in json.loads(checked.stdout)}
    assert all(entry["passed"] for entry in results.values())
    assert results["isolation"]["measured"] == 0
    assert results["blocks"]["measured"] > 0, "two ways of computing, not one compared with itself"
    table = run("check", tmp_path / "recipe.toml", "target.packing=padded", "--prompts", tmp_path / "out.jsonl")
    assert table.exit_code == 0, table.output
    assert "padded against alone" in table.stdout
    assert "check: 100%, done" in table.stderr
    assert "FAILS" not in table.stdout


def test_check_fails_with_exit_code_1(target, tmp_path, monkeypatch):
    monkeypatch.setattr("slipstream.cli.check.BLOCK_TOLERANCE", 0.0)
    rows = [{"messages": [*row["messages"]]} for row in ROWS if len(row.get("messages", [])) > 1]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = run("check", write_recipe(tmp_path, target), "--prompts", tmp_path / "chats.jsonl")
    assert result.exit_code == 1
    assert "FAILS" in result.stdout


def test_check_needs_two_documents_that_fit(target, tmp_path):
    (tmp_path / "chats.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    result = run("check", write_recipe(tmp_path, target), "--prompts", tmp_path / "chats.jsonl")
    assert result.exit_code == 2
    assert "isolation needs two" in result.output


def test_regenerate_refuses_what_it_cannot_do(target, tmp_path):
    result = regenerate(target, tmp_path)
    assert result.exit_code == 2
    assert "--local or --server = None: is needed: who is to answer?" in result.output
    assert not (tmp_path / "out.jsonl").exists()
    assert "--dtype = 'float16'" in regenerate(target, tmp_path, "--local", "--dtype", "float16").output
    assert "give no answer" in regenerate(target, tmp_path, "--local", "--max-new-tokens", 510).output
