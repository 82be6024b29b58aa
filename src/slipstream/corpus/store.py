"""A corpus on disk: Arrow files that `datasets.load_from_disk` reads, stamped so that damage is found and named at open.

Documents are streamed into a folder beside the final one, which appears whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from slipstream.corpus.conversation import Reject
from slipstream.corpus.meta import (
    META_FILE,
    CorpusMeta,
    check_contents,
    corpus_fingerprint,
    read_meta,
    stamp_file,
    write_meta,
)
from slipstream.errors import CorpusError
from slipstream.records import BoolArray, Document, Int32Array

if TYPE_CHECKING:
    from datasets import Features
    from datasets.arrow_writer import ArrowWriter

REJECTS_FILE = "rejects.jsonl"
SHARD_BYTES = 256 * 2**20
"""Arrow bytes after which the next file begins: what a damaged file costs, against the number of files."""
BATCH_DOCUMENTS = 512
"""Documents that are held in memory before they are written, and the rows of one Arrow record batch."""


def count_anchors(loss_mask: BoolArray) -> int:
    """Positions where a block can be anchored: supervised, and the next one too."""
    return int(np.count_nonzero(loss_mask[:-1] & loss_mask[1:]))


class StoreWriter:
    """Streams documents and rejects into a new store; used in a `with`, which leaves nothing behind if it fails.

    `overwrite` replaces a store that is already there, at the very end.
    """

    def __init__(self, folder: str | Path, *, overwrite: bool = False, shard_bytes: int = SHARD_BYTES) -> None:
        self._folder = Path(folder)
        _check_free(self._folder, overwrite=overwrite)
        self._partial = self._folder.with_name(f".{self._folder.name}.{os.getpid()}.partial")
        self._shard_bytes = shard_bytes
        self._batch: list[Mapping[str, Any]] = []
        self._writer: ArrowWriter | None = None
        self._shards: list[str] = []
        self._content = hashlib.sha256()
        self._present = np.zeros(0, dtype=np.bool_)
        self._counts: Counter[str] = Counter()
        self._max_tokens = 0
        self._rejects: Counter[str] = Counter()
        self._remarks: Counter[str] = Counter()

    def __enter__(self) -> StoreWriter:
        shutil.rmtree(self._partial, ignore_errors=True)
        try:
            self._partial.mkdir(parents=True)
            self._reject_file = (self._partial / REJECTS_FILE).open("w", encoding="utf-8")
        except OSError as error:
            raise CorpusError(key="--out", value=str(self._folder), rule=f"cannot be written: {error.strerror}") from error
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._reject_file.close()
        if self._writer is not None:
            self._writer.close()
        shutil.rmtree(self._partial, ignore_errors=True)

    @property
    def num_documents(self) -> int:
        """Documents added so far."""
        return self._counts["documents"]

    @property
    def rejects(self) -> Mapping[str, int]:
        """Rows refused so far, by reason."""
        return self._rejects

    def add(
        self,
        *,
        token_ids: Sequence[int] | Int32Array,
        loss_mask: Sequence[bool] | BoolArray,
        source: str = "",
        line: int = 0,
        remarks: Iterable[str] = (),
    ) -> int:
        """Append a document and return its id. `remarks` are counted and kept with it."""
        ids, mask = np.asarray(token_ids, dtype=np.int32), np.asarray(loss_mask, dtype=np.bool_)
        if ids.ndim != 1 or ids.shape != mask.shape or not len(ids) or ids.min() < 0:
            found = f"{ids.shape} ids, {mask.shape} mask"
            raise CorpusError(
                key=f"{source}:{line}", value=found, rule="needs as many ids from 0 as mask entries, at least one"
            )
        notes = [str(remark) for remark in remarks]
        self._note_tokens(ids=ids, mask=mask)
        self._remarks.update(notes)
        self._batch.append({"token_ids": ids, "loss_mask": mask, "source": source, "line": line, "remarks": notes})
        if len(self._batch) == BATCH_DOCUMENTS:
            self._flush()
        self._counts["documents"] += 1
        return self._counts["documents"] - 1

    def reject(self, reject: Reject) -> None:
        """Count a refused row and keep where it is and why."""
        self._rejects[str(reject.reason)] += 1
        self._reject_file.write(json.dumps(asdict(reject)) + "\n")

    def finish(self, draft: CorpusMeta) -> CorpusMeta:
        """Close the store, move it into place, and return the draft with counts, stamps and fingerprint."""
        self._flush()
        self._close_shard()
        self._reject_file.close()
        self._write_dataset_files()
        names = sorted(file.name for file in self._partial.iterdir())
        meta = replace(
            draft,
            fingerprint=corpus_fingerprint(content=self._content.hexdigest(), meta=draft),
            num_documents=self._counts["documents"],
            num_tokens=self._counts["tokens"],
            num_supervised=self._counts["supervised"],
            num_anchors=self._counts["anchors"],
            max_tokens=self._max_tokens,
            rejects=dict(sorted(self._rejects.items())),
            warnings=dict(sorted(self._remarks.items())),
            files={name: stamp_file(self._partial / name) for name in names},
            token_present=np.packbits(self._present, bitorder="little").tobytes(),
        )
        write_meta(folder=self._partial, meta=meta)
        _move_into_place(self._partial, self._folder)
        return meta

    def _note_tokens(self, *, ids: Int32Array, mask: BoolArray) -> None:
        self._counts["tokens"] += len(ids)
        self._counts["supervised"] += int(np.count_nonzero(mask))
        self._counts["anchors"] += count_anchors(mask)
        self._max_tokens = max(self._max_tokens, len(ids))
        highest = int(ids.max())
        if highest >= len(self._present):
            self._present = np.pad(self._present, (0, highest + 1 - len(self._present)))
        self._present[ids] = True
        # The lengths go in too: without them a boundary could move between two documents unnoticed.
        self._content.update(np.int64(len(ids)).tobytes() + ids.tobytes() + np.packbits(mask).tobytes())

    def _flush(self) -> None:
        if not self._batch:
            return
        if self._writer is None:
            self._open_shard()
        assert self._writer is not None
        self._writer.write_table(_table(self._batch), writer_batch_size=BATCH_DOCUMENTS)
        self._batch = []
        if self._writer._num_bytes >= self._shard_bytes:
            self._close_shard()

    def _open_shard(self) -> None:
        from datasets.arrow_writer import ArrowWriter

        name = f"data-{len(self._shards):05d}.arrow"
        self._writer = ArrowWriter(path=str(self._partial / name), features=_features())
        self._shards.append(name)

    def _close_shard(self) -> None:
        if self._writer is not None:
            self._writer.finalize()
            self._writer = None

    def _write_dataset_files(self) -> None:
        """The two JSON files by which `datasets.load_from_disk` knows a data set."""
        from datasets import DatasetInfo

        if not self._shards:
            self._open_shard()
            self._close_shard()
        state: dict[str, Any] = {
            "_data_files": [{"filename": name} for name in self._shards],
            "_fingerprint": self._content.hexdigest()[:16],
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": None,
        }
        (self._partial / "state.json").write_text(json.dumps(state, indent=1))
        (self._partial / "dataset_info.json").write_text(json.dumps(asdict(DatasetInfo(features=_features())), indent=1))


def write_store(folder: str | Path, documents: Iterable[Mapping[str, Any]], meta: CorpusMeta) -> CorpusMeta:
    """Write documents (`token_ids`, `loss_mask`, optionally `source`, `line`, `remarks`) as a store; `meta` is a draft.

    Returns the finished meta. Raises `CorpusError` when the folder is taken.
    """
    with StoreWriter(folder) as writer:
        for document in documents:
            writer.add(**document)
        return writer.finish(meta)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Documents in mapped memory, read through NumPy: scalars of Arrow cost twice as much.

    Row r has the tokens `starts[r] … starts[r + 1]` of `token_ids`, and so many bits of `mask_bits` from `first_bit` on.
    """

    starts: Int32Array
    token_ids: Int32Array
    mask_bits: npt.NDArray[np.uint8]
    first_bit: int

    @classmethod
    def over(cls, token_ids: Any, loss_mask: Any) -> _Chunk:
        """Over two list arrays of Arrow of one layout."""
        starts, masks = token_ids.offsets.to_numpy(), loss_mask.offsets.to_numpy()
        bits = loss_mask.values.buffers()[1]
        return cls(
            starts=starts,
            token_ids=token_ids.values.to_numpy(),
            mask_bits=np.frombuffer(bits, dtype=np.uint8) if bits is not None else np.zeros(0, dtype=np.uint8),
            first_bit=loss_mask.values.offset + int(masks[0] - starts[0]),
        )

    def document(self, row: int) -> tuple[Int32Array, BoolArray]:
        """Token ids and loss mask of a row."""
        start, stop = int(self.starts[row]), int(self.starts[row + 1])
        byte, bit = divmod(self.first_bit + start, 8)
        bits = np.unpackbits(self.mask_bits[byte : (self.first_bit + stop + 7) // 8], bitorder="little")
        return self.token_ids[start:stop], bits[bit : bit + stop - start].view(np.bool_)


class CorpusStore:
    """An opened corpus; documents are read from memory-mapped Arrow. Safe to open from any number of processes."""

    def __init__(self, *, folder: Path, meta: CorpusMeta) -> None:
        from datasets import load_from_disk

        self.folder, self.meta = folder, meta
        # Mapped even when small, so that every process of a run shares one copy.
        columns = load_from_disk(str(folder), keep_in_memory=False).data
        chunks = zip(columns.column("token_ids").chunks, columns.column("loss_mask").chunks, strict=True)
        self._chunks = [_Chunk.over(token_ids, loss_mask) for token_ids, loss_mask in chunks]
        self._places = [columns.column("source"), columns.column("line"), columns.column("remarks")]
        self._ends = np.cumsum([len(chunk.starts) - 1 for chunk in self._chunks]).tolist()
        self.num_tokens: Int32Array = columns.column("num_tokens").to_numpy()
        self.num_anchors: Int32Array = columns.column("num_anchors").to_numpy()
        self.num_supervised: Int32Array = columns.column("num_supervised").to_numpy()

    @classmethod
    def open(cls, folder: str | Path) -> CorpusStore:
        """Verify every file and open the store. Raises `CorpusError` naming the file that is missing, truncated or damaged."""
        meta = read_meta(folder)
        check_contents(folder=folder, meta=meta)
        return cls(folder=Path(folder), meta=meta)

    @property
    def num_documents(self) -> int:
        """n; document ids are 0 to n - 1, in the order of the sources."""
        return len(self.num_tokens)

    def document(self, document_id: int) -> Document:
        """One document: ids int32 `[L]`, loss mask bool `[L]`."""
        assert 0 <= document_id < self.num_documents, f"no document {document_id} among {self.num_documents}"
        number = bisect_right(self._ends, document_id)
        chunk, before = self._chunks[number], self._ends[number - 1] if number else 0
        token_ids, loss_mask = chunk.document(document_id - before)
        return Document(document_id=document_id, token_ids=token_ids, loss_mask=loss_mask)

    def origin(self, document_id: int) -> tuple[str, int, tuple[str, ...]]:
        """Source file, line and remarks of a document."""
        source, line, remarks = (column[document_id].as_py() for column in self._places)
        return source, line, tuple(remarks)

    def rejects(self) -> list[Reject]:
        """The refused rows, in the order they were met."""
        with (self.folder / REJECTS_FILE).open(encoding="utf-8") as lines:
            return [Reject(**json.loads(line)) for line in lines]


def _features() -> Features:
    from datasets import Features, List, Value

    return Features(
        {
            "token_ids": List(Value("int32")),
            "loss_mask": List(Value("bool")),
            "num_tokens": Value("int32"),
            "num_supervised": Value("int32"),
            "num_anchors": Value("int32"),
            "source": Value("string"),
            "line": Value("int64"),
            "remarks": List(Value("string")),
        }
    )


def _table(batch: Sequence[Mapping[str, Any]]) -> Any:
    import pyarrow as pa

    masks: list[BoolArray] = [document["loss_mask"] for document in batch]
    lengths = np.asarray([len(mask) for mask in masks], dtype=np.int32)
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    tokens = pa.array(np.concatenate([document["token_ids"] for document in batch]))
    columns = {
        "token_ids": pa.ListArray.from_arrays(offsets, tokens),
        "loss_mask": pa.ListArray.from_arrays(offsets, pa.array(np.concatenate(masks))),
        "num_tokens": pa.array(lengths),
        "num_supervised": pa.array(np.asarray([mask.sum() for mask in masks], dtype=np.int32)),
        "num_anchors": pa.array(np.asarray([count_anchors(mask) for mask in masks], dtype=np.int32)),
        "source": pa.array([document["source"] for document in batch], type=pa.string()),
        "line": pa.array([document["line"] for document in batch], type=pa.int64()),
        "remarks": pa.array([document["remarks"] for document in batch], type=pa.list_(pa.string())),
    }
    return pa.table(columns, schema=_features().arrow_schema)


def _check_free(folder: Path, *, overwrite: bool) -> None:
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not (folder / META_FILE).is_file():
        raise CorpusError(key="--out", value=str(folder), rule="exists and is no corpus", hint="name a new folder")
    if not overwrite:
        raise CorpusError(key="--out", value=str(folder), rule="is already a corpus", hint="name a new folder, or --overwrite")


def _move_into_place(partial: Path, folder: Path) -> None:
    """`partial` becomes `folder`. A store that is there steps aside first and is deleted last."""
    old = folder.with_name(f"{partial.name}.old")
    if folder.is_dir() and any(folder.iterdir()):
        os.replace(folder, old)
    os.replace(partial, folder)
    shutil.rmtree(old, ignore_errors=True)
