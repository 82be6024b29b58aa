"""The report says what is in the store, and the commands print it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from slipstream.cli.inspect import inspect
from slipstream.cli.prepare import prepare
from slipstream.corpus.inspect import Bin, Run, inspect_corpus, length_histogram
from slipstream.corpus.store import CorpusStore
from slipstream.errors import CorpusError, UsageError

app = typer.Typer()
app.command()(prepare)
app.command()(inspect)

ROWS = [{"prompt": "seven dogs?", "response": "the lazy fox"}] * 3


def call(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def corpus(write_lines: Callable[..., Path], target: Path, tmp_path: Path) -> Path:
    call("prepare", write_lines(*ROWS, {"prompt": "and [red]why[/red]?"}), "--target", target, "--out", tmp_path / "corpus")
    return tmp_path / "corpus"


def test_a_sample_shows_the_mask_in_runs(corpus: Path) -> None:
    report = inspect_corpus(corpus, document_ids=[2])
    sample = report.samples[0]
    assert sample.runs[1:] == (Run("the lazy fox<|im_end|>", sample.num_supervised, True), Run("\n", 1, False))
    assert sample.runs[0].text.endswith("seven dogs?<|im_end|>\n<|im_start|>assistant\n")
    assert sum(run.num_tokens for run in sample.runs) == sample.num_tokens
    assert (sample.document_id, sample.line, sample.num_anchors) == (2, 3, sample.num_supervised - 1)
    assert report.supervised_share == pytest.approx(sample.num_supervised / sample.num_tokens)
    assert set(report.percentiles.values()) == {sample.num_tokens}
    assert [(reject.line, reject.reason) for reject in report.rejects_shown] == [(4, "no_assistant_turn")]


def test_a_tokenizer_that_moved_or_changed(corpus: Path, target: Path, make_target: Callable[..., Path]) -> None:
    other = make_target(eos=0)
    with pytest.raises(CorpusError, match="another tokenizer"):
        inspect_corpus(corpus, document_ids=[0], target=str(other))
    file = target / "tokenizer_config.json"
    before = file.read_text()
    try:
        file.write_text(before.replace("<|im_end|>", "<|user|>"))
        report = inspect_corpus(corpus, document_ids=[0])
    finally:
        file.write_text(before)
    assert "another tokenizer" in report.text_note
    ids = CorpusStore.open(corpus).document(0).token_ids.tolist()
    assert " ".join(run.text.strip() for run in report.samples[0].runs) == " ".join(map(str, ids))
    assert inspect_corpus(corpus, document_ids=[0], target=str(target)).text_note == ""


def test_an_unknown_document_is_refused(corpus: Path) -> None:
    with pytest.raises(CorpusError, match="documents are 0 to 2"):
        inspect_corpus(corpus, document_ids=[3])


@pytest.mark.parametrize(
    ("lengths", "bins"),
    [
        ([5], [Bin(4, 8, 1)]),
        ([1, 2, 3, 4, 7, 8], [Bin(1, 2, 1), Bin(2, 4, 2), Bin(4, 8, 2), Bin(8, 16, 1)]),
        ([16, 31, 64], [Bin(16, 32, 2), Bin(32, 64, 0), Bin(64, 128, 1)]),
        ([], []),
    ],
)
def test_histogram(lengths: list[int], bins: list[Bin]) -> None:
    assert list(length_histogram(np.asarray(lengths, dtype=np.int32))) == bins


def test_prepare_prints_what_became_of_the_rows(write_lines: Callable[..., Path], target: Path, tmp_path: Path) -> None:
    path = write_lines(*ROWS, "{")
    printed = call("prepare", path, "--target", target, "--out", tmp_path / "a")
    assert "3 of 4 rows" in printed
    assert "refused: malformed_json" in printed
    options = ("--max-tokens", 40, "--mask-token-id", 3, "--template-arg", "depth=2", "--template-arg", "mode=slow")
    meta = json.loads(call("prepare", path, "--target", target, "--out", tmp_path / "b", "--json", *options))
    assert meta["rejects"] == {"malformed_json": 1}
    assert meta["options"] == {"max_tokens": 40, "mask_token_id": 3, "template_arguments": {"depth": 2, "mode": "slow"}}
    call("prepare", path, "--target", target, "--out", tmp_path / "b", "--overwrite")
    assert CorpusStore.open(tmp_path / "b").meta.options["mask_token_id"] is None
    with pytest.raises(UsageError, match="KEY=VALUE"):
        call("prepare", path, "--target", target, "--out", tmp_path / "c", "--template-arg", "depth")
    with pytest.raises(CorpusError, match=r"rows\.jsonl:4"):
        call("prepare", path, "--target", target, "--out", tmp_path / "c", "--strict")


def test_inspect_prints_mask_lengths_and_rejects(corpus: Path) -> None:
    printed = call("inspect", corpus, "--document", 1)
    assert "⟦the lazy fox<|im_end|>⟧↵" in printed
    assert "no_assistant_turn" in printed
    assert "3 of 4 rows" in printed
    assert printed.count("anchors") == 2
    report = json.loads(call("inspect", corpus, "--json"))
    assert [sample["document_id"] for sample in report["samples"]] == [0, 1, 2]
    assert report["meta"]["num_distinct_tokens"] > 10
    assert report["rejects_shown"][0]["line"] == 4
