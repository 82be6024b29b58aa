"""Memory of every process, by closed form, before anything loads. Bytes; a GiB is 2**30.

Letters: T context tokens · N anchors · B block size · Q = N B queries · K taps · D hidden size · V vocabulary · F width
of an MLP · H, G query and key heads · h width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from slipstream.config import DrafterShape, Recipe, TargetInfo
from slipstream.errors import PlanError
from slipstream.plan.placement import Placement
from slipstream.plan.weights import TargetWeights, count_target_weights

GIB = 2**30
BYTES = {"bfloat16": 2, "float32": 4}
_FP32 = 4
_ALIGNMENT_BYTES = 128
_TILE_QUERIES = 128
_SOFTMAX_ROWS_ON_CPU = 64

Phase = Literal["always", "start", "train"]


@dataclass(frozen=True, slots=True)
class MemoryItem:
    """One thing that takes memory. `formula` says how the bytes follow; `phase` whether only before step 1 or only after."""

    name: str
    nbytes: int
    formula: str
    phase: Phase = "always"


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Memory of one process of a role; `count` processes of it run. `device` is where it lies."""

    placement: Literal["colocated", "split"]
    role: Literal["colocated", "target", "drafter"]
    count: int
    device: Literal["cpu", "cuda"]
    items: tuple[MemoryItem, ...]

    @property
    def peak_bytes(self) -> int:
        """The larger of what is held before step 1 and while training."""
        start = sum(item.nbytes for item in self.items if item.phase != "train")
        train = sum(item.nbytes for item in self.items if item.phase != "start")
        return max(start, train)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Memory of a run in both placements, and the host memory of its slots, which both need alike."""

    processes: tuple[ProcessMemory, ...]
    slot_nbytes: int
    num_slots: int
    host_memory_bytes: int

    @property
    def host_slot_bytes(self) -> int:
        """All slots of all columns, and those kept for validation."""
        return self.num_slots * self.slot_nbytes

    def of(self, placement: Literal["colocated", "split"]) -> tuple[ProcessMemory, ...]:
        """The processes of one placement."""
        return tuple(process for process in self.processes if process.placement == placement)

    def total_bytes(self, placement: Literal["colocated", "split"]) -> int:
        """All processes of a placement at their peaks, and the slots: what one host holds when they all run on its CPU."""
        return sum(process.count * process.peak_bytes for process in self.of(placement)) + self.host_slot_bytes

    def check_host_slots(self) -> None:
        """Raise `PlanError` when the slots need more than `placement.host_memory_gb`."""
        if self.host_slot_bytes > self.host_memory_bytes:
            raise PlanError(
                key="placement.host_memory_gb",
                value=round(self.host_memory_bytes / GIB, 3),
                rule=f"the schedule needs {self.num_slots} slots of {self.slot_nbytes / GIB:.4f} GiB, "
                f"{self.host_slot_bytes / GIB:.3f} GiB in all",
                hint="raise it, or lower plan.replays, plan.replay_distance or plan.packs_per_step",
            )

    def check_machine(self, *, placement: Literal["colocated", "split"], memory_bytes: int) -> None:
        """Raise `PlanError` when a run on the CPU needs more than the machine has."""
        needed = self.total_bytes(placement)
        if needed > memory_bytes:
            raise PlanError(
                key="placement.mode",
                value=placement,
                rule=f"this machine has {memory_bytes / GIB:.1f} GiB for the run, which needs {needed / GIB:.1f} GiB",
                hint="lower plan.pack_tokens, plan.pack_anchors, objective.chunk_rows or drafter.num_layers",
            )

    def check_gpus(self, *, placement: Placement, gpu_memory_bytes: Sequence[int]) -> None:
        """Raise `PlanError` when the processes that share a GPU need more than it has."""
        peaks = {process.role: process.peak_bytes for process in self.of(placement.mode)}
        for gpu, available in enumerate(gpu_memory_bytes):
            needed = sum(peaks[process.role] for process in placement.processes if process.gpu == gpu)
            if needed > available:
                raise PlanError(
                    key="placement.mode",
                    value=placement.mode,
                    rule=f"GPU {gpu} has {available / GIB:.1f} GiB, its processes need {needed / GIB:.1f} GiB",
                    hint="lower plan.pack_tokens, plan.pack_anchors, objective.chunk_rows or drafter.num_layers",
                )


def slot_bytes(*, pack_tokens: int, num_taps: int, hidden_size: int, dtype: str, last_hidden: bool = False) -> int:
    """Bytes of one slot: hidden `[T, K, D]` and, if asked for, last hidden `[T, D]`, each rounded up to 128."""
    row = pack_tokens * hidden_size * BYTES[dtype]
    return _aligned(row * num_taps) + (_aligned(row) if last_hidden else 0)


def plan_memory(
    *,
    recipe: Recipe,
    info: TargetInfo,
    shape: DrafterShape,
    schedule_slots_per_column: int,
    validation_slots: int = 0,
    device: Literal["cpu", "cuda"] = "cpu",
) -> MemoryPlan:
    """The memory plan of a recipe whose schedule needs so many slots a column, in both placements.

    `validation_slots` are kept besides. Activations are estimates from what the layers must keep; weights, optimizer state
    and slots are exact.
    """
    weights = count_target_weights(info)
    start, train = _target_items(recipe=recipe, info=info, shape=shape, weights=weights, device=device)
    draft = _drafter_items(recipe=recipe, info=info, shape=shape, device=device)
    ranks, workers = recipe.placement.drafter_ranks, recipe.placement.target_workers
    return MemoryPlan(
        processes=(
            ProcessMemory("colocated", "colocated", ranks, device, (*start, *train, *draft)),
            ProcessMemory("split", "target", workers, device, (*start, *train)),
            ProcessMemory("split", "drafter", ranks, device, draft),
        ),
        slot_nbytes=slot_bytes(
            pack_tokens=recipe.plan.pack_tokens,
            num_taps=shape.num_taps,
            hidden_size=info.hidden_size,
            dtype=recipe.target.dtype,
        ),
        num_slots=recipe.plan.packs_per_step * schedule_slots_per_column + validation_slots,
        host_memory_bytes=int(recipe.placement.host_memory_gb * GIB),
    )


def _target_items(
    *, recipe: Recipe, info: TargetInfo, shape: DrafterShape, weights: TargetWeights, device: str
) -> tuple[tuple[MemoryItem, ...], tuple[MemoryItem, ...]]:
    """What a target holds before step 1, when it answers the validation prompts, and while it captures."""
    size, tokens = BYTES[recipe.target.dtype], recipe.plan.pack_tokens
    ends = weights.embedding + weights.head
    depth = shape.tap_layers[-1] + 1
    start: list[MemoryItem] = []
    if recipe.validation.prompts is not None:
        batch, answer = recipe.validation.batch_size, recipe.validation.max_new_tokens
        cached = batch * 2 * answer * 2 * info.num_key_value_heads * info.head_dim * info.num_layers
        whole = (sum(weights.layers) + ends) * size
        start = [
            MemoryItem("whole target, for validation answers", whole, f"all layers and ends, {weights.source}", "start"),
            MemoryItem("key-value cache of answers", cached * size, "batch 2 G h layers; prompts as long as answers", "start"),
        ]
    heads = info.head_dim * (2 * info.num_attention_heads + 2 * info.num_key_value_heads)
    active = tokens * (4 * info.hidden_size + 3 * info.intermediate_size + heads) * size
    captured = (sum(weights.layers[:depth]) + weights.embedding) * size
    train = [
        MemoryItem("target weights", captured, f"embedding and layers 0 to {depth - 1}, {weights.source}", "train"),
        MemoryItem("target activations", active, "T (4 D + 3 F + 2 h (H + G)), one layer at a time", "train"),
    ]
    if device == "cpu":
        train.append(MemoryItem("target attention mask", tokens * tokens * (1 + size), "T T, boolean and in floats", "train"))
    return tuple(start), tuple(train)


def _drafter_items(*, recipe: Recipe, info: TargetInfo, shape: DrafterShape, device: str) -> tuple[MemoryItem, ...]:
    size, count = BYTES[recipe.drafter.dtype], shape.num_parameters
    plan, width = recipe.plan, shape.hidden_size
    layer = (count - shape.num_taps * width * width) // shape.num_layers
    vocabulary = shape.vocab_size * width
    rows = plan.pack_anchors * (shape.block_size - 1)
    in_use = plan.pack_tokens * shape.num_taps * width
    return (
        MemoryItem("drafter weights", count * size, f"{count} weights in {recipe.drafter.dtype}"),
        MemoryItem("master weights, two moments, gradient sum", 4 * count * _FP32, "4 x fp32"),
        MemoryItem("gradients of a layer", layer * size, "in compute dtype, added to the sum and dropped", "train"),
        MemoryItem("frozen embedding", vocabulary * size, "V D"),
        MemoryItem("frozen head", 0 if info.tie_word_embeddings else vocabulary * size, "V D, or the embedding itself"),
        _logits(chunk_rows=min(recipe.objective.chunk_rows, rows), vocab_size=shape.vocab_size, size=size, device=device),
        MemoryItem("rows of the loss", 3 * rows * width * size, "N (B - 1) D: gathered, gradient, and its place", "train"),
        MemoryItem("pack in use", in_use * size, "T K D in the drafter's dtype", "train"),
        _activations(shape=shape, tokens=plan.pack_tokens, anchors=plan.pack_anchors, size=size),
        *_attention(recipe=recipe, shape=shape, size=size, device=device),
    )


def _logits(*, chunk_rows: int, vocab_size: int, size: int, device: str) -> MemoryItem:
    """A chunk's logits in compute dtype and, where that is not fp32, the rows of it that the softmax has in fp32."""
    fp32_rows = 0 if size == _FP32 else min(_SOFTMAX_ROWS_ON_CPU, chunk_rows) if device == "cpu" else chunk_rows
    nbytes = (chunk_rows * size + fp32_rows * _FP32) * vocab_size
    return MemoryItem("logits of a chunk", nbytes, f"{chunk_rows} V, and {fp32_rows} V in fp32", "train")


def _activations(*, shape: DrafterShape, tokens: int, anchors: int, size: int) -> MemoryItem:
    """What the backward pass needs: inputs (in fp32) and outputs of norms, heads before and after theirs, the MLP."""
    queries, width = anchors * shape.block_size, shape.hidden_size
    heads, shared = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    per_query = 8 * width + 6 * heads + 5 * shared + 4 * shape.intermediate_size
    layers = shape.num_layers * (queries * per_query + tokens * 5 * shared)
    ends = (4 * tokens + 5 * queries) * width
    statistics = shape.num_layers * queries * shape.num_attention_heads * _FP32
    formula = "layers (Q (8 D + 6 H h + 5 G h + 4 F) + T 5 G h) + (4 T + 5 Q) D, and Q H in fp32 a layer"
    return MemoryItem("drafter activations", (layers + ends) * size + statistics, formula, "train")


def _attention(*, recipe: Recipe, shape: DrafterShape, size: int, device: str) -> tuple[MemoryItem, ...]:
    """Dense masks, boolean and in the compute dtype, with the keys and values that are gathered for them; none with flex."""
    tokens, queries = recipe.plan.pack_tokens, recipe.plan.pack_anchors * shape.block_size
    if recipe.drafter.attention == "flex" or (recipe.drafter.attention == "auto" and device == "cuda"):
        return ()
    if device == "cuda":
        keys, copies, what = tokens + queries, tokens + queries, "T + Q"
    else:
        # Tiles of 128 queries see the documents that their anchors lie in: taken as a quarter of the pack at most.
        keys = tokens // 4 + _TILE_QUERIES
        copies, what = -(-queries // _TILE_QUERIES) * keys, f"T / 4 + {_TILE_QUERIES}"
    masks = len(set(shape.layer_types)) * queries * keys * (1 + size)
    gathered = shape.num_layers * copies * 2 * shape.num_key_value_heads * shape.head_dim * size
    return (
        MemoryItem("attention masks", masks, f"Q ({what}) for each kind of layer", "train"),
        MemoryItem("keys and values gathered for them", gathered, f"layers 2 G h ({what}), for each tile", "train"),
    )


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
