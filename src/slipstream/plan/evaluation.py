"""Packs for measuring: every document, every one of its valid anchors exactly once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slipstream.errors import PlanError
from slipstream.plan.anchors import count_supervised, run_lengths, valid_anchors
from slipstream.plan.packing import pack_in_order
from slipstream.plan.rows import make_pack
from slipstream.records import Document, Int32Array, Pack, Use


def plan_validation(
    *, documents: Sequence[Document], pack_tokens: int, pack_anchors: int, block_size: int
) -> list[tuple[Pack, list[Use]]]:
    """Pack all documents and cover their anchors, `pack_anchors` in a use, ascending; the last may have some left empty.

    Pack ids count from 0, as do slots, which are kept, and the uses of a pack; all lie in column 0. A pack without any
    valid anchor has no use. Raises `PlanError` for a document that is longer than a pack.
    """
    lengths = np.array([len(document.token_ids) for document in documents], dtype=np.int64)
    if len(lengths) and lengths.max() > pack_tokens:
        longest = documents[int(lengths.argmax())]
        raise PlanError(
            key="plan.pack_tokens",
            value=pack_tokens,
            rule=f"validation document {longest.document_id} has {lengths.max()} tokens and must fit into one pack",
        )
    packed = pack_in_order(num_tokens=lengths, capacity_tokens=pack_tokens, window=max(1, len(documents)))
    planned: list[tuple[Pack, list[Use]]] = []
    for number in range(packed.num_packs):
        chosen = [documents[place] for place in packed.document_ids[packed.starts[number] : packed.starts[number + 1]]]
        pack = make_pack(documents=chosen, pack_id=number, epoch=0, column=0, slot=number, pack_tokens=pack_tokens)
        anchors = valid_anchors(pack.loss_mask, starts=pack.starts)
        planned.append((pack, cover_rows(anchors, pack=pack, pack_anchors=pack_anchors, block_size=block_size)))
    return planned


def cover_rows(rows: Int32Array, *, pack: Pack, pack_anchors: int, block_size: int) -> list[Use]:
    """Uses of `pack_anchors` anchors each, at those rows of a pack, in their order."""
    runs = run_lengths(pack.loss_mask, anchors=rows, block_size=block_size, starts=pack.starts)
    uses: list[Use] = []
    for begin in range(0, len(rows), pack_anchors):
        part = rows[begin : begin + pack_anchors]
        padded = np.zeros(pack_anchors, dtype=np.int32)
        padded[: len(part)] = part
        uses.append(
            Use(
                step=0,
                pack_id=pack.pack_id,
                use_number=len(uses),
                anchors=padded,
                anchor_valid=np.arange(pack_anchors) < len(part),
                supervised_per_slot=count_supervised(runs[begin : begin + pack_anchors], block_size=block_size),
                is_last=begin + pack_anchors >= len(rows),
            )
        )
    return uses
