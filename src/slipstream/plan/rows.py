"""Documents laid out in a row of T tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slipstream.records import Document, Pack


def make_pack(*, documents: Sequence[Document], pack_id: int, epoch: int, column: int, slot: int, pack_tokens: int) -> Pack:
    """The pack of these documents, one after another, then padding: token 0, positions of its own, no loss."""
    starts = np.cumsum([0, *(len(document.token_ids) for document in documents)]).astype(np.int32)
    used = int(starts[-1])
    assert used <= pack_tokens, f"{used} tokens do not fit into {pack_tokens}"
    token_ids = np.zeros(pack_tokens, dtype=np.int32)
    loss_mask = np.zeros(pack_tokens, dtype=np.bool_)
    if documents:
        token_ids[:used] = np.concatenate([document.token_ids for document in documents])
        loss_mask[:used] = np.concatenate([document.loss_mask for document in documents])
    lengths = np.diff(np.append(starts, pack_tokens))
    return Pack(
        pack_id=pack_id,
        epoch=epoch,
        column=column,
        slot=slot,
        document_ids=np.array([document.document_id for document in documents], dtype=np.int64),
        starts=starts,
        token_ids=token_ids,
        position_ids=(np.arange(pack_tokens) - np.repeat(starts, lengths)).astype(np.int32),
        loss_mask=loss_mask,
    )
