"""A small target for corpus tests: a byte-level tokenizer trained here, and chat templates of several habits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<mask>", "<|user|>", "<|assistant|>"]
WORDS = "the quick brown fox answers\n\n\n\nquestions of users about seven lazy dogs and\n\n\n\n42 numbers. " * 40

CHATML = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nBe brief<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""No generation tags, a default system turn, and a newline after the stop token."""

MakeTarget = Callable[..., Path]


def write_target(folder: Path, *, template: str = CHATML, eos: int = 2, positions: int = 512, vocab: int | None = None) -> Path:
    """A folder with the files that the corpus stage reads of a target: no weights."""
    folder.mkdir(parents=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=380, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([WORDS], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[eos], "bos_token": "<|im_start|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(template)
    size = tokenizer.get_vocab_size() if vocab is None else vocab
    model = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "vocab_size": size,
        "max_position_embeddings": positions,
        "eos_token_id": eos,
    }
    (folder / "config.json").write_text(json.dumps(model))
    return folder


@pytest.fixture(scope="session")
def make_target(tmp_path_factory: pytest.TempPathFactory) -> MakeTarget:
    """Makes a target folder with another template or other sizes."""
    return lambda **changes: write_target(tmp_path_factory.mktemp("target") / "model", **changes)


@pytest.fixture(scope="session")
def target(make_target: MakeTarget) -> Path:
    """The plain chatml target."""
    return make_target()


@pytest.fixture
def write_lines(tmp_path: Path) -> Callable[..., Path]:
    """Writes rows as JSON lines; strings and bytes go in as they are."""

    def write(*rows: object, name: str = "rows.jsonl") -> Path:
        raw = [row if isinstance(row, bytes) else (row if isinstance(row, str) else json.dumps(row)).encode() for row in rows]
        (tmp_path / name).write_bytes(b"\n".join(raw) + b"\n")
        return tmp_path / name

    return write
