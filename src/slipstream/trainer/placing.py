"""Batches, masks and embedding rows of the uses to come, staged by the thread that prepares steps and sent by the loop.

N anchors, B block size, D hidden, U = N + 1 distinct rows of the embedding that a batch reads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from slipstream.drafter import embedding_rows
from slipstream.records import BlockBatch
from slipstream.trainer.lanes import Lanes
from slipstream.trainer.metadata import ArrayLayout, Arrays, HostArrays, MetadataRing, StagedArrays
from slipstream.trainer.prefetch import PreparedColumn, PreparedStep

EMBEDDING = "embedding.rows"
NUMBERS = "numbers"


@dataclass(frozen=True, slots=True)
class Placed:
    """What one use computes on, on the device. `seed` is the gradient of the loss's sum, where it travels with the use."""

    batch: BlockBatch
    embedding_VD: Tensor
    masks: Mapping[str, Any]
    seed: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Settled:
    """A place for one use after another, for work that keeps its addresses: `arrays` and `numbers` are views of `memory`.

    All arrays have their full lengths; rows of the loss that a use has not are padding. Of `batch`, what is one use's alone
    is void. `numbers` fp32 `[3]`: one over the step's denominator, which is the gradient of the loss's sum; context tokens;
    unique tokens.
    """

    memory: Tensor
    arrays: Arrays
    batch: BlockBatch
    numbers: Tensor


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
        mask_arrays: Callable[[BlockBatch], HostArrays],
        masks_over: Callable[..., Mapping[str, Any]],
        largest: BlockBatch,
        num_slots: int,
    ) -> None:
        self._embedding_VD, self._is_remote = embedding_VD, is_remote
        self._mask_arrays, self._masks_over = mask_arrays, masks_over
        self._lanes, self._largest = lanes, largest
        self._layout = ArrayLayout.of(self._arrays(largest, numbers=(0.0, 0, 0)))
        self._ring = MetadataRing(lanes, layout=self._layout, num_slots=num_slots)

    def stage(self, prepared: PreparedStep) -> PreparedStep:
        """The same step with its columns' arrays in host slots. In the thread that prepares; sleeps for a free slot."""
        columns = tuple(self._stage(column, denominator=prepared.denominator) for column in prepared.columns)
        return dataclasses.replace(prepared, columns=columns)

    def wait_for_room(self, count: int) -> None:
        """Sleep until `count` more uses can be staged without waiting. In the thread that prepares."""
        self._ring.wait_for_room(count)

    def _stage(self, column: PreparedColumn, *, denominator: float) -> PreparedColumn:
        # as on a CPU, where the backward of a division divides in fp32; on CUDA that may round otherwise
        seed = float(np.float32(1) / np.float32(denominator))
        arrays = self._arrays(column.batch, numbers=(seed, column.context_tokens, column.unique_tokens))
        return dataclasses.replace(column, staged=self._ring.stage(arrays))

    def send(self, batch: BlockBatch, staged: StagedArrays) -> Placed:
        """A use on the device, until `used`; its scalars are those of the CPU's `batch`. Waits for nothing."""
        return self._placed(batch, self._ring.send(staged))

    def used(self) -> None:
        """The backward pass of the use that was sent last has been launched."""
        self._ring.used()

    def settle(self) -> Settled:
        """A place that stays, in device memory of its own."""
        memory = self._lanes.buffer(self._layout.nbytes)
        memory.zero_()
        arrays = self._layout.whole(memory)
        batch = dataclasses.replace(self._largest, num_rows=len(arrays["rows_M"]))
        return Settled(memory=memory, arrays=arrays, batch=batch, numbers=arrays[NUMBERS])

    def placed(self, settled: Settled) -> Placed:
        """The use that is in a place. To be asked for with each pass: some masks are computed from the arrays."""
        return self._placed(settled.batch, settled.arrays)

    def send_to(self, settled: Settled, staged: StagedArrays) -> None:
        """A use to a place that stays, behind what was launched on its predecessor. Waits for nothing."""
        self._ring.send_to(settled.memory, staged)

    def _placed(self, batch: BlockBatch, arrays: Arrays) -> Placed:
        moved: dict[str, Any] = {name: arrays[name] for name in _tensor_fields(batch)}
        return Placed(
            batch=dataclasses.replace(batch, **moved),
            embedding_VD=arrays[EMBEDDING] if self._is_remote else self._embedding_VD,
            masks=self._masks_over(arrays, context_tokens=len(batch.context_positions_T)),
            seed=arrays[NUMBERS][0],
        )

    def _arrays(self, batch: BlockBatch, *, numbers: tuple[float, int, int]) -> HostArrays:
        masks = self._mask_arrays(batch)
        rows: dict[str, Tensor] = {}
        if self._is_remote:
            batch, rows[EMBEDDING] = embedding_rows(batch, self._embedding_VD)
        fields = {name: getattr(batch, name) for name in _tensor_fields(batch)}
        return {**fields, **masks, **rows, NUMBERS: np.array(numbers, dtype=np.float32)}


def _tensor_fields(batch: BlockBatch) -> list[str]:
    return [field.name for field in dataclasses.fields(batch) if isinstance(getattr(batch, field.name), Tensor)]
