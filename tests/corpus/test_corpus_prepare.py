"""From files to a store: every row is a document or a counted reject, and options and target show in the fingerprint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.corpus.chat import ChatEncoder
from slipstream.corpus.conversation import ConversationRefused, Reason
from slipstream.corpus.prepare import BATCH_CONVERSATIONS, PrepareOptions, PrepareProgress, prepare
from slipstream.corpus.sources import read_conversations
from slipstream.corpus.store import CorpusStore
from slipstream.errors import CorpusError

WriteLines = Callable[..., Path]
GOOD = {"prompt": "seven dogs?", "response": "the lazy fox"}


def test_documents_are_the_encoded_rows_in_order(write_lines: WriteLines, target: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"number {n}?", "response": f"answers {n} " * (n % 5 + 1)} for n in range(2 * BATCH_CONVERSATIONS + 3)]
    paths = [write_lines(*rows[:200], name="a.jsonl"), write_lines(*rows[200:], name="b.jsonl")]
    meta = prepare(paths, target, tmp_path / "corpus")
    store, encoder = CorpusStore.open(tmp_path / "corpus"), ChatEncoder(target)
    assert meta.num_documents == store.num_documents == len(rows)
    assert meta.rejects == meta.warnings == {}
    for place, conversation in enumerate(read_conversations(paths)):
        ids, mask = encoder.encode(conversation)
        document = store.document(place)
        assert np.array_equal(document.token_ids, ids)
        assert np.array_equal(document.loss_mask, mask)
        assert store.origin(place) == (conversation.source, conversation.line, ())


def test_truncation_keeps_the_start_and_is_counted(write_lines: WriteLines, target: Path, tmp_path: Path) -> None:
    path = write_lines(GOOD, {"prompt": "seven dogs?", "response": "the lazy fox " * 50})
    ids, mask = list(map(ChatEncoder(target).encode, read_conversations([path])))[1]
    first = int(np.argmax(mask))
    for limit in (first + 2, first + 20):
        meta = prepare([path], target, tmp_path / f"to{limit}", PrepareOptions(max_tokens=limit))
        document = CorpusStore.open(tmp_path / f"to{limit}").document(1)
        assert np.array_equal(document.token_ids, ids[:limit])
        assert document.loss_mask.sum() == limit - first
        assert (meta.max_tokens, meta.options["max_tokens"]) == (limit, limit)
        assert meta.warnings["truncated"] >= 1


def test_a_prompt_that_leaves_nothing_supervised_is_refused(write_lines: WriteLines, target: Path, tmp_path: Path) -> None:
    path = write_lines({"prompt": "seven dogs?", "response": "the lazy fox"}, {"prompt": "", "response": "the lazy fox"})
    first = int(np.argmax(ChatEncoder(target).encode(next(read_conversations([path])))[1]))
    meta = prepare([path], target, tmp_path / "corpus", PrepareOptions(max_tokens=first + 1))
    assert (meta.num_documents, meta.rejects) == (1, {"prompt_too_long": 1})


def test_every_reject_is_counted_by_reason_and_kept_with_its_line(
    write_lines: WriteLines, target: Path, tmp_path: Path
) -> None:
    rows: list[tuple[Any, Reason | None]] = [
        (GOOD, None),
        ('{"prompt": ', Reason.MALFORMED_JSON),
        ({"prompt": "seven dogs?"}, Reason.NO_ASSISTANT_TURN),
        ({"prompt": "seven dogs?", "response": " "}, Reason.EMPTY_ANSWER),
        ({"messages": [{"role": "poet", "content": "o"}]}, Reason.UNKNOWN_ROLE),
        ({"text": "o"}, Reason.UNKNOWN_FORM),
        ({"prompt": "what is <mask>?", "response": "nothing"}, Reason.CONTAINS_MASK_TOKEN),
        ({"prompt": "a", "answer_token_ids": [9, 3, 9]}, Reason.CONTAINS_MASK_TOKEN),
        ({"prompt": "a", "answer_token_ids": [2]}, Reason.TOO_FEW_SUPERVISED),
        ({"prompt": "a", "answer_token_ids": [9, 8, 2]}, None),
    ]
    path = write_lines(*[row for row, _ in rows])
    meta = prepare([path], target, tmp_path / "corpus", PrepareOptions(mask_token_id=3))
    expected = [(place, reason) for place, (_, reason) in enumerate(rows, start=1) if reason is not None]
    store = CorpusStore.open(tmp_path / "corpus")
    assert sorted((reject.line, reject.reason) for reject in store.rejects()) == expected
    assert all(reject.source == str(path) and reject.detail for reject in store.rejects())
    reasons = [reason for _, reason in expected]
    assert meta.rejects == {str(reason): reasons.count(reason) for reason in reasons}
    assert (meta.num_documents, meta.num_rows) == (2, len(rows))
    assert not meta.contains_token(3)
    assert meta.contains_token(2)


def test_given_answer_ids_are_the_document(write_lines: WriteLines, target: Path, tmp_path: Path) -> None:
    path = write_lines({"messages": [{"role": "user", "content": "seven dogs?"}], "answer_token_ids": [300, 9, 300, 2]})
    prepare([path], target, tmp_path / "corpus")
    document = CorpusStore.open(tmp_path / "corpus").document(0)
    prompt = ChatEncoder(target).encode_prompt(next(read_conversations([path])).messages)
    assert document.token_ids.tolist() == [*prompt, 300, 9, 300, 2]
    assert document.loss_mask.tolist() == [False] * len(prompt) + [True] * 4


@pytest.mark.parametrize("row", ['{"prompt": ', {"prompt": "seven dogs?"}, {"prompt": "a", "answer_token_ids": [2]}])
def test_strict_stops_at_the_first_reject_and_names_it(write_lines: WriteLines, target: Path, tmp_path: Path, row: Any) -> None:
    path = write_lines(GOOD, row)
    with pytest.raises(ConversationRefused, match=r"rows\.jsonl:2"):
        prepare([path], target, tmp_path / "corpus", PrepareOptions(strict=True))
    assert [file.name for file in tmp_path.iterdir()] == ["rows.jsonl"]


def test_a_corpus_without_documents_is_refused_with_the_reasons(write_lines: WriteLines, target: Path, tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="2 malformed_json, 1 no_assistant_turn"):
        prepare([write_lines("{", {"prompt": "a"}, "}")], target, tmp_path / "corpus")
    with pytest.raises(CorpusError, match="no rows at all"):
        prepare([write_lines("")], target, tmp_path / "corpus")
    assert not (tmp_path / "corpus").exists()


def test_max_tokens_must_fit_the_target(write_lines: WriteLines, target: Path, tmp_path: Path) -> None:
    for limit in (1, 513):
        with pytest.raises(CorpusError, match="from 2 to the target's longest sequence, 512"):
            prepare([write_lines(GOOD)], target, tmp_path / "corpus", PrepareOptions(max_tokens=limit))
    assert prepare([write_lines(GOOD)], target, tmp_path / "corpus").options["max_tokens"] == 512


def test_the_fingerprint_follows_template_tokenizer_and_options(
    write_lines: WriteLines, make_target: Callable[..., Path], target: Path, tmp_path: Path
) -> None:
    path, prints = write_lines(GOOD), []

    def made(folder: Path, **options: Any) -> str:
        prints.append(prepare([path], folder, tmp_path / f"c{len(prints)}", PrepareOptions(**options)).fingerprint)
        return prints[-1]

    plain = made(target)
    assert made(target) == plain
    assert made(make_target()) == plain
    template = (target / "chat_template.jinja").read_text()
    others = [
        made(target, max_tokens=100),
        made(target, mask_token_id=3),
        made(target, template_arguments={"enable_thinking": False}),
        made(make_target(template=template + "{# the same text, another template #}")),
        made(make_target(eos=0)),
    ]
    assert len({plain, *others}) == 6


def test_progress_rises_to_the_end(write_lines: WriteLines, target: Path, tmp_path: Path) -> None:
    seen: list[PrepareProgress] = []
    path = write_lines(*[GOOD] * (BATCH_CONVERSATIONS + 1), "{")
    prepare([path], target, tmp_path / "corpus", None, seen.append)
    size = path.stat().st_size
    assert seen[-1] == PrepareProgress(size, size, BATCH_CONVERSATIONS + 1, 1)
    assert seen[0].num_documents == BATCH_CONVERSATIONS
    assert [step.bytes_read for step in seen] == sorted(step.bytes_read for step in seen)
