"""The recipe: it loads, refuses with key, value and rule, takes overrides, and survives being written and read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pydantic
import pytest
from pydantic import BaseModel

from slipstream.config import Recipe, dump_recipe, load_recipe, make_recipe
from slipstream.errors import RecipeError

MINIMAL = 'name = "run"\n[target]\nmodel = "m"\n[corpus]\npath = "c"\n'


@pytest.fixture
def minimal(tmp_path: Path) -> Path:
    file = tmp_path / "recipe.toml"
    file.write_text(MINIMAL)
    return file


def sections() -> list[tuple[str, type[BaseModel]]]:
    inner = [(name, field.annotation) for name, field in Recipe.model_fields.items()]
    return [("", Recipe), *((name, kind) for name, kind in inner if isinstance(kind, type) and issubclass(kind, BaseModel))]


def test_minimal_recipe_takes_all_defaults(minimal: Path) -> None:
    recipe = load_recipe(minimal)
    assert recipe.plan.pack_tokens == 8192
    assert recipe.drafter.layer_types_list() == ("full",) * 5


def test_overrides_apply_in_order_with_toml_types(minimal: Path) -> None:
    changes = [
        "plan.epochs=2",
        "plan.epochs = 3",
        "target.tap_layers=[1, 2]",
        "runs=elsewhere/runs",
        'target.model="a=b"',
        "optimizer.lr=1e-3",
        "drafter.sliding_window=none",
    ]
    recipe = load_recipe(minimal, overrides=changes)
    assert recipe.plan.epochs == 3
    assert recipe.target.tap_layers == (1, 2)
    assert recipe.runs == "elsewhere/runs"
    assert recipe.target.model == "a=b"
    assert recipe.optimizer.lr == 1e-3
    assert recipe.drafter.sliding_window is None


@pytest.mark.parametrize(("dtype", "hidden"), [("bfloat16", "bfloat16"), ("float8", "bfloat16"), ("float32", "float32")])
def test_hidden_states_of_a_float8_target_are_bfloat16(minimal: Path, dtype: str, hidden: str) -> None:
    recipe = load_recipe(minimal, overrides=[f"target.dtype={dtype}"])
    assert (recipe.target.dtype, recipe.target.hidden_dtype, recipe.slot_dtype) == (dtype, hidden, hidden)


def test_override_with_none_removes_a_key(tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text(MINIMAL + "[plan]\nmax_steps = 5\n")
    assert load_recipe(file).plan.max_steps == 5
    assert load_recipe(file, overrides=["plan.max_steps=none"]).plan.max_steps is None


@pytest.mark.parametrize("override", ["plan.epochs", "=3", "plan.=3", "name.x=3"])
def test_malformed_overrides_are_refused(minimal: Path, override: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(minimal, overrides=[override])
    assert caught.value.key in override


@pytest.mark.parametrize(
    ("override", "key", "hint"),
    [
        ("plan.pack_token=1024", "plan.pack_token", "plan.pack_tokens"),
        ("optimiser.lr=1e-3", "optimiser", "optimizer"),
        ("drafter.block_sise=8", "drafter.block_sise", "drafter.block_size"),
        ("plan.lr=1e-3", "plan.lr", "optimizer.lr"),
        ("block_size=8", "block_size", "drafter.block_size"),
    ],
)
def test_unknown_keys_name_the_nearest_known(minimal: Path, override: str, key: str, hint: str) -> None:
    with pytest.raises(RecipeError, match="no such key") as caught:
        load_recipe(minimal, overrides=[override])
    assert caught.value.key == key
    assert hint in caught.value.hint


def test_missing_sections_are_named() -> None:
    with pytest.raises(RecipeError, match="required") as caught:
        make_recipe({"name": "run", "target": {"model": "m"}})
    assert caught.value.key == "corpus"


@pytest.mark.parametrize("content", [None, b"name = ", b"\xff\xfe"], ids=["missing", "not TOML", "not text"])
def test_unreadable_files_are_named(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "r.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(RecipeError) as caught:
        load_recipe(file)
    assert caught.value.value == str(file)


REFUSALS: list[tuple[list[str], str, Any, str]] = [
    (["plan.pack_tokens=1000"], "plan.pack_tokens", 1000, "multiple of 128"),
    (["plan.pack_anchors=100", "drafter.block_size=10"], "plan.pack_anchors", 100, "multiple of 128"),
    (["plan.packs_per_step=8", "placement.drafter_ranks=3"], "plan.packs_per_step", 8, "multiple of placement.drafter_ranks"),
    (["plan.replay_distance=0"], "plan.replay_distance", 0, "greater than or equal to 1"),
    (
        ["target.dtype=float32", "placement.slot_dtype=float8_e4m3"],
        "placement.slot_dtype",
        "float8_e4m3",
        "rounds hidden states to eight bits",
    ),
    (["drafter.layer_types=[\"full\"]"], "drafter.layer_types", ["full"], "drafter.num_layers is 5"),
    (["drafter.layer_types=sliding"], "drafter.sliding_window", None, "required"),
    (["drafter.sliding_window=64"], "drafter.sliding_window", 64, "no layer is sliding"),
    (["target.tap_layers=[]"], "target.tap_layers", [], "at least one"),
    (["target.tap_layers=[3, 1]"], "target.tap_layers", [3, 1], "ascending"),
    (["target.tap_layers=[-1, 1]"], "target.tap_layers", [-1, 1], "ascending"),
    (
        ["optimizer.schedule=wsd", "optimizer.warmup_ratio=0.5", "optimizer.decay_ratio=0.6"],
        "optimizer.decay_ratio",
        0.6,
        "at most 1",
    ),
    (["name=a/b"], "name", "a/b", "match pattern"),
    (["plan.epochs=many"], "plan.epochs", "many", "valid integer"),
    (["optimizer.lr=0"], "optimizer.lr", 0, "greater than 0"),
    (["drafter.dtype=float8"], "drafter.dtype", "float8", "'bfloat16' or 'float32'"),
    (["target.tap_layers=all"], "target.tap_layers", "all", "'spread', or input should be a valid tuple"),
    (["drafter.layer_types=causal"], "drafter.layer_types", "causal", "'full' or 'sliding', or"),
    (["observe.sinks=[\"console\", \"tb\"]"], "observe.sinks.1", "tb", "'wandb' or 'trackio'"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "key", "value", "rule"), REFUSALS, ids=[f"{row[1]}={row[2]}" for row in REFUSALS])
def test_refusals_show_key_value_and_rule(minimal: Path, overrides: list[str], key: str, value: Any, rule: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(minimal, overrides=overrides)
    assert caught.value.key == key
    assert caught.value.value == value
    assert rule in caught.value.rule
    assert str(caught.value).startswith(f"{key} = ")


@pytest.mark.parametrize(
    ("overrides", "hint"),
    [
        (["plan.pack_tokens=1000"], "nearest: 896 or 1024"),
        (["plan.packs_per_step=2", "placement.drafter_ranks=3"], "nearest: 3"),
        (["plan.pack_anchors=100", "drafter.block_size=10"], "a multiple of 64"),
    ],
)
def test_refused_counts_name_the_nearest_right_ones(minimal: Path, overrides: list[str], hint: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(minimal, overrides=overrides)
    assert hint in caught.value.hint


def test_dump_reads_back_as_the_same_recipe(minimal: Path, tmp_path: Path) -> None:
    changes = [
        "target.tap_layers=[1, 4]",
        "drafter.num_layers=2",
        "drafter.layer_types=[\"sliding\", \"full\"]",
        "drafter.sliding_window=64",
        "placement.target_gpus=[0]",
        "validation.prompts=p.jsonl",
    ]  # fmt: skip
    recipe = load_recipe(minimal, overrides=changes)
    file = tmp_path / "resolved.toml"
    file.write_text(dump_recipe(recipe))
    assert load_recipe(file) == recipe


def test_dump_holds_every_key_that_has_a_value(minimal: Path) -> None:
    recipe = load_recipe(minimal)
    text = dump_recipe(recipe)
    for name, kind in sections():
        owner = getattr(recipe, name) if name else recipe
        for key in kind.model_fields:
            if getattr(owner, key) is not None:
                assert key in text


def test_every_key_has_a_sentence() -> None:
    for name, kind in sections():
        assert kind.__doc__
        for key, field in kind.model_fields.items():
            if name or not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)):
                assert field.description, f"{name}.{key}"
                assert field.description.rstrip().endswith("."), f"{name}.{key}: {field.description}"


def test_recipe_is_frozen(minimal: Path) -> None:
    recipe = load_recipe(minimal)
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        recipe.plan.epochs = 7  # type: ignore[misc]
