"""The pages of the documentation as text: their shell blocks, their words in code, the commands that they show."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.glob("*.md"), ROOT / "README.md"])
BLOCK = re.compile(r"^( *)```sh\n(.*?)^ *```", flags=re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`\n]+)`")


def shell_blocks(page: Path) -> list[str]:
    """The shell blocks of a page in order, lines that a backslash continues joined."""
    return [text.replace("\\\n", " ") for _, text in BLOCK.findall(page.read_text())]


def commands(page: Path) -> Iterator[list[str]]:
    """Every line of the shell blocks in words, without its comment."""
    for block in shell_blocks(page):
        for line in block.splitlines():
            words = shlex.split(line, comments=True)
            if words:
                yield words


def code_words(page: Path) -> list[str]:
    """What stands between single backquotes, outside blocks."""
    return CODE.findall(re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL))
