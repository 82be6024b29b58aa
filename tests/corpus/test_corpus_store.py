"""A store gives back what went in, and any damage is found and named when it is opened."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.corpus.conversation import Reason, Reject
from slipstream.corpus.meta import CorpusMeta, check_sizes, read_meta, template_fingerprint, tokenizer_fingerprint
from slipstream.corpus.store import CorpusStore, StoreWriter, _Chunk, count_anchors, write_store
from slipstream.errors import CorpusError

DRAFT = CorpusMeta(target="somewhere", tokenizer_fingerprint="t", template_fingerprint="c", options={"max_tokens": 64})


def some_documents(count: int, *, seed: int = 0) -> list[dict[str, Any]]:
    draw = np.random.default_rng(seed)
    lengths = draw.integers(1, 60, count)
    return [
        {
            "token_ids": draw.integers(0, 900, n).astype(np.int32),
            "loss_mask": draw.random(n) < 0.6,
            "source": "s",
            "line": i + 1,
        }
        for i, n in enumerate(lengths)
    ]


def test_documents_come_back_in_order_over_several_batches_and_shards(tmp_path: Path) -> None:
    documents = some_documents(1500)
    with StoreWriter(tmp_path / "corpus", shard_bytes=1) as writer:
        ids = [writer.add(**document, remarks=["truncated"] if place == 7 else []) for place, document in enumerate(documents)]
        writer.reject(Reject("s", 9, Reason.EMPTY_ANSWER, "nothing"))
        meta = writer.finish(DRAFT)
    assert ids == list(range(1500))
    assert sum(name.endswith(".arrow") for name in meta.files) == 3
    store = CorpusStore.open(tmp_path / "corpus")
    assert store.meta == meta == read_meta(tmp_path / "corpus")
    assert store.num_documents == 1500
    for place, document in enumerate(documents):
        got = store.document(place)
        assert got.document_id == place
        assert got.token_ids.dtype == np.int32
        assert got.loss_mask.dtype == np.bool_
        assert np.array_equal(got.token_ids, document["token_ids"])
        assert np.array_equal(got.loss_mask, document["loss_mask"])
        assert store.num_tokens[place] == len(got.token_ids)
        assert store.num_supervised[place] == got.loss_mask.sum()
        assert store.num_anchors[place] == count_anchors(got.loss_mask)
    assert store.num_tokens.dtype == store.num_anchors.dtype == np.int32
    assert store.origin(7) == ("s", 8, ("truncated",))
    assert store.rejects() == [Reject("s", 9, Reason.EMPTY_ANSWER, "nothing")]


def test_documents_of_a_part_of_an_arrow_file() -> None:
    documents = some_documents(40)
    columns = [pa.array([document[name].tolist() for document in documents]) for name in ("token_ids", "loss_mask")]
    columns[0] = columns[0].cast(pa.list_(pa.int32()))
    for start, count in ((0, 40), (13, 9), (39, 1)):
        token_ids, loss_mask = (column.slice(start, count) for column in columns)
        chunk = _Chunk.over(token_ids, loss_mask)
        for row in range(len(token_ids)):
            ids, mask = chunk.document(row)
            assert ids.tolist() == token_ids[row].as_py()
            assert mask.tolist() == loss_mask[row].as_py()
            assert (ids.dtype, mask.dtype) == (np.int32, np.bool_)


def test_meta_counts_what_is_there(tmp_path: Path) -> None:
    documents = some_documents(20)
    meta = write_store(tmp_path / "corpus", documents, DRAFT)
    assert (meta.num_documents, meta.num_rows) == (20, 20)
    assert meta.num_tokens == sum(len(document["token_ids"]) for document in documents)
    assert meta.max_tokens == max(len(document["token_ids"]) for document in documents)
    assert meta.num_supervised == sum(document["loss_mask"].sum() for document in documents)
    assert meta.num_anchors == sum(count_anchors(document["loss_mask"]) for document in documents)
    used = set(np.concatenate([document["token_ids"] for document in documents]).tolist())
    assert {token for token in range(2000) if read_meta(tmp_path / "corpus").contains_token(token)} == used


@given(st.lists(st.booleans(), min_size=1, max_size=40))
def test_anchors_are_supervised_positions_whose_next_is_supervised(mask: list[bool]) -> None:
    expected = sum(mask[place] and mask[place + 1] for place in range(len(mask) - 1))
    assert count_anchors(np.asarray(mask)) == expected


def test_the_datasets_library_reads_it(tmp_path: Path) -> None:
    from datasets import load_from_disk

    documents = some_documents(5)
    write_store(tmp_path / "corpus", documents, DRAFT)
    rows = load_from_disk(str(tmp_path / "corpus"))
    assert [row["token_ids"] for row in rows] == [document["token_ids"].tolist() for document in documents]


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    write_store(tmp_path / "corpus", some_documents(30), DRAFT)
    return tmp_path / "corpus"


def flip_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def lengthen(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0")


FILES = ("data-00000.arrow", "state.json", "dataset_info.json", "rejects.jsonl")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    ("damage", "rule"),
    [(flip_byte, "damaged"), (truncate, "truncated"), (lengthen, "too long"), (Path.unlink, "missing")],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, damage: Callable[[Path], None], rule: str) -> None:
    with StoreWriter(tmp_path / "corpus") as writer:
        for document in some_documents(30):
            writer.add(**document)
        writer.reject(Reject("s", 1, Reason.NOT_TEXT, "?"))
        writer.finish(DRAFT)
    damage(tmp_path / "corpus" / name)
    with pytest.raises(CorpusError, match=rule) as caught:
        CorpusStore.open(tmp_path / "corpus")
    assert name in str(caught.value)


@pytest.mark.parametrize(("damage", "rule"), [(flip_byte, "damaged|cannot be read"), (Path.unlink, "has no meta.json")])
def test_a_damaged_meta_is_named(stored: Path, damage: Callable[[Path], None], rule: str) -> None:
    damage(stored / "meta.json")
    with pytest.raises(CorpusError, match=rule) as caught:
        CorpusStore.open(stored)
    assert "corpus" in str(caught.value)


def test_meta_cut_short_or_with_another_count_is_damaged(stored: Path) -> None:
    whole = (stored / "meta.json").read_text()
    for text in (whole[: len(whole) // 2], whole.replace('"num_documents": 30', '"num_documents": 31'), "[]"):
        assert text != whole
        (stored / "meta.json").write_text(text)
        with pytest.raises(CorpusError, match=r"meta\.json"):
            read_meta(stored)


def test_sizes_alone_find_what_is_missing_or_truncated(stored: Path) -> None:
    meta = read_meta(stored)
    check_sizes(folder=stored, meta=meta)
    truncate(stored / "data-00000.arrow")
    with pytest.raises(CorpusError, match=r"data-00000\.arrow.*truncated"):
        check_sizes(folder=stored, meta=meta)


def test_nothing_is_left_behind_by_a_failure(tmp_path: Path) -> None:
    def documents() -> Any:
        yield from some_documents(600)
        raise RuntimeError("pulled plug")

    with pytest.raises(RuntimeError, match="pulled plug"):
        write_store(tmp_path / "corpus", documents(), DRAFT)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_taken_is_not_touched(stored: Path, tmp_path: Path) -> None:
    before = read_meta(stored)
    with pytest.raises(CorpusError, match="already a corpus"):
        write_store(stored, some_documents(3), DRAFT)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine")
    with pytest.raises(CorpusError, match="is no corpus"):
        StoreWriter(tmp_path / "other", overwrite=True)
    assert read_meta(stored) == before
    with StoreWriter(stored, overwrite=True) as writer:
        writer.add(token_ids=[1, 2], loss_mask=[True, True])
        assert CorpusStore.open(stored).num_documents == 30
        writer.finish(DRAFT)
    assert CorpusStore.open(stored).num_documents == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "other"]


@pytest.mark.parametrize(("ids", "mask"), [([], []), ([1, 2], [True]), ([-1], [True]), ([[1]], [[True]])])
def test_a_document_that_is_none_is_refused(tmp_path: Path, ids: list[Any], mask: list[Any]) -> None:
    with pytest.raises(CorpusError), StoreWriter(tmp_path / "corpus") as writer:
        writer.add(token_ids=ids, loss_mask=mask)


@given(seed=st.integers(0, 1000), place=st.integers(0, 9))
@settings(max_examples=20, deadline=None)
def test_the_fingerprint_follows_the_content(tmp_path_factory: pytest.TempPathFactory, seed: int, place: int) -> None:
    root = tmp_path_factory.mktemp("prints")
    documents = some_documents(10, seed=seed)
    same = write_store(root / "a", documents, DRAFT).fingerprint
    assert write_store(root / "b", [{**row, "source": "elsewhere"} for row in documents], DRAFT).fingerprint == same
    flipped = documents[place]["loss_mask"].copy()
    flipped[0] ^= True
    changed = [*documents[:place], {**documents[place], "loss_mask": flipped}, *documents[place + 1 :]]
    assert write_store(root / "c", changed, DRAFT).fingerprint != same


def test_the_fingerprint_knows_where_documents_end(tmp_path: Path) -> None:
    def store(name: str, *lengths: int) -> str:
        rows = [{"token_ids": [5] * length, "loss_mask": [True] * length} for length in lengths]
        return write_store(tmp_path / name, rows, DRAFT).fingerprint

    assert store("a", 8, 16) != store("b", 16, 8) != store("c", 24)


def test_meta_is_read_without_heavy_libraries(stored: Path) -> None:
    code = (
        "import sys; from slipstream.corpus.meta import read_meta, tokenizer_fingerprint; "
        f"read_meta({str(stored)!r}); print(sorted({{'torch', 'transformers', 'datasets', 'numpy'}} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_fingerprints_of_a_target_follow_its_files(make_target: Callable[..., Path]) -> None:
    folder, twin = make_target(), make_target()
    assert tokenizer_fingerprint(folder) == tokenizer_fingerprint(twin)
    assert template_fingerprint(folder) == template_fingerprint(twin)
    tokenizer, template = tokenizer_fingerprint(folder), template_fingerprint(folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert (tokenizer_fingerprint(folder), template_fingerprint(folder) == template) == (tokenizer, False)
    config = folder / "tokenizer_config.json"
    config.write_text(config.read_text().replace("<|im_end|>", "<|endoftext|>"))
    assert tokenizer_fingerprint(folder) != tokenizer
    flip_byte(twin / "tokenizer.json")
    assert tokenizer_fingerprint(twin) != tokenizer
    (twin / "tokenizer.json").unlink()
    with pytest.raises(CorpusError, match=r"tokenizer\.json"):
        tokenizer_fingerprint(twin)


def test_a_template_in_the_tokenizer_config_counts(make_target: Callable[..., Path]) -> None:
    folder = make_target()
    (folder / "chat_template.jinja").unlink()
    without = template_fingerprint(folder)
    config = folder / "tokenizer_config.json"
    config.write_text(config.read_text().replace("{", '{"chat_template": "{{ messages }}", ', 1))
    assert template_fingerprint(folder) != without
