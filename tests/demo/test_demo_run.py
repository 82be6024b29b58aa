"""The demo's story from end to end, on a tiny random target that has the real tokenizer, so that it takes seconds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from slipstream.cli.demo import _rows
from slipstream.config import load_recipe, read_target_info
from slipstream.demo.run import RECIPE, STAGES, DemoSummary, Event, run_demo
from slipstream.demo.target import _save_tokenizer, find_gguf
from slipstream.errors import PreflightError

STEPS = 12


@pytest.fixture(scope="module")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target") / "tiny"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    _save_tokenizer(gguf=find_gguf(), out=folder)
    return folder


@pytest.fixture(scope="module")
def overrides(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    place = tmp_path_factory.mktemp("demo")
    return [
        f"runs={place / 'runs'}",
        f"corpus.path={place / 'corpus'}",
        f"target.model={tiny_target}",
        f"plan.max_steps={STEPS}",
        "plan.pack_anchors=64",
        "validation.max_new_tokens=6",
        "drafter.num_layers=1",
        "drafter.dtype=float32",
        "placement.drafter_threads=1",
    ]


@pytest.fixture(scope="module")
def story(overrides: list[str]) -> tuple[DemoSummary, list[Event]]:
    events: list[Event] = []
    return run_demo(overrides=overrides, show=events.append), events


def test_every_stage_is_shown_to_its_end(story: tuple[DemoSummary, list[Event]]) -> None:
    _, events = story
    assert list(dict.fromkeys(event.stage for event in events)) == list(STAGES)
    for stage in STAGES:
        last = [event for event in events if event.stage == stage][-1]
        assert last.done == last.total, stage


def test_summary_holds_what_was_measured(story: tuple[DemoSummary, list[Event]], overrides: list[str]) -> None:
    summary, _ = story
    recipe = load_recipe(RECIPE, overrides=overrides)
    saved = json.loads((Path(recipe.runs) / "demo" / "summary.json").read_text())
    assert saved["acceptance_length"] == summary.acceptance_length >= 1.0
    assert saved["acceptance_length_before"] == summary.curve[0][1] >= 1.0
    assert [step for step, _ in summary.curve] == [0, STEPS]
    assert saved["lossless"] is True
    assert saved["reloaded_equal"] is True
    assert saved["simulated_equal"] is True
    assert summary.steps == STEPS
    assert summary.train_seconds > 0
    assert summary.tokens_per_second > 0
    assert 0.9 < summary.token_fill <= 1.0
    assert 0.9 < summary.anchor_fill <= 1.0
    exported = json.loads((Path(summary.exported_to) / "config.json").read_text())
    assert exported["hidden_size"] == read_target_info(recipe.target.model).hidden_size


def test_table_shows_the_figures(story: tuple[DemoSummary, list[Event]]) -> None:
    summary, _ = story
    rows = dict(_rows(summary))
    assert f"{summary.acceptance_length:.2f} after" in rows["acceptance length"]
    assert rows["lossless"].startswith("yes")
    assert rows["exported"] == summary.exported_to


def test_another_run_of_that_name_is_not_replaced(story: tuple[DemoSummary, list[Event]], overrides: list[str]) -> None:
    runs = Path(load_recipe(RECIPE, overrides=overrides).runs)
    (runs / "demo").rename(runs / "mine")
    with pytest.raises(PreflightError, match="a run of this name"):
        run_demo(overrides=[*overrides, "name=mine"], show=lambda event: None)
    assert (runs / "mine" / "summary.json").is_file()
    (runs / "mine").rename(runs / "demo")


def test_a_demo_without_held_out_prompts_is_refused(overrides: list[str]) -> None:
    with pytest.raises(PreflightError) as caught:
        run_demo(overrides=[*overrides, "validation.prompts=none"], show=lambda event: None)
    assert caught.value.key == "validation.prompts"
