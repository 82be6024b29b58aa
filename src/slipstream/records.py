"""The records that cross from one stage to the next, and nothing else.

Every arrow of the flow carries one of these. They are frozen; arrays inside them must not be written to after the
record is made. Shapes are checked once, where a record is made (`check()`), never in the loops.

Shape letters: T context tokens of a pack · N anchors · B block size · K tapped layers · D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Document:
    """One tokenised conversation. Flows from corpus to plan.

    `token_ids` int32 `[L]`; `loss_mask` bool `[L]`, true on the tokens that the assistant itself generated.
    """

    document_id: int
    token_ids: Int32Array
    loss_mask: BoolArray


@dataclass(frozen=True, slots=True)
class Pack:
    """`T` context tokens: whole documents one after another, then padding. Flows from plan to target and drafter.

    `starts` int32 `[M + 1]`: the first token of each of the M documents, then the number of real tokens; what lies from
    `starts[M]` to T is padding and counts as one more document (`cu_seqlens`). `token_ids` int32 `[T]` (0 on padding);
    `position_ids` int32 `[T]`, local to each document (and to the padding); `loss_mask` bool `[T]`, false on padding.
    `slot` is the planned slot of the pack's column, `column` its place in every step that uses it.
    """

    pack_id: int
    epoch: int
    column: int
    slot: int
    document_ids: Int64Array
    starts: Int32Array
    token_ids: Int32Array
    position_ids: Int32Array
    loss_mask: BoolArray

    @property
    def num_documents(self) -> int:
        """M, the number of real documents."""
        return len(self.document_ids)

    @property
    def num_tokens(self) -> int:
        """Real context tokens, padding left out."""
        return int(self.starts[-1])

    @property
    def capacity_tokens(self) -> int:
        """T, padding included."""
        return len(self.token_ids)

    def cu_seqlens(self) -> Int32Array:
        """Boundaries int32 of all documents, the padding being the last one when there is any; always ends at T."""
        if self.num_tokens == self.capacity_tokens:
            return self.starts
        return np.append(self.starts, np.int32(self.capacity_tokens))

    def document_of_token(self) -> Int32Array:
        """Index int32 `[T]` of each token's document in this pack; padding has index M."""
        lengths: Int32Array = np.diff(np.append(self.starts, np.int32(self.capacity_tokens))).astype(np.int32)
        return np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)


@dataclass(frozen=True, slots=True)
class Use:
    """One training use of a pack, with its own anchors. Flows from plan to drafter.

    `anchors` int32 `[N]`: positions in the pack's row, ascending over the valid ones; slots that no document could fill
    hold 0 and come last. `anchor_valid` bool `[N]`. `supervised_per_slot` int64 `[B]`: how many anchors supervise slot
    k, entry 0 always 0. `use_number` counts from 0; `is_last` frees the slot.
    """

    step: int
    pack_id: int
    use_number: int
    anchors: Int32Array
    anchor_valid: BoolArray
    supervised_per_slot: Int64Array
    is_last: bool


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step: exactly one use per column. Flows from plan to trainer.

    `supervised_per_slot` int64 `[B]` is summed over all columns of all ranks: the global denominator, known beforehand.
    """

    index: int
    epoch: int
    uses: tuple[Use, ...]
    supervised_per_slot: Int64Array


@dataclass(frozen=True, slots=True)
class HiddenPack:
    """A pack's hidden states in a slot. Flows from target through transport to drafter.

    `hidden_TKD` in the slot's dtype; `last_hidden_TD` only when the objective needs it. `scale_TK` fp32 only where the slot
    is e4m3: states are the products of both, which `transport.widened` makes before a drafter sees them. `seal` is the
    checksum of the bytes bound to pack, slot and generation; `generation` rises each time the same pack is issued again.
    """

    pack_id: int
    slot: int
    generation: int
    hidden_TKD: torch.Tensor
    last_hidden_TD: torch.Tensor | None
    seal: int
    target_fingerprint: str
    scale_TK: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class BlockBatch:
    """What the drafter computes on for one use. Built on the CPU from `Pack` and `Use`.

    `context_positions_T`, `context_document_T` (index of the document, padding last); `anchors_N` (row positions),
    `anchor_start_N` (first row position of the anchor's document), `anchor_valid_N`; `block_token_ids_NB` int64 (anchor
    token, then mask tokens); `positions_NB` int64, local to the document; `labels_NB` int64, 0 where not supervised;
    `supervised_NB` bool, column 0 always false, always a prefix of slots 1 to B - 1; `rows_M` int64: the flat indices
    n * B + k of the supervised slots, ascending, padded with 0 (a row that is never supervised) to a multiple of the
    chunk; `num_rows` how many of them are real.
    """

    pack_id: int
    use_number: int
    step: int
    context_positions_T: torch.Tensor
    context_document_T: torch.Tensor
    anchors_N: torch.Tensor
    anchor_start_N: torch.Tensor
    anchor_valid_N: torch.Tensor
    block_token_ids_NB: torch.Tensor
    positions_NB: torch.Tensor
    labels_NB: torch.Tensor
    supervised_NB: torch.Tensor
    rows_M: torch.Tensor
    num_rows: int


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step computed, still on the device. Flows from trainer to observe.

    All tensors fp32 scalars except the two `[B]` vectors, and summed over all ranks: they travel behind the gradient, in
    its reduction. `loss_sum` over `weight_sum` is the loss. `hits_per_slot` counts argmax = label, `supervised_per_slot`
    its denominator. `accepted_sum` is the sum over valid anchors of the length of the leading run of hits. `finite` (bool)
    tells whether the update was made; `context_tokens` counts real tokens trained on, `unique_tokens` those in their first
    use; `stop` is how many ranks asked to stop.
    """

    step: int
    loss_sum: torch.Tensor
    weight_sum: torch.Tensor
    hits_per_slot: torch.Tensor
    supervised_per_slot: torch.Tensor
    accepted_sum: torch.Tensor
    anchors: torch.Tensor
    gradient_norm: torch.Tensor
    finite: torch.Tensor
    bad_rows: torch.Tensor
    context_tokens: torch.Tensor
    unique_tokens: torch.Tensor
    stop: torch.Tensor
    learning_rate: float


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where a run stands: the next step to train, in the plan of that digest. Flows from trainer to checkpoint."""

    step: int
    plan_digest: str
