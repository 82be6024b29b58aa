"""Identity of a target, quick even for 50 GB: its config, and of each weight file the size, header and samples. No torch."""

from __future__ import annotations

import hashlib
from pathlib import Path

from slipstream.config import TargetInfo
from slipstream.errors import TargetError

CHUNK_BYTES = 64 * 1024
NUM_CHUNKS = 64
WHOLE_BYTES = CHUNK_BYTES * NUM_CHUNKS
FLOAT8 = "float8: e4m3 by tensor, norms by a fixed step, other rows by their maximum"
"""Stands for how `float8` rounds; changes when it rounds otherwise."""
RANDOM = "random weights, first kind"
"""Stands for weights that `random_weights` makes up; changes when it makes others."""


def fingerprint_target(info: TargetInfo, *, dtype: str = "bfloat16") -> str:
    """Fingerprint (32 hex digits) of a target folder; other weights, or another config, give another one.

    So does the `dtype` "float8", which gives other hidden states; "bfloat16" and "float32" share one.

    Files above 4 MiB are hashed in 64 chunks of 64 KiB spread evenly over them, besides their header (names, types, shapes and
    offsets of all tensors): a training run moves every chunk, but a single edited weight between two chunks goes unseen.
    Of a target with random weights it covers the config alone. Raises `TargetError` when there are no weights, or a file is
    not safetensors.
    """
    digest = hashlib.sha256((info.folder / "config.json").read_bytes())
    if dtype == "float8":
        digest.update(f"\0{FLOAT8}".encode())
    if info.weights == "random":
        digest.update(f"\0{RANDOM}".encode())
        return digest.hexdigest()[:32]
    for file in weight_files(info.folder):
        digest.update(f"\0{file.name}\0{file.stat().st_size}\0".encode())
        _add_samples(digest, file)
    return digest.hexdigest()[:32]


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a target, by name. Raises `TargetError` when there is none."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise TargetError(
            key="target.model", value=str(folder), rule="has no *.safetensors file", hint="convert the weights to safetensors"
        )
    return files


def _add_samples(digest: hashlib._Hash, file: Path) -> None:
    size = file.stat().st_size
    with file.open("rb") as stream:
        header_bytes = int.from_bytes(stream.read(8), "little")
        if size < 8 or header_bytes > size - 8:
            raise TargetError(
                key="target.model",
                value=str(file),
                rule=f"is truncated or not safetensors: a header of {header_bytes} bytes in a file of {size}",
                hint="copy or download it again",
            )
        digest.update(stream.read(header_bytes))
        if size <= WHOLE_BYTES:
            digest.update(stream.read())
            return
        last = size - CHUNK_BYTES
        for chunk in range(NUM_CHUNKS):
            stream.seek(last * chunk // (NUM_CHUNKS - 1))
            digest.update(stream.read(CHUNK_BYTES))
