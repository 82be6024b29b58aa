"""Headers of safetensors files, read with the standard library: names, shapes and the length that a whole file has."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from slipstream.errors import PreflightError

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""The limit of the format; a larger number means that this is another kind of file."""


def read_header(file: Path, *, key: str) -> Mapping[str, tuple[int, ...]]:
    """Shapes of a file's tensors by name. `PreflightError` under `key` when it is truncated or not safetensors at all."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
            if size < LENGTH_BYTES or length > min(MAX_HEADER_BYTES, size - LENGTH_BYTES):
                raise _unusable(file, key=key, rule=f"is truncated or not safetensors: {size} bytes, its header alone {length}")
            header = json.loads(stream.read(length))
            tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
            end = LENGTH_BYTES + length + max((int(entry["data_offsets"][1]) for entry in tensors.values()), default=0)
            shapes = {name: tuple(int(n) for n in entry["shape"]) for name, entry in tensors.items()}
    except OSError as error:
        raise _unusable(file, key=key, rule=f"cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise _unusable(file, key=key, rule=f"has no readable safetensors header: {error}") from error
    if size != end:
        what = "truncated" if size < end else "too long"
        raise _unusable(file, key=key, rule=f"is {what}: {size} bytes, its header says {end}")
    return shapes


def _unusable(file: Path, *, key: str, rule: str) -> PreflightError:
    return PreflightError(key=key, value=str(file), rule=rule, hint="download or copy it again")
