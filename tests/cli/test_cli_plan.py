"""`slipstream plan` on a small corpus: what it prints, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

from slipstream.cli.main import app
from slipstream.corpus.meta import CorpusMeta, template_fingerprint, tokenizer_fingerprint
from slipstream.corpus.store import write_store

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "tie_word_embeddings": True,
}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe whose target has config, tokenizer and weights on disk, and whose corpus has 60 documents."""
    target, rng = tmp_path / "target", np.random.default_rng(0)
    target.mkdir()
    (target / "config.json").write_text(json.dumps(CONFIG))
    (target / "tokenizer.json").write_text("{}")
    save_file({"model.embed_tokens.weight": np.zeros((256, 64), np.float32)}, target / "model.safetensors")
    documents = [
        {"token_ids": rng.integers(10, 256, length).tolist(), "loss_mask": [False] * 5 + [True] * (length - 5)}
        for length in rng.integers(10, 140, 60)
    ]
    meta = CorpusMeta(
        target=str(target),
        tokenizer_fingerprint=tokenizer_fingerprint(target),
        template_fingerprint=template_fingerprint(target),
    )
    write_store(tmp_path / "corpus", documents, meta)
    file = tmp_path / "recipe.toml"
    file.write_text(
        f"""
name = "tiny"
runs = "{tmp_path}/runs"
[target]
model = "{target}"
num_taps = 3
[corpus]
path = "{tmp_path}/corpus"
[plan]
pack_tokens = 128
pack_anchors = 32
packs_per_step = 2
epochs = 2
[drafter]
mask_token_id = 3
num_layers = 1
block_size = 4
[placement]
device = "cpu"
host_memory_gb = 0.5
"""
    )
    return file


def planned(recipe: Path, *overrides: str) -> dict:
    """The plan as JSON."""
    result = CliRunner().invoke(app, ["plan", str(recipe), *overrides, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_json_holds_the_schedule_and_the_memory_of_both_placements(recipe):
    plan = planned(recipe)
    summary = plan["summary"]
    assert summary["documents"] == 60
    assert summary["uses_of_documents"] + 2 * sum(summary["refused"].values()) == 120
    assert summary["steps"] == -(-summary["packs"] // 2)
    assert plan["slots"]["number"] == 2 * plan["slots"]["per_column"] == 6
    assert plan["slots"]["bytes"] == 6 * 128 * 3 * 64 * 2
    assert [(process["placement"], process["role"]) for process in plan["processes"]] == [
        ("colocated", "colocated"),
        ("split", "target"),
        ("split", "drafter"),
    ]
    assert not (recipe.parent / "runs").exists(), "planning writes nothing"


def test_the_schedule_does_not_change_with_ranks_workers_or_memory(recipe):
    digest = planned(recipe)["digest"]
    for change in (
        "placement.drafter_ranks=2",
        "placement.target_workers=3",
        "placement.host_memory_gb=0.25",
        "placement.mode=split",
    ):
        assert planned(recipe, change)["digest"] == digest
    assert planned(recipe, "plan.seed=1")["digest"] != digest


def test_tables_name_what_matters(recipe):
    result = CliRunner(env={"COLUMNS": "160"}).invoke(app, ["plan", str(recipe), "plan.replays=2", "plan.replay_distance=10"])
    assert result.exit_code == 0, result.output
    for text in (
        "plan of tiny",
        "too_long",
        "mixing",
        "2 uses a pack",
        "drafter weights",
        "split, MiB",
        "colocated, MiB",
        "slots:",
    ):
        assert text in result.stdout


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("placement.host_memory_gb=0.0001", "placement.host_memory_gb = 0.0: the schedule needs 6 slots"),
        ("plan.replays=16 plan.replay_distance=200", "plan.replays = 16: the run is too short"),
        ("plan.packs=1", "plan.packs = 1: no such key"),
    ],
)
def test_what_cannot_be_is_refused(recipe, override, message):
    result = CliRunner().invoke(app, ["plan", str(recipe), *override.split()])
    assert result.exit_code == 2
    assert message in result.stderr


def shown(recipe: Path, *arguments: str) -> str:
    """What is printed for people."""
    result = CliRunner(env={"COLUMNS": "160"}).invoke(app, ["plan", str(recipe), *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_without_stage_costs_nothing_is_predicted_and_it_says_how_to_come_by_them(recipe):
    assert planned(recipe)["throughput"] is None
    assert "--probe measures them, --costs FILE takes those of a bench or a run" in shown(recipe)


COSTS = {"target_seconds_per_pack": 0.6, "drafter_seconds_per_use": 0.2, "tokens_per_pack": 1, "source": "a test"}


def test_layouts_of_another_machine_from_costs_that_are_given(recipe, tmp_path):
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({"costs": COSTS}))
    found = planned(recipe, "plan.packs_per_step=6", "--gpus", "4", "--gpu", "H100", "--costs", str(file))["throughput"]
    rates = {layout["name"]: layout["trained_tokens_per_second"] for layout in found["layouts"]}
    tokens, summary = found["costs"]["tokens_per_pack"], planned(recipe, "plan.packs_per_step=6")["summary"]
    assert tokens == pytest.approx(summary["target_tokens"] / summary["packs"])
    assert rates == pytest.approx({"3 + 1": tokens * 5, "2 + 2": tokens * 2 / 0.6, "1 + 3": tokens / 0.6})
    assert found["best"] == "3 + 1"
    assert [refused["name"] for refused in found["refused"]] == ["colocated on 4"]
    text = shown(recipe, "plan.packs_per_step=6", "--gpus", "4", "--gpu", "H100", "--costs", str(file))
    for part in ("3 + 1", "best", "4 drafter ranks do not divide plan.packs_per_step = 6", "stage costs (a test)"):
        assert part in text


def test_what_a_resume_makes_again_is_told_where_packs_are_replayed(recipe, tmp_path):
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({"costs": COSTS}))
    replayed = ("plan.replays=2", "plan.replay_distance=10", "plan.packs_per_step=6", "plan.epochs=8")
    machine = ("--gpus", "3", "--gpu", "H100", "placement.mode=split", "placement.target_workers=2")
    packs = planned(recipe, *replayed)["refill"]["packs"]
    assert packs > 1
    assert planned(recipe, *replayed)["refill"]["seconds"] is None
    assert f"resume: up to {packs} packs are made again first\n" in shown(recipe, *replayed)
    priced = (*replayed, *machine, "--costs", str(file))
    assert planned(recipe, *priced)["refill"]["seconds"] == pytest.approx(-(-packs // 2) * 0.6)
    assert f"up to {packs} packs are made again first, about {-(-packs // 2) * 0.6:.1f} s on 2 target workers" in shown(
        recipe, *priced
    )
    together = ("placement.mode=colocated", "placement.drafter_ranks=3", "--gpus", "3", "--gpu", "H100", "--costs", str(file))
    assert planned(recipe, *replayed, *together)["refill"]["seconds"] == pytest.approx(-(-packs // 3) * 0.6)
    assert planned(recipe)["refill"] == {"packs": 0, "seconds": None}
    assert "resume:" not in shown(recipe)


def test_the_table_of_known_gpus_prices_a_machine_that_is_not_this_one(recipe):
    found = planned(recipe, "plan.packs_per_step=24", "--gpus", "8", "--gpu", "H200")["throughput"]
    assert found["costs"]["source"] == "table: H200, ratios measured; paced by launching, which goes with the CPU"
    assert found["best"] is not None
    assert "estimated" in planned(recipe, "--gpus", "2", "--gpu", "RTX 4090")["throughput"]["costs"]["source"]
    chosen = planned(recipe, "plan.packs_per_step=24", "--gpus", "8", "--gpu", "H200")["placement"]
    assert len(chosen["processes"]) == 8, "automatic placement takes the whole machine"


def test_a_plan_for_gpus_lists_the_host_s_side_and_does_not_judge_another_machine_by_this_one(recipe, monkeypatch):
    elsewhere = ("placement.mode=split", "--gpus", "2", "--gpu", "H100")
    monkeypatch.setattr("slipstream.device.shared.available_memory", lambda: 1)
    monkeypatch.setattr("slipstream.launch.resources.available_memory", lambda: 1)
    host = next(found for found in planned(recipe, *elsewhere)["host"] if found["placement"] == "split")
    assert host["peak_bytes"] == sum(item["nbytes"] for item in host["items"])
    assert next(item["nbytes"] for item in host["items"] if item["name"] == "slots") == 6 * 128 * 3 * 64 * 2
    text = shown(recipe, *elsewhere)
    for part in ("host memory of split", "copy for checkpoints", "masters and two moments in fp32, of rank 0"):
        assert part in text
    assert planned(recipe, "--gpus", "1", "--gpu", "H100", "placement.mode=colocated")["host"]
    monkeypatch.undo()
    assert planned(recipe)["host"] == []


def test_this_host_s_memory_says_nothing_of_another_machine(recipe, monkeypatch):
    monkeypatch.setattr("slipstream.device.shared.available_memory", lambda: 1)
    refused = CliRunner().invoke(app, ["plan", str(recipe)])
    assert refused.exit_code == 2
    assert "is more than the available memory" in refused.stderr
    assert planned(recipe, "placement.mode=split", "--gpus", "2", "--gpu", "H200")["placement"]["mode"] == "split"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--gpus 2 --gpu V100", "--gpu = 'V100': is not in the table of known GPUs (one of"),
        ("--gpus 0 --gpu H200", "--gpus = 0: must be at least 1"),
        ("--gpus 2 --gpu H200 --probe", "--probe = True: is for this machine"),
        ("--probe --costs none.json", "--probe = True: measures stage costs, and --costs gives them"),
        ("--keep", "--keep = True: keeps what --costs gives, and there is none"),
        ("--costs none.json", "cannot be read as JSON"),
    ],
)
def test_machines_and_costs_that_cannot_be(recipe, arguments, message):
    result = CliRunner().invoke(app, ["plan", str(recipe), *arguments.split()])
    assert result.exit_code == 2
    assert message in result.stderr


def test_files_without_stage_costs_are_refused_by_name(recipe, tmp_path):
    file = tmp_path / "other.json"
    for content, message in (
        ([], "is no JSON object"),
        ({"transport": {}}, "holds no stage costs"),
        ({"costs": {"target_seconds_per_pack": 1}}, "lacks 'drafter_seconds_per_use'"),
        ({"target": {"layers": 7, "matrix_parameters": 7, "shape": "x"}}, "is of another target, x"),
    ):
        file.write_text(json.dumps(content))
        result = CliRunner().invoke(app, ["plan", str(recipe), "--costs", str(file)])
        assert result.exit_code == 2
        assert message in result.stderr
        assert str(file) in result.stderr


def test_costs_that_are_kept_are_what_automatic_placement_goes_by(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr("slipstream.launch.preflight.available_cores", lambda: 2)
    monkeypatch.setattr("slipstream.device.threads.available_cores", lambda: 2)
    file = tmp_path / "costs.json"
    file.write_text(json.dumps(COSTS))
    assert planned(recipe)["placement"]["mode"] == "split"
    assert planned(recipe, "--costs", str(file))["placement"]["mode"] == "split", "given, not kept"
    assert planned(recipe, "--costs", str(file), "--keep")["placement"]["mode"] == "colocated"
    assert planned(recipe)["placement"]["mode"] == "colocated"
    assert planned(recipe)["throughput"]["best"] == "colocated on 2"
    assert "automatic placement: colocated on 2, predicted to be fastest" in shown(recipe)
