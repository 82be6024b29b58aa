"""Plants slowness in a child of a run under test; Python imports this first where a test put the folder on its path.

`SLIPSTREAM_TEST_PLANT` holds JSON: seconds to sleep in `target` (a pack's forward), `use` (a drafter's forward), `batch`
(building the arrays of one use), and `burst`: [every so many packs, seconds]; `damage` are packs whose first seal is wrong.
Nothing in `src/` knows of it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import Any


def _before(owner: Any, name: str, seconds: Callable[..., float]) -> None:
    """Sleep before each call of `owner.name`, as long as `seconds` of its arguments says."""
    inner = getattr(owner, name)

    def slowed(*arguments: Any, **named: Any) -> Any:
        time.sleep(seconds(*arguments, **named))
        return inner(*arguments, **named)

    setattr(owner, name, slowed)


def _plant(plant: dict[str, Any]) -> None:
    if "target" in plant or "burst" in plant:
        from slipstream.target.huggingface import HuggingFaceTarget

        every, burst = plant.get("burst", (1, 0.0))

        def of_pack(_: Any, pack: Any, **named: Any) -> float:
            return float(plant.get("target", 0.0) + (burst if pack.pack_id % every == 0 else 0.0))

        _before(HuggingFaceTarget, "capture", of_pack)
    if "use" in plant:
        from slipstream.drafter import DFlashDrafter

        _before(DFlashDrafter, "forward", lambda *_, **named: float(plant["use"]))
    if "batch" in plant:
        from slipstream.trainer import build

        _before(build, "make_block_batch", lambda *_, **named: float(plant["batch"]))
    if "damage" in plant:
        _damage(set(plant["damage"]))


def _damage(packs: set[int]) -> None:
    """The first seal that is made of each of the packs is not that of its bytes."""
    from slipstream.transport.slots import SlotPool

    inner = SlotPool.seal

    def sealed(pool: SlotPool, slot: int, pack_id: int, generation: int) -> int:
        wrong = pack_id in packs
        packs.discard(pack_id)
        return inner(pool, slot, pack_id, generation) ^ wrong

    SlotPool.seal = sealed  # type: ignore[method-assign]


if "SLIPSTREAM_TEST_PLANT" in os.environ:
    _plant(json.loads(os.environ["SLIPSTREAM_TEST_PLANT"]))
