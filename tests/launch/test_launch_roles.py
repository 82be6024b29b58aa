"""What a child pays for by importing its role."""

from __future__ import annotations

import subprocess
import sys


def test_a_drafter_needs_no_transformers() -> None:
    """It would take as long as all else that the process loads."""
    absent = ["transformers", "datasets", "tokenizers", "sympy", "torch._dynamo"]
    code = f"import sys, slipstream.launch.roles.drafter; print([name for name in {absent!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")
