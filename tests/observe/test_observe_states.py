"""The table of states: whatever the sources name is in it, and a legend can tell all of it apart."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import slipstream
from slipstream.observe.states import GPU_STAGES, LANES, STATES, is_wait

SOURCES = Path(slipstream.__file__).parent


def named() -> Iterator[tuple[str, str, str]]:
    """File, method and every text in the first two arguments of each call of `account.state` and `account.aside`."""
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if node.func.attr in ("state", "aside") and ast.unparse(node.func.value).endswith("account"):
                for argument in node.args[:2]:
                    for inner in ast.walk(argument):
                        if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
                            yield path.name, node.func.attr, inner.value


def test_every_state_that_is_named_is_known() -> None:
    found = list(named())
    assert {name for _, _, name in found} - STATES.keys() - LANES.keys() == set()
    asides = {name for _, method, name in found if method == "aside"}
    assert {"loader", "writer", "build", "write"} <= asides
    assert {"target", "forward", "backward", "optimizer", "wait_input", "wait_slot"} <= {name for _, _, name in found}


def test_a_legend_can_tell_states_apart() -> None:
    for ground in ("light", "dark"):
        colours = [getattr(state, ground) for state in STATES.values()]
        assert len(set(colours)) == len(colours)
        assert all(re.fullmatch(r"#[0-9a-f]{6}", colour) for colour in colours)
    assert all(state.sentence.endswith(".") for state in STATES.values())


def test_waits_are_those_that_say_so() -> None:
    assert {name for name in STATES if is_wait(name)} == {name for name in STATES if name.startswith("wait_")}
    assert not is_wait("no such state")
    assert set(STATES) >= GPU_STAGES
