"""What a process pays for by importing its end of the transport."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("slipstream.transport.broker", ["torch", "transformers", "datasets", "pydantic"]),
        ("slipstream.transport.layout", ["torch", "numpy"]),
        ("slipstream.device.kind", ["torch", "numpy"]),
        ("slipstream.device.shared", ["torch", "numpy"]),
        ("slipstream.transport.shared", ["transformers", "datasets", "pydantic", "tokenizers"]),
        ("slipstream.launch.roles.answers", ["torch", "transformers"]),  # what they were asked before is kept
    ],
)
def test_it_imports_only_what_it_needs(module: str, absent: list[str]) -> None:
    code = f"import sys, {module}; print(set({absent!r}) & set(sys.modules) or 'none')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "none\n", "")
