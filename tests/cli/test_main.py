"""The command itself: quick help, verbs on demand, our errors as one line and an exit code, logging only here."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator

import pytest
import typer
from typer.testing import CliRunner

import slipstream
from slipstream.cli import main
from slipstream.errors import Interrupted, PreflightError, TransportError

START = [sys.executable, "-c", "from slipstream.cli.main import run; run()"]
HEAVY = ("torch", "transformers", "datasets", "numpy", "pydantic")


@pytest.fixture(autouse=True)
def _restore_log_level() -> Iterator[None]:
    logger = logging.getLogger("slipstream")
    before = logger.level
    yield
    logger.setLevel(before)


def invoke(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(main.app, list(arguments))
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], None]:
    """Puts a function in the place of the verb `plan`."""

    def put(function: Callable[[], None]) -> None:
        module = types.ModuleType("slipstream.cli.plan")
        module.plan = function  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "slipstream.cli.plan", module)

    return put


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_help_and_version_are_quick_and_import_nothing_heavy(argument: str) -> None:
    code = f"""
import atexit, sys
atexit.register(lambda: sys.stderr.write(repr([name for name in {HEAVY!r} if name in sys.modules])))
sys.argv[1:] = [{argument!r}]
from slipstream.cli.main import run
run()
"""
    seconds = []
    for _ in range(3):
        began = time.monotonic()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        seconds.append(time.monotonic() - began)
        assert done.returncode == 0, done.stderr
        assert done.stderr == "[]"
    # A busy machine slows all of them: the fastest counts, and the figure of an idle machine is in LAB_LOG.md.
    assert min(seconds) < 1.5


def test_help_shows_every_verb_with_its_sentence() -> None:
    code, out, _ = invoke("--help")
    assert code == 0
    for name in main.VERBS:
        assert f" {name} " in out


def test_version_is_the_packages() -> None:
    assert invoke("--version")[1].strip() == f"slipstream {slipstream.__version__}"


@pytest.mark.parametrize("name", main.VERBS)
def test_every_verb_has_help_of_its_own(name: str) -> None:
    code, out, _ = invoke(name, "--help")
    assert code == 0
    assert "Usage" in out


def test_only_the_verb_that_is_asked_for_is_imported() -> None:
    code = (
        "import sys; from slipstream.cli.main import app\n"
        "try: app(['plan', '--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit(sorted(name for name in sys.modules if name.startswith('slipstream.cli.')) != "
        "['slipstream.cli.main', 'slipstream.cli.plan'])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (
            PreflightError(key="plan.epochs", value=0, rule="too few", hint="more"),
            2,
            "error: plan.epochs = 0: too few (more)\n",
        ),
        (TransportError("gone"), 1, "error: gone\n"),
        (Interrupted("stopped at step 3"), 130, "error: stopped at step 3\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_errors_become_a_line_and_a_code(
    verb: Callable[[Callable[[], None]], None], error: BaseException, code: int, line: str
) -> None:
    def plan() -> None:
        raise error

    verb(plan)
    assert invoke("plan") == (code, "", line)


def test_our_own_mistakes_stay_tracebacks(verb: Callable[[Callable[[], None]], None]) -> None:
    def plan() -> None:
        raise AssertionError("ours")

    verb(plan)
    result = CliRunner().invoke(main.app, ["plan"])
    assert isinstance(result.exception, AssertionError)


@pytest.mark.parametrize(
    ("flags", "level"), [([], logging.WARNING), (["-v"], logging.INFO), (["-vv"], logging.DEBUG), (["-vvv"], logging.DEBUG)]
)
def test_v_sets_the_level_of_our_logs(verb: Callable[[Callable[[], None]], None], flags: list[str], level: int) -> None:
    def plan() -> None:
        typer.echo(str(logging.getLogger("slipstream").level))

    verb(plan)
    assert invoke(*flags, "plan")[1].strip() == str(level)


def test_unknown_verbs_and_bad_recipes_exit_with_2(tmp_path: object) -> None:
    assert invoke("no-such-verb")[0] == 2
    code, _, err = invoke("train", "no-such-recipe.toml")
    assert code == 2
    assert err.startswith("error: recipe = 'no-such-recipe.toml': cannot be read")
