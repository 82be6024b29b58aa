"""The demo's prompts, built from templates and word pools of our own writing: training and held-out share no word.

What flows in: `data/families.toml`. What flows out: prompts in a fixed order, families taken in turn, so that the first
n of either set hold every family. `python -m slipstream.demo.prompts FOLDER` writes them as JSONL for `slipstream regenerate`.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

Split = Literal["training", "held_out"]

_SLOT = re.compile(r"\{([a-z]+)(?:\.(\d+))?\}")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One user message of a family, and the words that fill its template."""

    family: str
    fillers: tuple[str, ...]
    text: str


def build_prompts(split: Split) -> list[Prompt]:
    """All prompts of a split, the same on every machine."""
    data = tomllib.loads(files("slipstream.demo").joinpath("data/families.toml").read_text())
    pools = {name: [str(word) for word in pool[split]] for name, pool in data["pool"].items()}
    count = int(data["training_prompts" if split == "training" else "held_out_prompts"])
    families: Sequence[Mapping[str, Any]] = data["family"]
    return [_fill(family=family, pools=pools, index=index) for index in range(count) for family in families]


def _fill(*, family: Mapping[str, Any], pools: Mapping[str, Sequence[str]], index: int) -> Prompt:
    template = str(family["template"])
    slots = list(dict.fromkeys(match.group() for match in _SLOT.finditer(template)))
    words: dict[str, str] = {}
    for place, slot in enumerate(slots):
        match = _SLOT.fullmatch(slot)
        assert match is not None
        pool = pools[match.group(1)]
        # Each place walks its pool from its own start; the walk of later places slips by one each round, so that pairs differ.
        start = place * 3 + index // len(pool) * place
        words[slot] = pool[(index + start) % len(pool)]
    text = _SLOT.sub(lambda match: words[match.group()], template)
    return Prompt(family=str(family["name"]), fillers=tuple(words.values()), text=text)


def write_prompts(*, prompts: Iterable[Prompt], file: Path) -> None:
    """One conversation a line: `messages` with the user's turn, and the family's name."""
    lines = (
        json.dumps({"messages": [{"role": "user", "content": prompt.text}], "family": prompt.family}) for prompt in prompts
    )
    file.write_text("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    for split, name in (("training", "train.prompts.jsonl"), ("held_out", "held_out.prompts.jsonl")):
        write_prompts(prompts=build_prompts(split), file=Path(sys.argv[1]) / name)  # type: ignore[arg-type]
