"""Settings of the GPU memory allocator for a child process, by its role. Imports no torch: they are read when it starts."""

from __future__ import annotations

from collections.abc import Mapping

from slipstream.errors import PreflightError

NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The variable of today and the one before it; where both are set, torch reads some keys from the one, some from the other."""

DRAFTER = "expandable_segments:True"
"""One growing segment a stream: what warm-up tuned and compiled leaves no holes that later sizes do not fit."""


def allocator_settings(*, role: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables to add to a child's environment. What the user has set stays as it is.

    Raises `PreflightError` when both variables are set and differ.
    """
    given = {name: environ[name] for name in NAMES if environ.get(name)}
    if len(set(given.values())) > 1:
        raise PreflightError(
            key=NAMES[1],
            value=given[NAMES[1]],
            rule=f"differs from {NAMES[0]}={given[NAMES[0]]}: torch would take some settings from each",
            hint=f"unset {NAMES[1]}",
        )
    return {} if given or role != "drafter" else {NAMES[0]: DRAFTER}
