"""Where compiled kernels and the results of tuning are kept between processes. Imports no torch: it is read at their start.

Triton keeps tuned configurations beside the kernels that it compiled (`TRITON_CACHE_AUTOTUNING`; FLA asks for it by itself),
torch's compiler keeps its own. By default both folders may lie where a restart empties them, and the compiler moves
Triton's on the way; so both are named here. Triton's keys hold a GPU's architecture, not its model: each model has a folder.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path

log = logging.getLogger(__name__)

FOLDERS = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
"""Variables that name a folder, and ours within the cache."""
OWN_HOME = "TRITON_HOME"
"""Where it is set, Triton's folder lies in it, and stays there."""
KEEP_RESULTS = "TRITON_CACHE_AUTOTUNING"
RESULTS = {"TRITON_CACHE_DIR": "*/*.autotune.json", "TORCHINDUCTOR_CACHE_DIR": "*/*.best_config"}
"""Files of results, one a kernel and size, by the folder that they lie in."""


def cache_settings(*, environ: Mapping[str, str], gpu_name: str | None) -> dict[str, str]:
    """Variables to add to the environment of a process on a GPU. What the user has set stays as it is."""
    settings = {} if KEEP_RESULTS in environ else {KEEP_RESULTS: "1"}
    wanted = {name: folder for name, folder in FOLDERS.items() if not environ.get(name)}
    if environ.get(OWN_HOME):
        wanted.pop("TRITON_CACHE_DIR", None)
    place = _place(environ) / (re.sub(r"[^0-9A-Za-z]+", "-", gpu_name or "").strip("-").lower() or "gpu")
    try:
        for folder in wanted.values():
            (place / folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        log.warning("compiled kernels are kept where torch puts them: %s", error)
        return settings
    return settings | {name: str(place / folder) for name, folder in wanted.items()}


def tuned_kernels(environ: Mapping[str, str]) -> int:
    """How many results of tuning the folders hold."""
    folders = {name: Path(environ[name]) for name in RESULTS if environ.get(name)}
    return sum(1 for name, folder in folders.items() for _ in folder.glob(RESULTS[name]))


def _place(environ: Mapping[str, str]) -> Path:
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path("~/.cache").expanduser()) / "slipstream" / "kernels"
