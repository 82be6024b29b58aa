"""The documentation is built, strictly: its pages, what is made from the code, and nothing that is fetched from elsewhere."""

from __future__ import annotations

import html
import re
from pathlib import Path

from doc_pages import DOCS

from slipstream.cli.main import OWN_OPTIONS, VERBS
from slipstream.config.recipe import Recipe
from slipstream.observe.states import STATES
from slipstream.runfolder import RunFolder

GENERATED = ("recipe", "commands")
ASSET = re.compile(
    r"<(script|link|img|iframe|source|video|audio|object|embed)\b[^>]*?\b(?:src|href|data)\s*=\s*[\"']?([^\"'\s>]+)"
)
OUTSIDE = re.compile(r"^(?:[a-z]+:)?//", flags=re.IGNORECASE)


def words_of(page: Path) -> str:
    return html.unescape(re.sub(r"<[^>]+>", "", page.read_text()))


def test_every_page_is_there(site: Path) -> None:
    wanted = {*GENERATED, *(path.stem for path in DOCS.glob("*.md")), "404"}
    assert {path.stem for path in site.glob("*.html")} == wanted
    assert not list(site.rglob("*.py*"))


def test_every_page_is_in_the_menu(site: Path) -> None:
    menu = set(re.findall(r'href="([\w-]+)\.html"', (site / "troubleshooting.html").read_text()))
    assert menu >= {*GENERATED, *(path.stem for path in DOCS.glob("*.md"))} - {"troubleshooting"}


def test_the_recipe_page_has_every_key(site: Path) -> None:
    text = words_of(site / "recipe.html")
    for name, field in Recipe.model_fields.items():
        section = getattr(field.annotation, "model_fields", None)
        for key in [name] if section is None else [f"{name}.{inner}" for inner in section]:
            assert key in text, key
    assert "Peak learning rate." in text


def test_the_commands_page_has_every_verb_and_its_options(site: Path) -> None:
    text = words_of(site / "commands.html")
    for verb in (*VERBS, *(" ".join(words) for words in OWN_OPTIONS)):
        assert f"slipstream {verb}" in text
    for option in ("--probe-seconds", "--detach", "--bf16-agreement", "--float8-slots", "--no-sweep"):
        assert option in text


def test_tables_made_from_the_code_stand_where_they_were_asked_for(site: Path) -> None:
    text = (site / "report.html").read_text()
    assert "<!-- table" not in text
    for name, state in STATES.items():
        assert f"<code>{name}</code>" in text
        assert state.light in text
    assert RunFolder(Path()).queues.name in text


def test_no_page_asks_for_anything_from_elsewhere(site: Path) -> None:
    found = []
    for page in site.rglob("*.html"):
        for tag, address in ASSET.findall(page.read_text()):
            if OUTSIDE.match(address):
                found.append((page.name, tag, address))
    for sheet in site.rglob("*.css"):
        found += [
            (sheet.name, "url", one) for one in re.findall(r"url\([\"']?([^\"')]+)", sheet.read_text()) if OUTSIDE.match(one)
        ]
        found += [(sheet.name, "import", one) for one in re.findall(r"@import[^;]*", sheet.read_text())]
    assert found == []


def test_every_picture_that_a_page_shows_is_there(site: Path) -> None:
    shown = {
        page.parent / address
        for page in site.glob("*.html")
        for tag, address in ASSET.findall(page.read_text())
        if tag == "img" and not address.startswith("data:")
    }
    assert len(shown) >= 6
    assert [path for path in sorted(shown) if not path.is_file()] == []
