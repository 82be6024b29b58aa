"""The schedule of a run: every pack, the steps that use it, its column and its slot. A function of corpus and recipe.

It does not know how many ranks, workers or bytes there are. Anchors are not in it: they follow from (seed, document),
each pack's shares and the number of the use, and are drawn when they are needed (`planner`).

Shape letters: P packs · E documents in packs · S steps · C columns · R replays.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from slipstream.config.recipe import PlanSection
from slipstream.plan.figures import Float32Array, PlanSummary
from slipstream.records import Int32Array, Int64Array

Int8Array = npt.NDArray[np.int8]


@dataclass(frozen=True, slots=True, eq=False)
class ScheduleArrays:
    """The numbers of a schedule, all of which its digest covers.

    Pack p holds the documents `document_ids[pack_starts[p] : pack_starts[p + 1]]` int64 `[E]`, `[P + 1]`. `shares` int32
    `[E]`: anchors each gets in one use; `offsets` int32 `[E]`: where the first use begins in its permutation.
    `tokens_of_pack`, `anchors_of_pack`, `epoch_of_pack`, `column_of_pack`, `slot_of_pack` int32 `[P]`; `first_step`,
    `last_step` int64 `[P]`; `pack_of_use` int64 `[S, C]`; `use_number` int8 `[S, C]`.
    """

    document_ids: Int64Array
    pack_starts: Int64Array
    shares: Int32Array
    offsets: Int32Array
    tokens_of_pack: Int32Array
    anchors_of_pack: Int32Array
    epoch_of_pack: Int32Array
    column_of_pack: Int32Array
    slot_of_pack: Int32Array
    first_step: Int64Array
    last_step: Int64Array
    pack_of_use: Int64Array
    use_number: Int8Array

    def named(self) -> dict[str, npt.NDArray[np.generic]]:
        """The arrays by name, in a fixed order."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, eq=False)
class Schedule:
    """What is trained when. Made by `make_schedule`; `save` and `load` keep it with a run.

    `plan` and `block_size` are the recipe's, `fingerprint` the corpus'. `mixing` fp32 `[S]` (see `mixing_figure`) and
    `figures` are derived, for people to read.
    """

    plan: PlanSection
    block_size: int
    fingerprint: str
    arrays: ScheduleArrays
    mixing: Float32Array
    figures: PlanSummary

    @cached_property
    def digest(self) -> str:
        """SHA-256 over corpus fingerprint, plan keys, block size and all arrays. Ranks, workers and memory are not in it."""
        return schedule_digest(
            plan=self.plan,
            block_size=self.block_size,
            fingerprint=self.fingerprint,
            checksums={name: array_checksum(array) for name, array in self.arrays.named().items()},
        )

    @property
    def num_steps(self) -> int:
        """S, optimizer steps of the run."""
        return len(self.arrays.pack_of_use)

    @property
    def num_columns(self) -> int:
        """C, packs a step."""
        return int(self.arrays.pack_of_use.shape[1])

    @property
    def num_packs(self) -> int:
        """P, a multiple of C; the last ones may be empty."""
        return len(self.arrays.first_step)

    @cached_property
    def slots_per_column(self) -> int:
        """Slots that the busiest column needs; each column is given so many."""
        return int(self.arrays.slot_of_pack.max(initial=-1)) + 1

    @property
    def pack_tokens(self) -> int:
        """T, context tokens of a pack."""
        return self.plan.pack_tokens

    @property
    def pack_anchors(self) -> int:
        """N, anchor slots of a use."""
        return self.plan.pack_anchors

    @property
    def replays(self) -> int:
        """R, uses of each pack."""
        return self.plan.replays

    @property
    def pack_of_use(self) -> Int64Array:
        """Pack int64 `[S, C]` of each step and column."""
        return self.arrays.pack_of_use

    @property
    def use_number(self) -> Int8Array:
        """Which use of its pack, int8 `[S, C]`, from 0."""
        return self.arrays.use_number

    @property
    def column_of_pack(self) -> Int32Array:
        """Column int32 `[P]`."""
        return self.arrays.column_of_pack

    @property
    def slot_of_pack(self) -> Int32Array:
        """Planned slot int32 `[P]` within the pack's column."""
        return self.arrays.slot_of_pack

    @property
    def first_step(self) -> Int64Array:
        """Step int64 `[P]` of the first use."""
        return self.arrays.first_step

    @property
    def last_step(self) -> Int64Array:
        """Step int64 `[P]` of the last use."""
        return self.arrays.last_step

    @property
    def epoch_of_pack(self) -> Int32Array:
        """Epoch int32 `[P]`."""
        return self.arrays.epoch_of_pack

    def documents_of_pack(self, pack_id: int) -> Int64Array:
        """Document ids int64 `[M]` in row order; none for an empty pack."""
        begin, end = self.arrays.pack_starts[pack_id : pack_id + 2]
        return self.arrays.document_ids[begin:end]

    def live_packs(self, step: int) -> list[int]:
        """Packs first used before `step` and used again at or after it: the target runs them again on resume."""
        alive = (self.arrays.first_step < step) & (self.arrays.last_step >= step)
        return [int(pack) for pack in np.flatnonzero(alive)]

    @cached_property
    def largest_refill(self) -> int:
        """The most packs that a resume makes again, wherever it begins: none without replays."""
        steps = self.num_steps + 1
        begun = np.bincount(self.arrays.first_step + 1, minlength=steps + 1)
        ended = np.bincount(self.arrays.last_step + 1, minlength=steps + 1)
        return int(np.cumsum(begun - ended).max(initial=0))

    def summary(self) -> PlanSummary:
        """Fills, tokens, anchors, refusals, distances and mixing."""
        return self.figures

    def save(self, folder: str | Path) -> None:
        """Write the schedule to a folder, made if it is missing; `schedule.json` comes last and completes it."""
        from slipstream.plan.disk import save_schedule

        save_schedule(schedule=self, folder=Path(folder))

    @staticmethod
    def load(folder: str | Path) -> Schedule:
        """Read a schedule back. Raises `PlanError` naming the file that is missing, truncated or damaged."""
        from slipstream.plan.disk import load_schedule

        return load_schedule(Path(folder))


def array_checksum(array: npt.NDArray[np.generic]) -> str:
    """SHA-256 over an array's type, shape and little-endian bytes."""
    fixed = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    hasher = hashlib.sha256(f"{fixed.dtype.str}{fixed.shape}".encode())
    hasher.update(fixed.data.cast("B") if fixed.size else b"")
    return hasher.hexdigest()


def schedule_digest(*, plan: PlanSection, block_size: int, fingerprint: str, checksums: dict[str, str]) -> str:
    """SHA-256 that identifies a schedule. `checksums` are those of all its arrays by name.

    What `plan` only permits is not in it: it changes nothing that is scheduled.
    """
    keys = plan.model_dump(mode="json", exclude={"allow_lossy_replays"})
    content = {"plan": keys, "block_size": block_size, "corpus": fingerprint, "arrays": checksums}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
