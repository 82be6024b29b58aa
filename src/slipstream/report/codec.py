"""Arrays as text in a page: small, exact, and read by a few lines of script (assets/decode.js).

A column is split into planes (first bytes of all values, second bytes, ...), which makes high bytes long runs of zeros, then
deflated, then written in base 64.
"""

from __future__ import annotations

import base64
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

LEVEL = 6


def encode_integers(values: NDArray[Any]) -> dict[str, Any]:
    """A column of integers, exact, as int64."""
    return _encode(values.astype(np.int64), "i64")


def encode_differences(values: NDArray[Any]) -> dict[str, Any]:
    """A column of integers, exact, as int64 differences from one value to the next: smaller when they climb evenly."""
    return _encode(np.diff(values.astype(np.int64), prepend=np.int64(0)), "d64")


def encode_floats(values: NDArray[Any]) -> dict[str, Any]:
    """A float column as float32; NaN stays NaN."""
    return _encode(values.astype("<f4"), "f32")


def encode_bytes(values: NDArray[Any]) -> dict[str, Any]:
    """A column of codes from 0 to 255."""
    assert not len(values) or (values.min() >= 0 and values.max() < 256), "codes are bytes"
    return _encode(values.astype(np.uint8), "u8")


def decode(column: dict[str, Any]) -> NDArray[Any]:
    """What a column says, as the page's script reads it."""
    dtype = {"i64": "<i8", "d64": "<i8", "f32": "<f4", "u8": "u1"}[column["t"]]
    width = np.dtype(dtype).itemsize
    planes = np.frombuffer(zlib.decompress(base64.b64decode(column["z"])), dtype=np.uint8).reshape(width, column["n"])
    values = np.ascontiguousarray(planes.T).view(dtype)[:, 0] if column["n"] else np.zeros(0, dtype)
    return np.cumsum(values) if column["t"] == "d64" else values


def _encode(values: NDArray[Any], kind: str) -> dict[str, Any]:
    values = np.ascontiguousarray(values.astype(values.dtype.newbyteorder("<")))
    planes = values.view(np.uint8).reshape(len(values), values.dtype.itemsize).T
    packed = zlib.compress(np.ascontiguousarray(planes).tobytes(), LEVEL)
    return {"t": kind, "n": len(values), "z": base64.b64encode(packed).decode("ascii")}
