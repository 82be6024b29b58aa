"""`slipstream train`: what it hands to the run, what it prints, and runs that have nothing left to do."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

from slipstream.cli.main import app
from slipstream.config import dump_recipe, load_recipe
from slipstream.corpus.meta import CorpusMeta, template_fingerprint, tokenizer_fingerprint
from slipstream.corpus.store import write_store
from slipstream.errors import Interrupted, UsageError, WorkerFailed
from slipstream.launch import local
from slipstream.launch.local import RunResult
from slipstream.launch.preflight import Preflight
from slipstream.report.verdict import Verdict
from slipstream.runfolder import RunFolder

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe that passes preflight: a target by its files alone, and a small corpus."""
    target, rng = tmp_path / "target", np.random.default_rng(0)
    target.mkdir()
    (target / "config.json").write_text(json.dumps(CONFIG))
    (target / "tokenizer.json").write_text("{}")
    save_file({"model.embed_tokens.weight": np.zeros((256, 64), np.float32)}, target / "model.safetensors")
    documents = [{"token_ids": rng.integers(10, 256, 40).tolist(), "loss_mask": [False] * 5 + [True] * 35} for _ in range(10)]
    meta = CorpusMeta(
        target=str(target),
        tokenizer_fingerprint=tokenizer_fingerprint(target),
        template_fingerprint=template_fingerprint(target),
    )
    write_store(tmp_path / "corpus", documents, meta)
    file = tmp_path / "recipe.toml"
    file.write_text(
        f"""# a comment that is kept
name = "tiny"
runs = "{tmp_path}/runs"
target = {{ model = "{target}", num_taps = 3 }}
corpus = {{ path = "{tmp_path}/corpus" }}
plan = {{ pack_tokens = 128, pack_anchors = 32, packs_per_step = 2, epochs = 2 }}
drafter = {{ mask_token_id = 3, num_layers = 1, block_size = 4 }}
placement = {{ device = "cpu", host_memory_gb = 0.5 }}
"""
    )
    return file


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What `train_run` was called with; it reports a little and returns a result."""
    calls: list[dict[str, Any]] = []

    def train_run(*, flight: Preflight, given: str, on_report: Callable[[str, str, Any], None]) -> RunResult:
        calls.append({"flight": flight, "given": given})
        on_report("drafter-0", "ready", {})
        on_report("answers", "progress", {"stage": "answers", "done": 4, "of": 4})
        return RunResult(
            folder=flight.folder.root,
            steps=12,
            warm_up_seconds=20.6,
            train_seconds=3.4,
            validate_seconds=1.2,
            checkpoint=flight.folder.checkpoints / "step-000012",
            summary={},
            validations=[{"step": 0, "acceptance_length": 1.0}, {"step": 12, "acceptance_length": 2.3456}],
            verdict=Verdict(headline="15.9K tokens/s: drafters wait 31 % for hidden states"),
        )

    monkeypatch.setattr(local, "train_run", train_run)
    return calls


def train(recipe: Path, *arguments: str) -> Any:
    return CliRunner().invoke(app, ["train", str(recipe), *arguments])


def test_a_run_and_what_to_do_next(recipe: Path, runs: list[dict[str, Any]]) -> None:
    result = train(recipe, "plan.epochs=5")
    assert result.exit_code == 0, result.output
    assert runs[0]["flight"].recipe.plan.epochs == 5
    assert runs[0]["given"].startswith("# a comment that is kept"), "the file's own text"
    assert not runs[0]["flight"].resume
    assert "12 steps: 3 s of training after 21 s of warm-up, 1 s of validation" in result.stdout
    assert "acceptance length 2.346 at step 12" in result.stdout
    assert "verdict: 15.9K tokens/s: drafters wait 31 % for hidden states" in result.stdout
    assert f"next: slipstream export {recipe.parent / 'runs' / 'tiny'} --out DIR" in result.stdout
    assert "drafter-0 is ready" in result.stderr
    assert "answering validation prompts: 4/4" in result.stderr


def test_json_is_all_that_is_printed(recipe: Path, runs: list[dict[str, Any]]) -> None:
    result = train(recipe, "--json")
    content = json.loads(result.stdout)
    assert content["steps"] == 12
    assert content["checkpoint"].endswith("step-000012")
    assert [line["step"] for line in content["validations"]] == [0, 12]
    assert content["verdict"]["headline"].startswith("15.9K tokens/s")
    assert result.stderr == ""


def test_the_drafter_to_start_from_is_a_path_as_it_stands(recipe: Path, runs: list[dict[str, Any]]) -> None:
    result = train(recipe, "--warm-start", "1e5")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: drafter.warm_start = '1e5': has no config.json")
    assert not runs


def started(recipe: Path, *overrides: str, **state: Any) -> RunFolder:
    resolved = load_recipe(recipe, overrides=overrides)
    folder = RunFolder(Path(resolved.runs) / resolved.name)
    folder.create()
    folder.recipe.write_text(dump_recipe(resolved))
    folder.state.write_text(json.dumps(state))
    return folder


def test_resume_goes_on_with_what_is_unfinished(recipe: Path, runs: list[dict[str, Any]]) -> None:
    started(recipe, status="interrupted", steps=12)
    assert train(recipe).exit_code == 2
    result = train(recipe, "--resume", "checkpoint.keep=7")
    assert result.exit_code == 0, result.output
    assert runs[0]["flight"].resume


def test_a_run_that_has_finished_is_no_error_and_starts_nothing(recipe: Path, runs: list[dict[str, Any]]) -> None:
    folder = started(recipe, status="finished", steps=12)
    result = train(recipe, "--resume")
    assert result.exit_code == 0
    assert "tiny has finished: all 12 steps are done" in result.stdout
    assert f"next: slipstream export {folder.root}" in result.stdout
    as_json = json.loads(train(recipe, "--resume", "--json").stdout)
    assert as_json == {"folder": str(folder.root), "steps": 12, "already_finished": True}
    assert not runs


def test_resume_with_another_recipe_is_refused_before_anything_loads(recipe: Path, runs: list[dict[str, Any]]) -> None:
    started(recipe, status="finished", steps=12)
    result = train(recipe, "--resume", "plan.epochs=3")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: plan.epochs = 3: the run to resume was started with 2")
    assert result.stderr.count("\n") == 1
    assert not runs


def test_an_interrupted_run_exits_with_its_signal(
    recipe: Path, runs: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def train_run(**arguments: Any) -> RunResult:
        error = Interrupted("ended in order after SIGTERM; continue with --resume")
        error.exit_code = 143
        raise error

    monkeypatch.setattr(local, "train_run", train_run)
    result = train(recipe)
    assert result.exit_code == 143
    assert result.stderr == "error: ended in order after SIGTERM; continue with --resume\n"


LATE = "WARNING slipstream.launch: target-0 is late"


@pytest.mark.parametrize(
    ("error", "written"),
    [
        (WorkerFailed("drafter-0 ended with 1"), [LATE, "ERROR slipstream: drafter-0 ended"]),
        (UsageError(key="name", value="tiny", rule="is another's"), [LATE]),
    ],
)
def test_what_the_supervisor_warns_of_and_fails_with_is_in_its_log(
    recipe: Path, runs: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, error: Exception, written: list[str]
) -> None:
    def train_run(*, flight: Preflight, **arguments: Any) -> RunResult:
        flight.folder.create()
        logging.getLogger("slipstream.launch").warning("target-0 is late")
        raise error

    monkeypatch.setattr(local, "train_run", train_run)
    train(recipe)
    logs = RunFolder(recipe.parent / "runs" / "tiny").logs
    lines = (logs / "supervisor.log").read_text().splitlines()
    assert len(lines) == len(written)
    assert all(f"supervisor {text}" in line for line, text in zip(lines, written, strict=True))
    logging.getLogger("slipstream.launch").warning("after the run")
    assert len((logs / "supervisor.log").read_text().splitlines()) == len(written)


def test_a_run_without_a_warning_has_no_log_of_the_supervisor(recipe: Path, runs: list[dict[str, Any]]) -> None:
    assert train(recipe).exit_code == 0
    assert not (RunFolder(recipe.parent / "runs" / "tiny").logs / "supervisor.log").exists()


@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        ([1.0, 2.5, 2.25], "acceptance length 2.250 at step 2; the longest was 2.500, at step 1"),
        ([1.0, 2.5, None], "acceptance length 2.500 at step 1"),
        ([None], None),
    ],
)
def test_the_best_validation_is_told_beside_the_last(
    recipe: Path, runs: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, lengths: list[float | None], said: str | None
) -> None:
    whole = local.train_run

    def train_run(**arguments: Any) -> RunResult:
        lines = [{"step": step, "acceptance_length": length} for step, length in enumerate(lengths)]
        return replace(whole(**arguments), validations=lines)

    monkeypatch.setattr(local, "train_run", train_run)
    told = [line for line in train(recipe).stdout.splitlines() if line.startswith("acceptance")]
    assert told == ([] if said is None else [said])
