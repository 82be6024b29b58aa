"""The rules that the guard tests hold the project to, as functions from source text to complaints.

Each returns a list of complaints, `file:line: what`, empty when all is well; `test_guards_rules.py` proves that each can fail.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "src" / "slipstream"

FLOW = (
    "records.py", "errors.py", "runfolder.py",
    "config", "device", "observe", "corpus", "plan", "target", "transport", "drafter", "objective",
    "trainer", "evaluate", "export", "report", "launch", "demo", "cli",
)  # fmt: skip
"""Everything that may lie in the package, in flow order."""

LEVEL: Mapping[str, int] = {
    **dict.fromkeys(("records", "errors", "runfolder"), 0),
    "config": 1,
    "device": 2,
    "observe": 3,
    **dict.fromkeys(("corpus", "plan", "target", "transport", "drafter", "objective"), 4),
    **dict.fromkeys(("trainer", "evaluate", "export", "report"), 5),
    "launch": 6,
    "demo": 7,
    "cli": 8,
}
"""A package imports only from lower levels, and from itself."""

TORCH_FREE = ("config", "plan")
HEAVY = ("torch", "transformers", "datasets", "tokenizers", "accelerate")

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
SIZE_EXCEPTIONS: Mapping[str, str] = {}
"""`file` or `file:function`, and the reason why it is longer."""

SYNCHRONISING = ("item", "cpu", "tolist", "nonzero", "synchronize", "is_nonzero", "numpy")
TARGET_ENGINE = (
    "target/engine.py", "target/frame.py", "target/kernels.py", "target/elementwise.py",
    "target/fused.py", "target/attention.py", "target/delta_net.py", "target/recorded.py",
    "target/float8.py", "target/float8_elementwise.py", "target/float8_kernels.py", "target/float8_layers.py",
)  # fmt: skip
TRAINER_LOOP = (
    "trainer/loop.py", "trainer/column.py", "trainer/placing.py", "trainer/metadata.py", "trainer/late_metrics.py",
    "trainer/optim.py", "trainer/optim_kernel.py", "trainer/recorded.py", "trainer/reduction.py", "trainer/tally.py",
    "trainer/step_end.py", "trainer/snapshot.py", "trainer/lanes.py",
)  # fmt: skip
TRANSPORT = (
    "transport/arrivals.py", "transport/departures.py", "transport/device_inline.py", "transport/staged.py",
    "transport/staged_inline.py", "transport/operations.py", "transport/making.py", "transport/widened.py",
)  # fmt: skip
TARGET = ("target/huggingface.py", "target/capture.py", *TARGET_ENGINE)
HOT = ("drafter/*.py", "objective/*.py", *TARGET, *TRAINER_LOOP, *TRANSPORT)
NOT_HOT = ("drafter/blocks.py", "objective/reference.py")
"""blocks.py is NumPy on the CPU; reference.py is the naive loss that tests compare with."""
SYNC_EXCEPTIONS: Mapping[str, str] = {
    "drafter/dflash.py:make_masks": "reads anchors of a batch on the CPU; the loop makes masks before the batch moves",
    "drafter/mask_arrays.py:mask_arrays": "reads anchors of a batch that it asserts to be on the CPU",
    "trainer/lanes.py:finish": "between rounds of warm-up",
    "trainer/late_metrics.py:_may_read": "at the end of a run; ranks of a group for the step before the last, to stop alike",
    "trainer/late_metrics.py:counts_on_host": "figures that have arrived in page-locked memory",
    "trainer/late_metrics.py:_read": "figures that have arrived in page-locked memory",
    "trainer/metadata.py:_array": "arrays of the CPU",
    "trainer/metadata.py:wait_for_room": "the thread that prepares steps",
    "trainer/metadata.py:stage": "the thread that prepares steps",
    "trainer/snapshot.py:arrived": "the thread that writes checkpoints",
    "transport/arrivals.py:drain": "when the transport is left",
    "transport/departures.py:drain": "when the transport is left",
}
"""`file:function`, and the reason why a synchronising call in it costs nothing."""

KILL_BY_NAME = re.compile(r"\b(p" r"kill|kill" r"all|p" r"grep|pid" r"of|task" r"kill|process" r"_iter)\b")
PLACES = re.compile(
    r"(?<![\w.~-])/(?:work|tmp|root|home|opt|mnt|data)/[\w.]"
    r"|py" r"pi\.org|python" r"hosted|download\.py" r"torch|--(?:extra-)?index" r"-url|--find" r"-links"
)  # fmt: skip
VAGUE_NAMES = ("utils", "util", "helpers", "helper", "common", "manager", "misc")


def modules(folder: Path = SOURCES) -> Iterator[Path]:
    """All Python files below a folder."""
    return (path for path in sorted(folder.rglob("*.py")) if "__pycache__" not in path.parts)


def tracked_files(root: Path = ROOT) -> list[Path]:
    """Files under version control or about to be."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    return [root / name for name in listed.split("\0") if name and (root / name).is_file()]


def package_of(path: Path) -> str:
    """First folder or module below `slipstream`; empty for the package itself."""
    first = path.relative_to(SOURCES).parts[0]
    return "" if first == "__init__.py" else first.removesuffix(".py")


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every import, lazy and type-checking ones included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level:
            yield node.lineno, "." * node.level
        elif isinstance(node, ast.ImportFrom):
            # `from slipstream import plan` imports the package `plan`; deeper names are attributes or modules of one package.
            names = [f"slipstream.{alias.name}" for alias in node.names] if node.module == "slipstream" else [str(node.module)]
            yield from ((node.lineno, name) for name in names)


def import_complaints(*, source: str, package: str, name: str) -> list[str]:
    """Imports against the flow, relative ones, and heavy packages where none may be."""
    found = []
    tree = ast.parse(source)
    for line, target in imports(tree):
        parts = target.split(".")
        if target.startswith("."):
            found.append(f"{name}:{line}: relative import")
        elif parts[0] == "slipstream" and len(parts) > 1 and parts[1] not in ("__version__", package):
            if package == "" or LEVEL[parts[1]] >= LEVEL[package] or (package == "plan" and parts[1] in ("device", "observe")):
                found.append(f"{name}:{line}: {package or 'slipstream'} may not import {target}")
        elif parts[0] in HEAVY and package in TORCH_FREE:
            found.append(f"{name}:{line}: {package} may not import {target}")
        elif parts[0] in HEAVY and LEVEL.get(package) == 0 and line not in _type_checking_lines(tree):
            found.append(f"{name}:{line}: {target} only for type checkers")
    return found


def _type_checking_lines(tree: ast.AST) -> set[int]:
    guards = (node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    return {line for node in guards for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}


def size_complaints(*, source: str, name: str, exceptions: Mapping[str, str] = SIZE_EXCEPTIONS) -> list[str]:
    """Files and functions that are too long to be read at once."""
    found = []
    lines = len(source.splitlines())
    if lines > MAX_FILE_LINES and name not in exceptions:
        found.append(f"{name}: {lines} lines, at most {MAX_FILE_LINES}")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES and f"{name}:{node.name}" not in exceptions:
                found.append(f"{name}:{node.lineno}: {node.name} has {length} lines, at most {MAX_FUNCTION_LINES}")
    return found


def sync_complaints(*, source: str, name: str, exceptions: Mapping[str, str] = SYNC_EXCEPTIONS) -> list[str]:
    """Calls that make the CPU wait for the device, by the function that they stand in."""
    found = []
    for function, call in _calls(ast.parse(source), function=""):
        called = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        if called in SYNCHRONISING and f"{name}:{function}" not in exceptions:
            found.append(f"{name}:{call.lineno}: .{called}() makes the CPU wait for the device")
    return found


def _calls(node: ast.AST, *, function: str) -> Iterator[tuple[str, ast.Call]]:
    for child in ast.iter_child_nodes(node):
        inner = child.name if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else function
        if isinstance(child, ast.Call):
            yield inner, child
        yield from _calls(child, function=inner)


def call_complaints(*, source: str, name: str, functions: Mapping[str, str], methods: Mapping[str, str]) -> list[str]:
    """Calls of functions and of methods by name, and why they are forbidden."""
    found = []
    for _, call in _calls(ast.parse(source), function=""):
        is_method = isinstance(call.func, ast.Attribute)
        called = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        why = (methods if is_method else functions).get(called)
        if why:
            found.append(f"{name}:{call.lineno}: {called}: {why}")
    return found


def docstring_complaints(*, source: str, name: str) -> list[str]:
    """A module, a public class or function without a docstring."""
    tree = ast.parse(source)
    found = [] if ast.get_docstring(tree) else [f"{name}:1: no module docstring"]
    for node in _public(tree):
        if not ast.get_docstring(node):
            found.append(f"{name}:{node.lineno}: {node.name} has no docstring")
    return found


def _public(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.ClassDef]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node


def text_complaints(*, text: str, name: str, pattern: re.Pattern[str], why: str) -> list[str]:
    """Lines on which a pattern stands."""
    numbered = enumerate(text.splitlines(), start=1)
    return [f"{name}:{number}: {match.group()}: {why}" for number, line in numbered if (match := pattern.search(line))]


def name_complaints(paths: Iterable[Path]) -> list[str]:
    """Modules and folders whose names say nothing."""
    return [f"{path}: a vague name" for path in paths if set(VAGUE_NAMES) & {*path.with_suffix("").parts}]


def readme_tree(readme: str) -> list[str]:
    """Names in the README's tree of the package, in its order, folders without their slash."""
    block = re.search(r"^src/slipstream/\n((?:  .*\n)+)", readme, flags=re.MULTILINE)
    names = (line.split()[0] for line in block.group(1).splitlines()) if block else ()
    return [name.rstrip("/") for name in names]


def package_tree(folder: Path = SOURCES) -> list[str]:
    """Modules and packages that lie in the source folder, in flow order, strangers last."""
    there = {path.name for path in folder.iterdir() if path.suffix == ".py" and path.name != "__init__.py"}
    there |= {path.parent.name for path in folder.glob("*/__init__.py")}
    return sorted(there, key=lambda name: (FLOW.index(name) if name in FLOW else len(FLOW), name))
