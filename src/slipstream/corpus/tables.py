"""Rows of tables: Parquet files, folders that `datasets` saved, and data sets of the Hugging Face hub.

A column of a table has a value in every row, null where JSON would leave the key out; so nulls are left out here too. Only the
columns that conversations are read from are loaded. `datasets` is imported when the first table is opened, not before.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from slipstream.corpus.conversation import RawRow, Source
from slipstream.corpus.forms import COLUMNS, OPENING_COLUMNS, TURN_LISTS
from slipstream.errors import CorpusError

HUB = "hub:"
_HUB_NAME = re.compile(r"hub:(?P<name>[^:\[\]]+)(?::(?P<config>[^:\[\]]+)(?=:))?(?::(?P<split>[^:\[\]]+(?:\[[^\]]*\])?))?")
_SAVED = ("dataset_info.json", "dataset_dict.json")


def is_table(source: str) -> bool:
    """Whether a source is read as a table: by its name, or because it is a folder."""
    return source.startswith(HUB) or Path(source).suffix.lower() == ".parquet" or Path(source).is_dir()


def open_table(source: str) -> Source:
    """A table by its name: `NAME.parquet`, a folder that `Dataset.save_to_disk` wrote, `hub:NAME[:CONFIG][:SPLIT]`.

    A data set of the hub comes from the local cache where it is there; else it is downloaded, unless HF_HUB_OFFLINE is set.
    Raises `CorpusError` when there is no such table, it has several splits, or none of its columns holds conversations.
    """
    with _told(source):
        if source.startswith(HUB):
            return _whole(source, _load_hub(source))
        if Path(source).is_dir():
            return _whole(source, _load_saved(Path(source)))
        return _parquet(Path(source))


def _parquet(path: Path) -> Source:
    from datasets import load_dataset
    from pyarrow.parquet import ParquetFile

    size = path.stat().st_size
    with ParquetFile(path) as file:
        num_rows, names = file.metadata.num_rows, list(file.schema_arrow.names)
    columns = _columns(str(path), names)
    if not num_rows:
        return Source(name=str(path), num_bytes=size, rows=lambda: iter(()))
    # Streamed, since a table that is not would be written a second time into the cache of `datasets`.
    rows = load_dataset("parquet", data_files={"train": [str(path)]}, split="train", streaming=True)
    return Source(
        name=str(path),
        num_bytes=size,
        rows=lambda: _rows(rows.select_columns(columns), name=str(path), num_bytes=size, num_rows=num_rows),
    )


def _whole(source: str, dataset: Any) -> Source:
    from datasets import DatasetDict

    if isinstance(dataset, DatasetDict):
        if len(dataset) != 1:
            like = f"{source}:train" if source.startswith(HUB) else f"{source}/train"
            raise CorpusError(
                key="SRC", value=source, rule=f"has the splits {', '.join(dataset)}", hint=f"name one of them: {like}"
            )
        dataset = next(iter(dataset.values()))
    table = dataset.select_columns(_columns(source, dataset.column_names))
    size = max(int(table.data.nbytes), len(table))
    return Source(name=source, num_bytes=size, rows=lambda: _rows(table, name=source, num_bytes=size, num_rows=len(table)))


def _load_hub(source: str) -> Any:
    from datasets import load_dataset

    found = _HUB_NAME.fullmatch(source)
    if found is None:
        raise CorpusError(
            key="SRC",
            value=source,
            rule="is not written hub:NAME[:CONFIG][:SPLIT]",
            hint="as hub:openai/gsm8k:main:train",
        )
    return load_dataset(found["name"], found["config"], split=found["split"])


def _load_saved(folder: Path) -> Any:
    from datasets import load_from_disk

    if not any((folder / name).is_file() for name in _SAVED):
        raise CorpusError(
            key="SRC",
            value=str(folder),
            rule="is a directory that `datasets` did not save",
            hint=f"for a folder of Parquet files name the files: {folder}/*.parquet",
        )
    return load_from_disk(str(folder))


def _columns(source: str, names: Iterable[str]) -> list[str]:
    there = list(names)
    if not set(OPENING_COLUMNS) & set(there):
        raise CorpusError(
            key="SRC",
            value=source,
            rule=f"has no column that holds conversations or prompts, only: {', '.join(there[:12])}",
            hint=f"rename one to {OPENING_COLUMNS[0]}; known are {', '.join(OPENING_COLUMNS)}",
        )
    return [name for name in there if name in COLUMNS]


def _rows(rows: Iterable[dict[str, Any]], *, name: str, num_bytes: int, num_rows: int) -> Iterator[RawRow]:
    """The table's rows, each with its share of the table's bytes, so that progress adds up."""
    told = 0
    with _told(name):
        for number, row in enumerate(rows, start=1):
            until = num_bytes * min(number, num_rows) // num_rows
            yield RawRow(line=number, num_bytes=until - told, parse=partial(_row, row))
            told = until


def _row(row: dict[str, Any]) -> dict[str, Any]:
    plain = {key: _without_nulls(value) for key, value in row.items() if value is not None}
    for key in TURN_LISTS:
        turns = plain.get(key)
        # A list of structs that was saved as `Sequence` comes as a struct of lists.
        if isinstance(turns, dict) and turns and all(isinstance(column, list) for column in turns.values()):
            columns = {field: row[key][field] for field in turns}
            if len({len(column) for column in columns.values()}) == 1:
                plain[key] = [
                    _without_nulls(dict(zip(columns, turn, strict=True))) for turn in zip(*columns.values(), strict=True)
                ]
    return plain


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


@contextmanager
def _told(source: str) -> Iterator[None]:
    """What `datasets`, the hub and Arrow raise becomes an error that names the source."""
    from datasets.exceptions import DatasetsError

    try:
        yield
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        said = getattr(error, "strerror", None) or next(iter(str(error).splitlines()), "") or type(error).__name__
        hint = "a data set of the hub must be in the local cache, or the hub be reachable" if source.startswith(HUB) else ""
        raise CorpusError(key="SRC", value=source, rule=f"cannot be read: {said}", hint=hint) from error
