"""Validation packs cover every anchor of every document exactly once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_corpora import corpora, make_corpus

from slipstream.errors import PlanError
from slipstream.plan import plan_validation
from slipstream.plan.anchors import valid_anchors


@settings(max_examples=60)
@given(corpus=corpora(longest=128), pack_anchors=st.integers(1, 64))
def test_every_anchor_is_covered_exactly_once(corpus, pack_anchors):
    planned = plan_validation(documents=corpus.documents, pack_tokens=128, pack_anchors=pack_anchors, block_size=5)
    covered = {document.document_id: [] for document in corpus.documents}
    packed = []
    for number, (pack, uses) in enumerate(planned):
        assert (pack.pack_id, pack.slot, pack.capacity_tokens) == (number, number, 128)
        packed += pack.document_ids.tolist()
        owner = pack.document_of_token()
        assert [use.use_number for use in uses] == list(range(len(uses)))
        assert [use.is_last for use in uses] == [False] * (len(uses) - 1) + [True] * bool(uses)
        for use in uses:
            anchors = use.anchors[use.anchor_valid]
            assert len(use.anchors) == pack_anchors
            assert len(anchors) >= 1
            assert use.supervised_per_slot[1] == len(anchors)
            for anchor in anchors:
                covered[int(pack.document_ids[owner[anchor]])].append(int(pack.position_ids[anchor]))
    assert sorted(packed) == [document.document_id for document in corpus.documents]
    for document in corpus.documents:
        assert covered[document.document_id] == valid_anchors(document.loss_mask).tolist()


def test_counts_are_those_of_the_anchors_in_the_use():
    corpus = make_corpus(lengths=[6], supervised=1.0)
    ((_, uses),) = plan_validation(documents=corpus.documents, pack_tokens=128, pack_anchors=3, block_size=4)
    assert [use.anchors.tolist() for use in uses] == [[0, 1, 2], [3, 4, 0]]
    assert [use.supervised_per_slot.tolist() for use in uses] == [[0, 3, 3, 3], [0, 2, 1, 0]]
    assert uses[1].anchor_valid.tolist() == [True, True, False]


def test_nothing_is_planned_for_nothing_and_too_long_is_refused():
    assert plan_validation(documents=[], pack_tokens=128, pack_anchors=8, block_size=4) == []
    long = make_corpus(lengths=[20, 129])
    with pytest.raises(PlanError, match=r"plan.pack_tokens = 128: validation document 1 has 129 tokens"):
        plan_validation(documents=long.documents, pack_tokens=128, pack_anchors=8, block_size=4)
    assert np.array_equal(long.documents[1].token_ids, long.document(1).token_ids)
