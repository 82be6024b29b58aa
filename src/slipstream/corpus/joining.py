"""One document of several rows: each turn of a conversation that was answered in token ids is a row, and repeats those before.

Where the next turn's prompt repeats an answer token by token, the longer row says all that the shorter one does, and one
document trains on both answers for one forward pass. Templates that rewrite earlier answers (drop thoughts) leave rows apart.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from slipstream.corpus.chat import Encoded
from slipstream.corpus.conversation import Conversation


@dataclass(frozen=True, slots=True)
class Turn:
    """A row in tokens, and where it came from."""

    conversation: Conversation
    encoded: Encoded


def joined(earlier: Turn, later: Turn) -> Turn | None:
    """The later turn with the earlier one's answer supervised too; none if it does not repeat its messages and tokens."""
    before, after = earlier.conversation, later.conversation
    if before.answer_token_ids is None or after.answer_token_ids is None:
        return None
    count, length = len(before.messages), len(earlier.encoded.token_ids)
    if after.messages[:count] != before.messages or [message.role for message in after.messages[count:][:1]] != ["assistant"]:
        return None
    if before.tools != after.tools or not np.array_equal(later.encoded.token_ids[:length], earlier.encoded.token_ids):
        return None
    mask = later.encoded.loss_mask.copy()
    mask[:length] |= earlier.encoded.loss_mask
    remarks = tuple(dict.fromkeys((*earlier.encoded.remarks, *later.encoded.remarks)))
    return replace(later, encoded=replace(later.encoded, loss_mask=mask, remarks=remarks))
