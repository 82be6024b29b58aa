"""Each guard can fail: the checkers complain about snippets that break their rule, and not about ones that keep it."""

from __future__ import annotations

from pathlib import Path

import pytest

import guard_rules as rules


@pytest.mark.parametrize(
    ("package", "source"),
    [
        ("plan", "import slipstream.target.capture"),
        ("plan", "from slipstream.device import threads"),
        ("plan", "from slipstream import observe"),
        ("plan", "def f():\n    import torch"),
        ("config", "from torch import nn"),
        ("config", "from datasets import Dataset"),
        ("transport", "from slipstream.drafter import blocks"),
        ("trainer", "import slipstream.launch"),
        ("evaluate", "from slipstream.export import dflash_format"),
        ("launch", "from slipstream.demo.run import story"),
        ("errors", "import slipstream.records"),
        ("records", "import torch"),
        ("cli", "from . import main"),
        ("", "from slipstream import records"),
    ],
)
def test_wrong_imports_are_found(package: str, source: str) -> None:
    assert rules.import_complaints(source=source, package=package, name="x.py")


@pytest.mark.parametrize(
    ("package", "source"),
    [
        ("plan", "from slipstream.config.recipe import PlanSection\nimport numpy"),
        ("plan", "from slipstream.plan.packing import pack"),
        ("target", "import torch\nfrom slipstream.records import Pack"),
        ("records", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
        ("demo", "from slipstream.launch import train_run"),
        ("cli", "import slipstream\nfrom slipstream.demo.run import story"),
    ],
)
def test_right_imports_pass(package: str, source: str) -> None:
    assert rules.import_complaints(source=source, package=package, name="x.py") == []


def test_long_files_and_functions_are_found() -> None:
    long_file = "x = 1\n" * (rules.MAX_FILE_LINES + 1)
    long_function = "class A:\n    def f(self):\n" + "        x = 1\n" * rules.MAX_FUNCTION_LINES
    assert rules.size_complaints(source=long_file, name="x.py") == ["x.py: 401 lines, at most 400"]
    assert rules.size_complaints(source=long_function, name="x.py") == ["x.py:2: f has 61 lines, at most 60"]
    assert rules.size_complaints(source=long_file, name="x.py", exceptions={"x.py": "reason"}) == []
    assert rules.size_complaints(source=long_function, name="x.py", exceptions={"x.py:f": "reason"}) == []
    assert rules.size_complaints(source="x = 1\n" * rules.MAX_FILE_LINES, name="x.py") == []


@pytest.mark.parametrize("call", ["loss.item()", "h.cpu()", "ids.tolist()", "m.nonzero()", "torch.cuda.synchronize()"])
def test_synchronising_calls_are_found(call: str) -> None:
    source = f"def step(loss):\n    return {call}\n"
    assert rules.sync_complaints(source=source, name="x.py")
    assert rules.sync_complaints(source=source, name="x.py", exceptions={"x.py:step": "reason"}) == []
    assert rules.sync_complaints(source="def step(loss):\n    return loss.detach()\n", name="x.py") == []


def test_forbidden_calls_are_found() -> None:
    forbidden = {"functions": {"print": "no"}, "methods": {"record_stream": "no"}}
    assert len(rules.call_complaints(source="print(1)\nx.record_stream(s)\n", name="x.py", **forbidden)) == 2
    assert rules.call_complaints(source="console.print(1)\n", name="x.py", **forbidden) == []


def test_missing_docstrings_are_found() -> None:
    assert len(rules.docstring_complaints(source="def f():\n    pass\n", name="x.py")) == 2
    assert rules.docstring_complaints(source='"""Doc."""\ndef _f():\n    pass\n', name="x.py") == []


@pytest.mark.parametrize("line", ["pkill -f python", "killall x", "$(pgrep -f train)", "psutil.process_iter()"])
def test_kill_by_name_is_found(line: str) -> None:
    assert rules.text_complaints(text=line, name="x", pattern=rules.KILL_BY_NAME, why="no")


@pytest.mark.parametrize("line", ["cd /wo" + "rk/here", "open('/t" + "mp/x')", "https://py" + "pi.org/simple", "--index-url x"])
def test_places_are_found(line: str) -> None:
    assert rules.text_complaints(text=line, name="x", pattern=rules.PLACES, why="no")


@pytest.mark.parametrize("line", ["process.kill()", "os.kill(child.pid, SIGTERM)", "tests/data/x", "src/work.py", "/dev/null"])
def test_innocent_lines_pass(line: str) -> None:
    assert rules.text_complaints(text=line, name="x", pattern=rules.KILL_BY_NAME, why="no") == []
    assert rules.text_complaints(text=line, name="x", pattern=rules.PLACES, why="no") == []


def test_vague_names_are_found() -> None:
    assert rules.name_complaints([Path("plan/utils.py"), Path("helpers/x.py")])
    assert rules.name_complaints([Path("plan/packing.py")]) == []


def test_tree_is_read_from_a_readme(tmp_path: Path) -> None:
    readme = "text\n```\nsrc/slipstream/\n  records.py   what\n  plan/        which\n```\n"
    assert rules.readme_tree(readme) == ["records.py", "plan"]
    assert rules.readme_tree("no tree") == []
    (tmp_path / "zebra").mkdir()
    for name in ("plan/__init__.py", "zebra/__init__.py", "records.py", "__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    assert rules.package_tree(tmp_path) == ["records.py", "plan", "zebra"]
