"""What the pages say is there: verbs and their options, recipe keys, files, states, findings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest
import typer
from doc_pages import DOCS, PAGES, ROOT, code_words, commands
from pydantic import BaseModel

from slipstream.cli.main import app
from slipstream.config.recipe import Recipe
from slipstream.report.findings import Kind

SECTIONS = {
    name: field.annotation
    for name, field in Recipe.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
}
KEY = re.compile(rf"^({'|'.join(SECTIONS)})\.(\w+)(?:[ =].*)?$")
OVERRIDE = re.compile(r"^(\w+)\.(\w+)=")
FILE = re.compile(r"^(?:[\w.]+/)*[\w.]+\.(?:py|toml|md)$")
PLACES = (ROOT, ROOT / "src" / "slipstream", ROOT / "docs")
OF_A_RUN = ("recipe.toml", "recipe.given.toml", "README.md")
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def test_pages_are_found() -> None:
    assert {page.name for page in PAGES} > {"README.md", "index.md", "first-drafter.md", "your-gpus.md", "report.md"}
    assert sum(words[0] == "slipstream" for page in PAGES for words in commands(page)) > 30


@pages
def test_commands_are_what_the_command_line_takes(page: Path) -> None:
    group: Any = typer.main.get_command(app)
    for words in commands(page):
        if words[0] == "slipstream" and words[1:] != ["--version"]:
            name, command, rest = group.resolve_command(None, words[1:])
            command.make_context(name, list(rest))  # raises for an option that is not there, a value that it does not take


@pages
def test_recipe_keys_exist(page: Path) -> None:
    overrides = [word for words in commands(page) for word in words if OVERRIDE.match(word)]
    for word in [*code_words(page), *overrides]:
        found = KEY.match(word) or OVERRIDE.match(word)
        if found and not FILE.match(word) and found.group(1) in SECTIONS:
            assert found.group(2) in SECTIONS[found.group(1)].model_fields, word


@pages
def test_files_exist(page: Path) -> None:
    named = {word for word in code_words(page) if FILE.match(word) and word not in OF_A_RUN}
    missing = sorted(word for word in named if not any((place / word).is_file() for place in PLACES))
    assert missing == []


@pages
def test_verbs_named_in_running_text_exist(page: Path) -> None:
    group: Any = typer.main.get_command(app)
    verbs = {word.split()[1] for word in code_words(page) if word.startswith("slipstream ") and len(word.split()) > 1}
    assert {verb for verb in verbs if verb.islower() and group.get_command(None, verb) is None} == set()


def test_every_finding_is_explained() -> None:
    text = (DOCS / "report.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|", text, flags=re.MULTILINE)
    assert rows == list(get_args(Kind))


def test_pictures_are_small() -> None:
    sizes = {path.name: path.stat().st_size for path in (DOCS / "pictures").iterdir()}
    assert set(sizes) >= {"report.png", "report-pack.png", "report-time.png", "pipeline.svg", "block.svg", "streams.svg"}
    assert max(sizes.values()) < 300_000
