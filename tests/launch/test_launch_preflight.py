"""Law 10: one test for each refusal, with the value, the rule and the key; nothing written; nothing heavy imported."""

from __future__ import annotations

import logging
import os
import resource
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from preflight_ground import EXPORT, listing, recipe_of, rewrite, write_corpus, write_ground
from safetensors.numpy import save_file

from slipstream.config import dump_recipe
from slipstream.corpus.meta import read_meta, write_meta
from slipstream.errors import UsageError
from slipstream.launch.preflight import Preflight, preflight
from slipstream.observe.trackers import PACKAGES
from slipstream.runfolder import RunFolder


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("original") / "ground"
    write_ground(root)
    return root


@pytest.fixture
def ground(original: Path, tmp_path: Path) -> Path:
    """A copy of everything, to be spoilt; the corpus keeps its fingerprints, which hold no paths."""
    return Path(shutil.copytree(original, tmp_path / "ground"))


def refusal(root: Path, *, resume: bool = False, **changes: Any) -> UsageError:
    """The refusal of a recipe, once it is known that nothing was written."""
    before = listing(root)
    with pytest.raises(UsageError) as caught:
        preflight(recipe_of(root, **changes), resume=resume)
    assert listing(root) == before
    return caught.value


def assert_says(error: UsageError, *, key: str, value: object, rule: str) -> None:
    assert error.key == key, str(error)
    assert error.value == value, str(error)
    assert rule in error.rule, str(error)
    assert str(error).startswith(f"{key} = "), "key, value and rule are in the message that is printed"
    assert rule in str(error)


def test_a_good_recipe_passes_and_writes_nothing(ground: Path) -> None:
    before = listing(ground)
    changes = {"validation__prompts": str(ground / "prompts.jsonl"), "drafter__warm_start": str(ground / "drafter")}
    flight = preflight(recipe_of(ground, **changes))
    assert isinstance(flight, Preflight)
    assert (flight.device, flight.shape.tap_layers, flight.corpus.num_documents) == ("cpu", (1, 3, 5), 20)
    assert flight.folder.root == ground / "runs" / "tiny"
    assert listing(ground) == before


# ---- the target


def test_target_that_is_nowhere(ground: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(ground / "hub"))
    assert_says(refusal(ground, target__model="no/such"), key="target.model", value="no/such", rule="neither a folder with")


@pytest.mark.parametrize(
    ("spoil", "file", "rule"),
    [
        (lambda t: (t / "config.json").write_text("{"), "config.json", "cannot be read as JSON"),
        (lambda t: (t / "config.json").write_text("[]"), "config.json", "is a JSON list, not a table"),
        (lambda t: rewrite(t / "config.json", hidden_size=None), "config.json", "has no hidden_size"),
        (lambda t: rewrite(t / "config.json", hidden_size="wide"), "config.json", "holds a value that cannot be"),
        (lambda t: (t / "generation_config.json").write_text("{'"), "generation_config.json", "cannot be read as JSON"),
        (lambda t: (t / "tokenizer_config.json").write_text("?"), "tokenizer_config.json", "cannot be read as JSON"),
        (lambda t: (t / "tokenizer.json").unlink(), "", "has no tokenizer.json"),
        (lambda t: (t / "model.safetensors").unlink(), "", "lacks 1 of 1 weight files, first model.safetensors"),
        (
            lambda t: (t / "model.safetensors.index.json").write_text('{"weight_map": {"a": "a-1", "b": "b-2"}}'),
            "",
            "lacks 2 of 2 weight files, first a-1",
        ),
        (lambda t: (t / "model.safetensors.index.json").write_text("{}"), "model.safetensors.index.json", "has no weight_map"),
        (
            lambda t: os.truncate(t / "model.safetensors", 9000),
            "model.safetensors",
            "is truncated: 9000 bytes, its header says",
        ),
        (lambda t: os.truncate(t / "model.safetensors", 5), "model.safetensors", "is truncated or not safetensors"),
        (lambda t: (t / "model.safetensors").write_bytes(b"\x02" + bytes(7) + b"[]"), "model.safetensors", "no readable"),
    ],
)
def test_target_files_that_are_missing_or_damaged(ground: Path, spoil: Callable[[Path], object], file: str, rule: str) -> None:
    spoil(ground / "target")
    assert_says(refusal(ground), key="target.model", value=str(ground / "target" / file), rule=rule)


@pytest.mark.parametrize(
    ("changes", "key", "value", "rule"),
    [
        ({"target__num_taps": 7}, "target.num_taps", 7, "too many to spread over 8 layers"),
        ({"target__tap_layers": [1, 7]}, "target.tap_layers", [1, 7], "layer 7 is not below the last of 8 layers"),
        ({"drafter__mask_token_id": None}, "drafter.mask_token_id", None, "is required"),
        ({"drafter__mask_token_id": 256}, "drafter.mask_token_id", 256, "outside the target's vocabulary of 256"),
        ({"drafter__mask_token_id": 77}, "drafter.mask_token_id", 77, "occurs in the corpus"),
        ({"drafter__num_key_value_heads": 3}, "drafter.num_key_value_heads", 3, "must divide the number of query heads, 4"),
        ({"drafter__head_dim": 15}, "drafter.head_dim", 15, "must be even"),
        ({"drafter__attention": "flex"}, "drafter.attention", "flex", "has no backward on a CPU"),
        ({"placement__cuda_graphs": "on"}, "placement.cuda_graphs", "on", "has no CUDA graphs"),
    ],
)
def test_what_target_and_drafter_cannot_be_together(
    ground: Path, changes: dict[str, Any], key: str, value: object, rule: str
) -> None:
    assert_says(refusal(ground, **changes), key=key, value=value, rule=rule)


def test_packing_in_one_row_with_recurrent_layers(ground: Path) -> None:
    rewrite(ground / "target" / "config.json", layer_types=["linear_attention", "full_attention"] * 4)
    assert_says(refusal(ground, target__packing="packed"), key="target.packing", value="packed", rule="carry their state")


# ---- the corpus


def test_corpus_that_is_nowhere(ground: Path) -> None:
    error = refusal(ground, corpus__path=str(ground / "none"))
    assert_says(error, key="corpus.path", value=str(ground / "none"), rule="has no meta.json")


def test_corpus_whose_meta_was_edited(ground: Path) -> None:
    file = ground / "corpus" / "meta.json"
    rewrite(file, num_documents=21)
    assert_says(refusal(ground), key="corpus.path", value=str(file), rule="its checksum does not fit")


def test_corpus_that_lost_a_file_or_an_end(ground: Path) -> None:
    name = next(iter(read_meta(ground / "corpus").files))
    file = ground / "corpus" / name
    os.truncate(file, file.stat().st_size - 1)
    assert_says(refusal(ground), key="corpus.path", value=str(file), rule="is truncated")
    file.unlink()
    assert_says(refusal(ground), key="corpus.path", value=str(file), rule="is missing from the corpus")


@pytest.mark.parametrize(("file", "what"), [("tokenizer.json", "tokenizer"), ("chat_template.jinja", "chat template")])
def test_corpus_of_another_tokenizer_or_template(ground: Path, file: str, what: str) -> None:
    (ground / "target" / file).write_text('{"other": 1}')
    error = refusal(ground)
    assert_says(error, key="corpus.path", value=str(ground / "corpus"), rule=f"was prepared with another {what}")
    assert "slipstream prepare" in error.hint


def test_corpus_with_tokens_that_the_target_has_not(ground: Path) -> None:
    rewrite(ground / "target" / "config.json", vocab_size=200)
    assert_says(refusal(ground), key="corpus.path", value=str(ground / "corpus"), rule="holds token 255")


def test_corpus_without_documents(ground: Path) -> None:
    write_meta(folder=ground / "corpus", meta=replace(read_meta(ground / "corpus"), num_documents=0))
    assert_says(refusal(ground), key="corpus.path", value=str(ground / "corpus"), rule="holds no document")


def test_corpus_without_any_place_for_a_block(ground: Path) -> None:
    write_corpus(ground, lengths=[20, 30], answer=False)
    assert_says(refusal(ground), key="corpus.path", value=str(ground / "corpus"), rule="no place for a block in 2 documents")


def test_documents_beyond_the_positions_of_the_target(ground: Path) -> None:
    rewrite(ground / "target" / "config.json", max_position_embeddings=64)
    error = refusal(ground)
    assert_says(error, key="corpus.path", value=str(ground / "corpus"), rule="the target has 64 positions")
    assert "--max-tokens 64" in error.hint


def test_documents_longer_than_a_pack_are_a_warning(ground: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_corpus(ground, lengths=[20, 300])
    with caplog.at_level(logging.WARNING):
        preflight(recipe_of(ground))
    assert "the longest document has 300 tokens, plan.pack_tokens is 128" in caplog.text


# ---- validation


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("nonsense\n", "prompts.jsonl:1: malformed_json"),
        ('{"messages": [{"role": "user", "content": "a"}]}\n{"messages": 3}\n', "prompts.jsonl:2: unknown_form"),
        ("[{}]", "is one JSON array, not JSON lines"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}\n', "no conversation with a user turn (1 rows read)"),
        ("", "no conversation with a user turn (0 rows read)"),
    ],
)
def test_prompts_that_cannot_be_used(ground: Path, text: str, rule: str) -> None:
    prompts = ground / "prompts.jsonl"
    prompts.write_text(text)
    error = refusal(ground, validation__prompts=str(prompts))
    assert_says(error, key="validation.prompts", value=str(prompts), rule=rule)


def test_prompts_are_read_as_far_as_they_are_used(ground: Path) -> None:
    prompts = ground / "prompts.jsonl"
    prompts.write_text(prompts.read_text() + "nonsense\n")
    preflight(recipe_of(ground, validation__prompts=str(prompts), validation__max_prompts=1))


def test_prompts_that_are_no_file_and_answers_without_room(ground: Path) -> None:
    error = refusal(ground, validation__prompts=str(ground))
    assert_says(error, key="validation.prompts", value=str(ground), rule="is not a file")
    error = refusal(ground, validation__prompts=str(ground / "prompts.jsonl"), validation__max_new_tokens=512)
    assert_says(error, key="validation.max_new_tokens", value=512, rule="no room for a prompt in the target's 512 positions")


# ---- warm start


@pytest.mark.parametrize(
    ("spoil", "file", "rule"),
    [
        (lambda d: (d / "config.json").unlink(), "", "has no config.json"),
        (lambda d: (d / "config.json").write_text("{"), "config.json", "cannot be read as JSON"),
        (
            lambda d: rewrite(d / "config.json", num_hidden_layers=2),
            "",
            "its num_hidden_layers is 2, this recipe's num_layers is 1",
        ),
        (lambda d: rewrite(d / "config.json", head_dim=32), "", "its head_dim is 32, this recipe's head_dim is 16"),
        (lambda d: rewrite(d / "config.json", dflash_config=None), "", "its block_size is None, this recipe's block_size is 4"),
        (
            lambda d: rewrite(d / "config.json", dflash_config={**EXPORT["dflash_config"], "target_layer_ids": [0, 1, 2]}),  # type: ignore[dict-item]
            "",
            "its target_layer_ids is [0, 1, 2], this recipe's tap_layers is (1, 3, 5)",
        ),
        (lambda d: (d / "model.safetensors").unlink(), "model.safetensors", "cannot be read: No such file"),
        (lambda d: os.truncate(d / "model.safetensors", 900), "model.safetensors", "is truncated"),
        (
            lambda d: save_file({"fc.weight": np.zeros(7, np.float16)}, d / "model.safetensors"),
            "model.safetensors",
            "holds 7 weights in 1 tensors, this recipe's drafter has",
        ),
    ],
)
def test_drafter_to_start_from(ground: Path, spoil: Callable[[Path], object], file: str, rule: str) -> None:
    drafter = ground / "drafter"
    spoil(drafter)
    error = refusal(ground, drafter__warm_start=str(drafter))
    assert_says(error, key="drafter.warm_start", value=str(drafter / file) if file else str(drafter), rule=rule)


# ---- machine and run folder


def test_gpus_where_there_are_none(ground: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.device.kind.torch_cuda_version", lambda: None)
    error = refusal(ground, placement__device="cuda")
    assert_says(error, key="placement.device", value="cuda", rule="torch is built without CUDA")
    error = refusal(ground, placement__mode="split", placement__target_gpus=[0])
    assert_says(error, key="placement.target_gpus", value=[0], rule="must name one of the 0 visible GPUs")


def test_two_ranks_on_one_gpu(ground: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.launch.preflight.device_kind", lambda requested: "cuda")
    monkeypatch.setattr("slipstream.launch.preflight.count_gpus", lambda: 2)
    two = {"placement__drafter_ranks": 2, "plan__packs_per_step": 2}
    error = refusal(ground, **two, placement__mode="colocated", placement__drafter_gpus=[1, 1])
    assert_says(error, key="placement.drafter_ranks", value=2, rule="puts 2 ranks on GPU 1")
    preflight(recipe_of(ground, **two, placement__mode="split", placement__target_gpus=[0], placement__drafter_gpus=[0, 1]))


def test_float8_where_it_cannot_be_multiplied(ground: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = refusal(ground, target__dtype="float8", placement__device="cpu")
    assert_says(error, key="target.dtype", value="float8", rule="compute capability 8.9 or more, and this run is on a CPU")
    monkeypatch.setattr("slipstream.launch.preflight.device_kind", lambda requested: "cuda")
    monkeypatch.setattr("slipstream.launch.preflight.count_gpus", lambda: 2)
    capabilities = {0: (8, 6), 1: (9, 0)}
    monkeypatch.setattr("slipstream.launch.preflight.compute_capability", capabilities.get)
    split = {"target__dtype": "float8", "placement__mode": "split"}
    error = refusal(ground, **split, placement__target_gpus=[0], placement__drafter_gpus=[1])
    assert_says(error, key="target.dtype", value="float8", rule="GPU 0 has 8.6")
    preflight(recipe_of(ground, **split, placement__target_gpus=[1], placement__drafter_gpus=[0]))
    rewrite(ground / "target" / "config.json", model_type="gemma2")
    error = refusal(ground, **split, placement__target_gpus=[1], placement__drafter_gpus=[0])
    assert_says(error, key="target.dtype", value="float8", rule="has no layers for a target of type gemma2")


def test_a_sink_whose_package_is_not_installed(ground: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PACKAGES, "wandb", "no_such_package")  # type: ignore[arg-type]
    assert preflight(recipe_of(ground, observe__sinks=["jsonl", "tensorboard"])).recipe.observe.sinks[1] == "tensorboard"
    error = refusal(ground, observe__sinks=["jsonl", "wandb"])
    assert_says(error, key="observe.sinks", value="wandb", rule="needs the package no_such_package")
    assert "slipstream[sinks]" in error.hint


def test_slots_beyond_the_machine(ground: Path) -> None:
    error = refusal(ground, placement__host_memory_gb=1e6)
    assert_says(error, key="placement.host_memory_gb", value=1e6, rule="GiB in all")


def test_checkpoints_beyond_the_disk(ground: Path) -> None:
    error = refusal(ground, checkpoint__keep=10**9)
    assert_says(error, key="checkpoint.keep", value=10**9, rule="checkpoints need up to")


def start(root: Path, **changes: Any) -> RunFolder:
    """A run as it is found after its start."""
    folder = RunFolder(root / "runs" / "tiny")
    folder.create()
    folder.recipe.write_text(dump_recipe(recipe_of(root, **changes)))
    return folder


def test_names_that_are_taken_and_runs_that_are_not_there(ground: Path) -> None:
    error = refusal(ground, resume=True)
    assert_says(error, key="name", value="tiny", rule="there is no run of this name")
    start(ground)
    error = refusal(ground)
    assert_says(error, key="name", value="tiny", rule="a run of this name is already in")
    assert "--resume" in error.hint
    preflight(recipe_of(ground), resume=True)


def test_a_run_with_a_checkpoint_needs_its_warm_start_no_more(ground: Path) -> None:
    changes = {"drafter__warm_start": str(ground / "gone")}
    folder = start(ground, **changes)
    assert refusal(ground, resume=True, **changes).key == "drafter.warm_start"
    (folder.checkpoints / "step-000004").mkdir()
    preflight(recipe_of(ground, **changes), resume=True)


def test_runs_that_is_a_file_or_cannot_be_written(ground: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (ground / "runs").write_text("")
    error = refusal(ground)
    assert_says(error, key="runs", value=str(ground / "runs"), rule=f"{ground / 'runs'} is not a folder")
    (ground / "runs").unlink()
    (ground / "runs").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != ground / "runs")  # root may write everywhere
    error = refusal(ground)
    assert_says(error, key="runs", value=str(ground / "runs"), rule="cannot be written to")


# ---- quick, and without anything heavy


def cpu_seconds_of(arguments: list[str]) -> tuple[subprocess.CompletedProcess[str], float]:
    """Processor time rather than wall time: other processes may keep the cores busy."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_preflight_takes_less_than_two_seconds_and_imports_nothing_heavy(ground: Path) -> None:
    file = ground / "recipe.toml"
    changes = {"validation__prompts": str(ground / "prompts.jsonl"), "drafter__warm_start": str(ground / "drafter")}
    file.write_text(dump_recipe(recipe_of(ground, **changes)))
    script = """
        import sys
        from slipstream.config import load_recipe
        from slipstream.launch.preflight import preflight
        preflight(load_recipe(sys.argv[1]))
        print([name for name in ("torch", "transformers", "datasets", "tokenizers") if name in sys.modules])
    """
    done, seconds = cpu_seconds_of([sys.executable, "-c", textwrap.dedent(script), str(file)])
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
    assert seconds < 2


def test_train_refuses_in_one_line_within_two_seconds(ground: Path) -> None:
    file = ground / "recipe.toml"
    file.write_text(dump_recipe(recipe_of(ground, drafter__mask_token_id=77)))
    script = """
        import sys
        from slipstream.cli.main import app
        try:
            app(["train", sys.argv[1]])
        finally:
            print([name for name in ("torch", "transformers", "datasets", "tokenizers") if name in sys.modules])
    """
    before = listing(ground)
    done, seconds = cpu_seconds_of([sys.executable, "-c", textwrap.dedent(script), str(file)])
    assert done.returncode == 2
    assert done.stderr.startswith("error: drafter.mask_token_id = 77: occurs in the corpus")
    assert done.stderr.count("\n") == 1, "one line, no traceback"
    assert done.stdout.strip() == "[]"
    assert seconds < 2
    assert listing(ground) == before
