"""What scripts rely on: every verb that prints a table can print JSON, and how a command ended is in its exit code."""

from __future__ import annotations

import ast
import signal
import sys
import types
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from slipstream.cli import main

CLI = Path(main.__file__).parent
VERBS = [*main.VERBS, *main.OWN_OPTIONS.values()]


def invoke(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(main.app, [str(argument) for argument in arguments])
    return result.exit_code, result.stdout, result.stderr


def builds_table(module: str, seen: frozenset[str] = frozenset()) -> bool:
    """Whether a module of `cli`, or one of `cli` that it imports, makes a rich table."""
    tree = ast.parse((CLI / f"{module}.py").read_text())
    imported = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    if any(node.module == "rich.table" and "Table" in [alias.name for alias in node.names] for node in imported):
        return True
    prefix = "slipstream.cli."
    others = {node.module.removeprefix(prefix) for node in imported if node.module and node.module.startswith(prefix)}
    return any(builds_table(other, seen | {module}) for other in others - seen - {module, "main"})


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_that_prints_a_table_can_print_json(verb: str) -> None:
    options = {name for parameter in main.VerbGroup().get_command(None, verb).params for name in parameter.opts}
    assert "--json" in options or not builds_table(verb)


def test_tables_are_found_where_they_are() -> None:
    found = {verb for verb in VERBS if builds_table(verb)}
    assert {"bench", "bench_replays", "check", "demo", "evaluate", "inspect", "plan", "prepare", "status"} <= found
    assert not {"watch", "logs", "stop"} & found


@pytest.mark.parametrize("verb", main.VERBS)
def test_an_unknown_option_is_a_mistake_of_usage(verb: str) -> None:
    assert invoke(verb, "--no-such-option")[0] == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ("prepare", "none.jsonl", "--target", "nowhere", "--out", "corpus"),
        ("regenerate", "none.jsonl", "--target", "nowhere", "--out", "answers.jsonl"),
        ("inspect", "nowhere"),
        ("plan", "none.toml"),
        ("check", "none.toml"),
        ("train", "none.toml"),
        ("watch", "nowhere"),
        ("status", "nowhere"),
        ("stop", "nowhere"),
        ("logs", "nowhere"),
        ("report", "nowhere"),
        ("evaluate", "nowhere", "--prompts", "none.jsonl"),
        ("export", "nowhere", "--out", "drafter"),
        ("bench", "replays", "none.toml"),
        ("demo", "plan.no_such_key=1"),
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_what_is_not_there_is_said_in_a_line(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, error = invoke(*arguments)
    assert (code, out) == (2, "")
    assert error.startswith("error: ")
    assert len(error.splitlines()) == 1
    assert list(tmp_path.iterdir()) == [], "a command that is refused leaves nothing"


def test_sigterm_ends_a_command_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    given_back = []

    def plan() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            given_back.append(True)
        typer.echo("not reached")

    module = types.ModuleType("slipstream.cli.plan")
    module.plan = plan  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "slipstream.cli.plan", module)
    before = signal.getsignal(signal.SIGTERM)
    assert invoke("plan") == (143, "", "terminated\n")
    assert given_back == [True]
    assert signal.getsignal(signal.SIGTERM) is before
