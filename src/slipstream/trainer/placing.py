"""Batches, masks and embedding rows of the uses to come, staged by the thread that prepares steps and sent by the loop.

N anchors, B block size, D hidden, U = N + 1 distinct rows of the embedding that a batch reads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from slipstream.drafter import embedding_rows
from slipstream.records import BlockBatch
from slipstream.trainer.lanes import Lanes
from slipstream.trainer.metadata import ArrayLayout, Arrays, MetadataRing, StagedArrays
from slipstream.trainer.prefetch import PreparedStep

EMBEDDING = "embedding.rows"


@dataclass(frozen=True, slots=True)
class Placed:
    """What one use computes on, on the device."""

    batch: BlockBatch
    embedding_VD: Tensor
    masks: Mapping[str, Any]


class StagedPlacing:
    """Brings the arrays of uses to the GPU through a `MetadataRing`, one copy a use.

    `mask_arrays(batch)` are the masks' arrays on the CPU, `masks_over(arrays, context_tokens=)` the masks over them on the
    device. An embedding in host memory (`is_remote`) sends the rows that a batch reads. `largest` is a batch with every slot
    supervised: no later one is longer in any array. `num_slots` is how many uses may be staged and not yet sent.
    """

    def __init__(
        self,
        lanes: Lanes,
        *,
        embedding_VD: Tensor,
        is_remote: bool,
        mask_arrays: Callable[[BlockBatch], Mapping[str, Tensor]],
        masks_over: Callable[..., Mapping[str, Any]],
        largest: BlockBatch,
        num_slots: int,
    ) -> None:
        self._embedding_VD, self._is_remote = embedding_VD, is_remote
        self._mask_arrays, self._masks_over = mask_arrays, masks_over
        self._ring = MetadataRing(lanes, layout=ArrayLayout.of(self._arrays(largest)), num_slots=num_slots)

    def stage(self, prepared: PreparedStep) -> PreparedStep:
        """The same step with its columns' arrays in host slots. In the thread that prepares; sleeps for a free slot."""
        columns = tuple(
            dataclasses.replace(column, staged=self._ring.stage(self._arrays(column.batch))) for column in prepared.columns
        )
        return dataclasses.replace(prepared, columns=columns)

    def wait_for_room(self, count: int) -> None:
        """Sleep until `count` more uses can be staged without waiting. In the thread that prepares."""
        self._ring.wait_for_room(count)

    def send(self, batch: BlockBatch, staged: StagedArrays) -> Placed:
        """A use on the device, until `used`; its scalars are those of the CPU's `batch`. Waits for nothing."""
        arrays = self._ring.send(staged)
        moved: dict[str, Any] = {name: arrays[name] for name in _tensor_fields(batch)}
        return Placed(
            batch=dataclasses.replace(batch, **moved),
            embedding_VD=arrays[EMBEDDING] if self._is_remote else self._embedding_VD,
            masks=self._masks_over(arrays, context_tokens=len(batch.context_positions_T)),
        )

    def used(self) -> None:
        """The backward pass of the use that was sent last has been launched."""
        self._ring.used()

    def _arrays(self, batch: BlockBatch) -> Arrays:
        masks = self._mask_arrays(batch)
        rows: dict[str, Tensor] = {}
        if self._is_remote:
            batch, rows[EMBEDDING] = embedding_rows(batch, self._embedding_VD)
        return {**{name: getattr(batch, name) for name in _tensor_fields(batch)}, **masks, **rows}


def _tensor_fields(batch: BlockBatch) -> list[str]:
    return [field.name for field in dataclasses.fields(batch) if isinstance(getattr(batch, field.name), Tensor)]
