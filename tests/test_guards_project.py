"""The project keeps its own rules: imports one way, small files, an honest README, recipes that load, no forbidden calls."""

from __future__ import annotations

import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

import guard_rules as rules
from slipstream.config import load_recipe

RECIPES = sorted([*(rules.ROOT / "recipes").glob("*.toml"), rules.SOURCES / "demo" / "recipe.toml"])
FUNCTIONS = {"print": "the library logs; only cli/ prints"}
METHODS = {"record_stream": "what crosses a stream is a persistent slot, ordered by its own events"}
TEXT_ENDINGS = ("", ".py", ".md", ".toml", ".txt", ".yml", ".yaml", ".sh", ".cfg", ".json")
SELF = ("tests/guard_rules.py", "tests/test_guards_rules.py")
"""Where the forbidden words stand because they are looked for."""


def name_of(path: Path) -> str:
    return path.relative_to(rules.SOURCES).as_posix()


def test_imports_run_one_way() -> None:
    assert [
        complaint
        for path in rules.modules()
        for complaint in rules.import_complaints(source=path.read_text(), package=rules.package_of(path), name=name_of(path))
    ] == []


def test_files_and_functions_are_short() -> None:
    folders = [rules.SOURCES, *(rules.ROOT / name for name in ("tests", "benchmarks"))]
    assert [
        complaint
        for folder in folders
        for path in rules.modules(folder)
        for complaint in rules.size_complaints(source=path.read_text(), name=path.relative_to(rules.ROOT).as_posix())
    ] == []


def test_hot_modules_do_not_wait_for_the_device() -> None:
    hot = [
        path
        for path in rules.modules()
        if any(fnmatch(name_of(path), pattern) for pattern in rules.HOT) and name_of(path) not in rules.NOT_HOT
    ]
    idle = [pattern for pattern in rules.HOT if not any(fnmatch(name_of(path), pattern) for path in hot)]
    assert idle == [], "patterns that name no file"
    assert [complaint for path in hot for complaint in rules.sync_complaints(source=path.read_text(), name=name_of(path))] == []


def test_library_neither_prints_nor_records_streams() -> None:
    found = []
    for path in rules.modules():
        functions = {} if rules.package_of(path) == "cli" else FUNCTIONS
        found += rules.call_complaints(source=path.read_text(), name=name_of(path), functions=functions, methods=METHODS)
    assert found == []


def test_everything_public_says_what_it_is() -> None:
    assert [
        complaint
        for path in rules.modules()
        for complaint in rules.docstring_complaints(source=path.read_text(), name=name_of(path))
    ] == []


def test_names_say_something() -> None:
    assert rules.name_complaints(path.relative_to(rules.SOURCES) for path in rules.modules()) == []


def test_nothing_is_killed_by_name_and_no_place_is_named() -> None:
    found = []
    for path in rules.tracked_files():
        name = path.relative_to(rules.ROOT).as_posix()
        if path.suffix not in TEXT_ENDINGS or name in SELF:
            continue
        text = path.read_text()
        found += rules.text_complaints(text=text, name=name, pattern=rules.KILL_BY_NAME, why="stop a process by its handle")
        found += rules.text_complaints(text=text, name=name, pattern=rules.PLACES, why="a place of one machine or network")
    assert found == []


def test_readme_shows_the_tree_in_flow_order() -> None:
    assert rules.readme_tree((rules.ROOT / "README.md").read_text()) == rules.package_tree()
    assert set(rules.package_tree()) <= set(rules.FLOW)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_every_recipe_loads(recipe: Path) -> None:
    assert load_recipe(recipe).name


@pytest.mark.parametrize("package", rules.TORCH_FREE)
def test_light_packages_import_no_torch(package: str) -> None:
    names = ", ".join(
        path.relative_to(rules.SOURCES.parent).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
        for path in rules.modules(rules.SOURCES / package)
    )
    heavy = f"[name for name in {rules.HEAVY} if name in sys.modules]"
    code = f"import sys, {names}; found = {heavy}; sys.exit(f'imported {{found}}' if found else 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
