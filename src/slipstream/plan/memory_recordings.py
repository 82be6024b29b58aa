"""Memory of a stage whose launches are replayed from CUDA graphs (`trainer/recorded.py`, `target/recorded.py`).

What a recording allocates comes from a pool of its own, which keeps for good what the stage would hold at its fullest; beside
it lie copies of what changes from pack to pack, at addresses that stay. On a stage that the recipe leaves open, warm-up
decides by the clock; here it is guessed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from slipstream.config import TargetInfo
from slipstream.plan.flops import drafter_flops, target_flops
from slipstream.plan.memory_drafter import CUBLAS_WORKSPACE_BYTES, DrafterLoad, array_bytes, drafter_items
from slipstream.plan.memory_items import BYTES, DRAFTING, FP32, MemoryItem, Moment
from slipstream.plan.memory_target import MOMENTS, TargetLoad, target_items
from slipstream.plan.weights import is_delta_net

Wish = Literal["auto", "on", "off"]
Stage = Literal["target", "drafter"]

POOL_FILL = 0.94
"""Share of a pool that is in use at its fullest; the rest is lost to sizes rounded up and holes. One was measured, on an H200:
1.26 GiB planned for SmolLM2's step of 4,096 tokens and 1,024 anchors, 1.334 GiB kept."""
FLOPS_PER_SECOND = 600e12
"""What an H200 computes of either stage; a smaller GPU is less often waiting for launches."""
LAUNCH_SECONDS = {"drafter": 8e-3, "target": 0.6e-3}
"""Seconds that the CPU launches for a layer: 38 ms were measured for a drafter of five; a target's are an estimate."""
VALIDATION_ROWS = 1024
"""Rows of logits that acceptance is measured on at once (`evaluate/acceptance.py`)."""
LOGITS = "logits of a chunk"


def replayed_drafter(load: DrafterLoad, *, several: bool) -> tuple[MemoryItem, ...]:
    """All parts of a drafter on CUDA but its slots; `several` packs a step and rank are recorded twice.

    Noise and the head's products stay outside the recordings, and so does validation.
    """
    items = drafter_items(load, device="cuda")
    captured = [item for item in items if item.moments and set(item.moments) <= set(DRAFTING) and "noise" not in item.name]
    pool = [item for item in captured if item.name not in (LOGITS, "rows of the loss")]
    rows = load.loss_rows * load.shape.hidden_size * load.size
    copies = load.tokens * load.shape.num_taps * load.shape.hidden_size * BYTES[load.slot_dtype]
    copies += array_bytes(load) + rows + load.loss_rows * (FP32 + 1)
    return (
        *(item for item in items if item not in captured or item.name == LOGITS),
        _pool("drafter", pool, DRAFTING, (1 + several) * rows, "plan.pack_anchors"),
        MemoryItem("copies for the drafter's recordings", copies, "T K D, arrays, M D, and M in fp32", "plan.pack_anchors"),
        MemoryItem("recording's cuBLAS workspaces", 2 * CUBLAS_WORKSPACE_BYTES, "of its stream: forward, backward"),
        _validation(load),
    )


def replayed_target(load: TargetLoad, *, slot_nbytes: int) -> tuple[MemoryItem, ...]:
    """All parts of a target on CUDA but its slots."""
    items = target_items(load)
    pool = [item for item in items if set(item.moments) & set(MOMENTS)]
    return (
        *(item for item in items if item not in pool),
        _pool("target", pool, MOMENTS, 0, "plan.pack_tokens"),
        MemoryItem("slot of the target's recordings", slot_nbytes, "T K D", "plan.pack_tokens"),
        MemoryItem("target's recording: cuBLAS workspace", CUBLAS_WORKSPACE_BYTES, "of its stream"),
    )


def may_replay_target(load: TargetLoad) -> bool:
    """Whether a target's forward can be recorded at all: on the engine's own layers, without delta nets."""
    return load.fused and not any(is_delta_net(load.info, layer) for layer in range(load.depth))


def guess_drafter(load: DrafterLoad, *, wish: Wish) -> bool:
    """Whether a drafter's steps will be replayed."""
    pairs = load.queries * (load.tokens / 4 + load.shape.block_size)
    work = drafter_flops(shape=load.shape, tokens=load.tokens, anchors=load.anchors, visible_pairs=pairs, rows=load.rows)
    return _guess(work, layers=load.shape.num_layers, stage="drafter", wish=wish)


def guess_target(load: TargetLoad, *, wish: Wish) -> bool:
    """Whether a target's forwards will be replayed."""
    info, tokens = load.info, load.tokens
    work = target_flops(
        matrix_parameters=sum(load.weights.layers[: load.depth]),
        tokens=tokens,
        attention_layers=load.depth,
        attention_width=_width(info),
        squared_tokens=tokens * tokens / 4,
    )
    return may_replay_target(load) and _guess(work, layers=load.depth, stage="target", wish=wish)


def _guess(work: float, *, layers: int, stage: Stage, wish: Wish) -> bool:
    """As `device/graph_choice.py` decides: yes where launching takes more than half of the time."""
    if wish != "auto":
        return wish == "on"
    return work / FLOPS_PER_SECOND < 2 * LAUNCH_SECONDS[stage] * layers


def _pool(stage: Stage, items: Sequence[MemoryItem], moments: Sequence[Moment], kept: int, key: str) -> MemoryItem:
    fullest = max(sum(item.nbytes for item in items if item.held(moment)) for moment in moments)
    nbytes = int((fullest + kept) / POOL_FILL)
    return MemoryItem(f"the {stage}'s recordings", nbytes, f"what a launched one holds at its fullest / {POOL_FILL}", key)


def _validation(load: DrafterLoad) -> MemoryItem:
    """A launched pass without gradients: in an MLP, or with the logits of a chunk."""
    shape, queries, keys = load.shape, load.queries, load.tokens + load.queries
    heads, shared = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    inside = queries * (3 * shape.hidden_size + 3 * shape.intermediate_size + 2 * heads) + 2 * keys * shared
    inside += (load.tokens + load.anchors + 1) * shape.hidden_size + 2 * (queries + keys) * shape.head_dim
    after = queries * shape.hidden_size + VALIDATION_ROWS * shape.vocab_size
    formula = f"max(Q (3 D + 3 F + 2 H C) + 2 (T + Q) G C + (T + U) D + 2 (T + 2 Q) C, Q D + {VALIDATION_ROWS} V)"
    nbytes = max(inside, after) * load.size
    return MemoryItem("a pass without gradients", nbytes, formula, "plan.pack_anchors", ("validation",))


def _width(info: TargetInfo) -> int:
    return info.num_attention_heads * info.head_dim
