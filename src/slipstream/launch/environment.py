"""What a start of a run ran on: machine, versions, code and command, a line of environment.jsonl. Torch-free."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import slipstream
from slipstream.device.kind import torch_cuda_version
from slipstream.device.limits import available_cores, available_memory
from slipstream.launch.resources import Resources

VERSIONS_OF = (
    "torch", "triton", "transformers", "tokenizers", "datasets", "numpy", "safetensors", "flash-linear-attention",
    "nvidia-ml-py",
)  # fmt: skip
GIT_SECONDS = 10.0
PROC = Path("/proc")


def record_environment(path: Path, *, resources: Resources) -> None:
    """Append what this start runs on."""
    row = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "folder": os.getcwd(),
        "code": code_version(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in VERSIONS_OF},
        "cuda": torch_cuda_version(),
        "driver": _found(PROC / "driver/nvidia/version", r"Kernel Module\D*([\d.]+)"),
        "host": platform.node(),
        "system": platform.platform(),
        "processor": _found(PROC / "cpuinfo", r"model name\s*:\s*(.+)"),
        "cores": os.cpu_count(),
        "cores_allowed": available_cores(),
        "memory_allowed_bytes": available_memory(),
        "disk_free_bytes": shutil.disk_usage(path.parent).free,
        "gpus": [gpu.name for gpu in resources.gpus],
        "visible_gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "numa": resources.describe_binding(),
    }
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def code_version(package: Path | None = None) -> dict[str, Any]:
    """Slipstream's version, a digest of its sources, and the commit of its checkout, "-dirty" where files differ from it.

    No commit where the package is not in a checkout of its own, or git is not there. `package` is the folder of the sources.
    """
    folder = package or Path(slipstream.__file__).parent
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(file.relative_to(folder).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return {"version": slipstream.__version__, "sources": digest.hexdigest()[:16], "commit": _commit(folder)}


def _commit(package: Path) -> str | None:
    root = package.parent.parent
    if package != root / "src" / "slipstream" or not (root / ".git").exists() or shutil.which("git") is None:
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--abbrev=12", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _found(file: Path, pattern: str) -> str | None:
    """The first group of a pattern in a file of the kernel's; none where there is no such file or line."""
    try:
        match = re.search(pattern, file.read_text(errors="replace"))
    except OSError:
        return None
    return match[1].strip() if match else None
