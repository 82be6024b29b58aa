"""Parquet files, saved data sets and data sets of the hub give the same conversations as JSON lines, and the same rejects."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict, Features, Sequence, Value

from slipstream.corpus.conversation import Message, Reason, Reject
from slipstream.corpus.prepare import PrepareProgress, prepare
from slipstream.corpus.sources import open_sources, read_conversations
from slipstream.corpus.store import CorpusStore
from slipstream.errors import CorpusError

WriteLines = Callable[..., Path]
USER, ANSWER = Message("user", "one?"), Message("assistant", "two.")
CHAT = [{"role": "user", "content": "one?"}, {"role": "assistant", "content": "two."}]
ROWS: list[dict[str, Any]] = [
    {"messages": CHAT, "id": 1},
    {"messages": [{"role": "user", "content": "one?"}, {"role": "poet", "content": "two."}], "id": 2},
    {"messages": [], "id": 3},
    {"messages": [{"role": "system", "content": "be odd"}, *CHAT, *CHAT], "id": 4},
]


def parquet(path: Path, rows: list[dict[str, Any]], *, group: int = 2) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=group)
    return path


def read(*sources: str | Path) -> tuple[list[tuple[Message, ...]], list[tuple[int, Reason, str]]]:
    rejects: list[Reject] = []
    found = [conversation.messages for conversation in read_conversations(sources, on_reject=rejects.append)]
    return found, [(reject.line, reject.reason, reject.detail) for reject in rejects]


def test_a_parquet_file_reads_as_the_same_json_lines(write_lines: WriteLines, tmp_path: Path) -> None:
    found, rejects = read(parquet(tmp_path / "rows.parquet", ROWS))
    assert (found, rejects) == read(write_lines(*ROWS))
    assert [(line, reason) for line, reason, _ in rejects] == [(2, Reason.UNKNOWN_ROLE), (3, Reason.UNKNOWN_FORM)]
    assert found[0] == (USER, ANSWER)
    assert len(found[1]) == 5


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": [{"from": "human", "value": "one?"}, {"from": "gpt", "value": "two."}]},
        {"prompt": "one?", "response": "two.", "difficulty": 3},
        {"instruction": "one?", "input": "", "output": "two."},
        {"question": "one?", "answer": "two.", "image": b"\xff\x00"},
    ],
)
def test_forms(tmp_path: Path, row: dict[str, Any]) -> None:
    assert read(parquet(tmp_path / "rows.parquet", [row])) == ([(USER, ANSWER)], [])


def test_what_a_column_leaves_empty_is_not_there(tmp_path: Path) -> None:
    """Columns of structs have every field of any row: a call here, none there."""
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "sum"}}]}
    rows = [
        {"messages": CHAT, "prompt": None, "tools": None},
        {"messages": [USER.as_dict(), call], "prompt": None, "tools": [{"name": "sum", "strict": None}]},
        {"messages": None, "prompt": "one?", "tools": None},
    ]
    plain, called, asked = read_conversations([parquet(tmp_path / "rows.parquet", rows)])
    assert (plain.messages, plain.tools) == ((USER, ANSWER), ())
    assert all(not message.fields for message in plain.messages)
    assert called.tools == ({"name": "sum"},)
    assert called.messages[1].as_dict() == call | {"content": ""}
    assert asked.messages == (USER,)


def test_saved_data_sets(tmp_path: Path) -> None:
    data = Dataset.from_list(ROWS)
    data.save_to_disk(str(tmp_path / "one"))
    DatasetDict({"train": data}).save_to_disk(str(tmp_path / "single"))
    DatasetDict({"train": data, "test": data.select([0])}).save_to_disk(str(tmp_path / "several"))
    expected = read(parquet(tmp_path / "rows.parquet", ROWS))
    for place in ("one", "single", "several/train"):
        assert read(tmp_path / place) == expected
    assert read(tmp_path / "several" / "test") == ([(USER, ANSWER)], [])
    with pytest.raises(CorpusError, match=r"has the splits train, test \(name one of them: .*several/train\)"):
        open_sources([tmp_path / "several"])


def test_a_struct_of_lists_is_a_list_of_turns(tmp_path: Path) -> None:
    features = Features({"messages": Sequence({"role": Value("string"), "content": Value("string")})})
    data = Dataset.from_list([{"messages": {"role": ["user", "assistant"], "content": ["one?", None]}}], features=features)
    assert isinstance(data[0]["messages"], dict), "the case that this test is about"
    data.save_to_disk(str(tmp_path / "saved"))
    assert read(tmp_path / "saved")[0] == [(USER, Message("assistant", ""))]


def test_rows_are_documents_or_counted_rejects(write_lines: WriteLines, target: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"number {n}?", "response": "the lazy fox" if n % 7 else None} for n in range(40)]
    lines = [{key: value for key, value in row.items() if value is not None} for row in rows]
    seen: list[PrepareProgress] = []
    table = parquet(tmp_path / "rows.parquet", rows)
    meta = prepare([table, write_lines(*lines)], target, tmp_path / "both", None, seen.append)
    assert (meta.num_documents, meta.num_rows, meta.rejects) == (68, 80, {"no_assistant_turn": 12})
    store = CorpusStore.open(tmp_path / "both")
    places = [(Path(reject.source).name, reject.line) for reject in store.rejects()]
    assert places == [(name, n + 1) for name in ("rows.parquet", "rows.jsonl") for n in range(0, 40, 7)]
    assert store.origin(0) == (str(table), 2, ())
    assert seen[-1].bytes_read == seen[-1].bytes_total == table.stat().st_size + (tmp_path / "rows.jsonl").stat().st_size


def test_tables_that_cannot_be_read(tmp_path: Path) -> None:
    torn = parquet(tmp_path / "torn.parquet", ROWS)
    torn.write_bytes(torn.read_bytes()[:-40])
    (tmp_path / "folder").mkdir()
    for source, said in (
        (torn, "cannot be read"),
        (tmp_path / "absent.parquet", "No such file"),
        (tmp_path / "folder", r"did not save \(for a folder of Parquet files name the files"),
        (parquet(tmp_path / "other.parquet", [{"text": "a", "id": 1}]), "no column that holds conversations.*text, id"),
    ):
        with pytest.raises(CorpusError, match=said) as caught:
            open_sources([source])
        assert (caught.value.key, caught.value.value) == ("SRC", str(source))
    (tmp_path / "one.jsonl").write_text(json.dumps({"prompt": "one?"}) + "\n")
    nothing = pa.table({"prompt": pa.array([], type=pa.string())})
    pq.write_table(nothing, tmp_path / "nothing.parquet")
    assert read(tmp_path / "nothing.parquet", tmp_path / "one.jsonl") == ([(USER,)], [])


def test_hub_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's own loader is not called: what is asked of it, and what its answer becomes, is."""
    import datasets

    asked: list[tuple[Any, ...]] = []
    data = Dataset.from_list(ROWS)

    def load_dataset(name: str, config: str | None, *, split: str | None) -> Any:
        asked.append((name, config, split))
        return data if split else DatasetDict({"train": data, "test": data})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    found, rejects = read("hub:someone/chats:train[:10%]")
    assert (len(found), [line for line, _, _ in rejects]) == (2, [2, 3])
    read("hub:chats:main:test")
    with pytest.raises(CorpusError, match=r"has the splits train, test \(name one of them: hub:someone/chats:train\)"):
        read("hub:someone/chats")
    assert asked == [("someone/chats", None, "train[:10%]"), ("chats", "main", "test"), ("someone/chats", None, None)]
    with pytest.raises(CorpusError, match="is not written hub:NAME"):
        read("hub:")


def test_without_the_hub_a_data_set_that_is_not_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(CorpusError, match=r"hub:nobody/nothing.*cannot be read.*must be in the local cache"):
        read("hub:nobody/nothing:train")
