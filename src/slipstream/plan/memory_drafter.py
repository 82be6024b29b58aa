"""Memory of a drafter's training, part by part: what is held for the whole run, for backward, and in a moment.

On CUDA the parts follow the code of the fused pass (`drafter/fused.py`), the loss (`objective/linear_ce.py`) and the
optimizer (`trainer/optim.py`) tensor by tensor; `tests/plan` counts the same code's tensors and finds these numbers. On a
CPU activations are an estimate from what autograd keeps of the modules.

Letters: T context tokens · N anchors · B block size · Q = N B queries · U = N + 1 distinct slot inputs · R = N (B - 1) rows
that predict · M rows of the loss, whole chunks · K taps · D hidden size · V vocabulary · F width of an MLP · H, G query and
key heads · C width of a head. Elements are of the compute type where nothing else is said.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slipstream.config import DrafterShape
from slipstream.plan.memory_items import BYTES, DRAFTING, FP32, MIB, MemoryItem, aligned

TILE = 128
"""Rows and columns of a tile of flex attention's mask."""
TILE_QUERIES = 128
SOFTMAX_ROWS_ON_CPU = 64
PARAMETER_ALIGNMENT = 64
"""Elements at a multiple of which every parameter begins in the optimizer's flat buffers (`trainer/optim.py`)."""
ARRAY_BUFFERS = 3
"""Uses whose arrays are on the device at once (`trainer/metadata.py`)."""
CUBLAS_WORKSPACE_BYTES = 32 * MIB
"""What torch gives cuBLAS for each thread that launches products, on Hopper; 8 MiB on earlier GPUs."""

IN_LAYERS = DRAFTING[:-1]
"""Moments in which a layer, or the loss, is at work."""

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class DrafterLoad:
    """What one process trains on: a pack of `tokens` and `anchors` at a time, `chunk_rows` of logits at once.

    `slot_dtype` is that of the hidden states, `tied` says that head and embedding are one tensor, `embedding_on_device`
    that the embedding lies beside the head, `ends_of_target` that both are the table of a target in the same process, which
    counts it, `noise` that hidden states are copied to add some.
    """

    shape: DrafterShape
    tokens: int
    anchors: int
    chunk_rows: int
    dtype: str
    slot_dtype: str
    attention: str
    tied: bool
    noise: bool = False
    embedding_on_device: bool = True
    ends_of_target: bool = False

    @property
    def queries(self) -> int:
        """Q."""
        return self.anchors * self.shape.block_size

    @property
    def rows(self) -> int:
        """R."""
        return self.anchors * (self.shape.block_size - 1)

    @property
    def loss_rows(self) -> int:
        """M."""
        return -(-self.rows // self.chunk_rows) * self.chunk_rows

    @property
    def size(self) -> int:
        """Bytes of an element of the compute type."""
        return BYTES[self.dtype]

    def uses_flex(self, device: Device) -> bool:
        """Whether attention makes no dense mask."""
        return self.attention == "flex" or (self.attention == "auto" and device == "cuda")


def drafter_items(load: DrafterLoad, *, device: Device) -> tuple[MemoryItem, ...]:
    """All parts of one drafter process but its slots."""
    items = (*_weights(load), *_ends(load))
    return (*items, *(_on_cpu(load) if device == "cpu" else _on_cuda(load)))


def flat_elements(shape: DrafterShape) -> int:
    """Elements of the optimizer's flat buffers: every parameter, each begun at a multiple of 64."""
    hidden, heads, shared = shape.hidden_size, shape.num_attention_heads, shape.num_key_value_heads
    matrices = (
        hidden * heads * shape.head_dim,
        hidden * shared * shape.head_dim,
        hidden * shared * shape.head_dim,
        heads * shape.head_dim * hidden,
        *(3 * (hidden * shape.intermediate_size,)),
    )
    layer = (*matrices, shape.head_dim, shape.head_dim, hidden, hidden)
    ends = (shape.num_taps * hidden * hidden, hidden, hidden)
    rounded = [-(-size // PARAMETER_ALIGNMENT) * PARAMETER_ALIGNMENT for size in (*layer * shape.num_layers, *ends)]
    return sum(rounded)


def array_bytes(load: DrafterLoad, *, device: Device = "cuda") -> int:
    """Bytes of one use's arrays on the device: the batch, and the masks' spans and tiles."""
    shape, queries, keys = load.shape, load.queries, load.tokens + load.queries
    long, flag, short = 8, 1, 4
    batch = [load.tokens * long] * 2 + [load.anchors * long] * 2 + [load.anchors * flag]
    batch += [queries * long] * 3 + [queries * flag, load.loss_rows * long]
    mask = [queries * short] * 4
    if load.uses_flex(device):
        rows, columns = queries // TILE, keys // TILE
        mask += [count * short for side in (rows, columns) for count in (side, rows * columns) * 2]
    masks = mask * len(set(shape.layer_types))
    rows_of_embedding = [] if load.embedding_on_device else [(load.anchors + 1) * shape.hidden_size * load.size]
    return sum(aligned(nbytes) for nbytes in (*batch, *masks, *rows_of_embedding))


def _weights(load: DrafterLoad) -> tuple[MemoryItem, ...]:
    shape, elements = load.shape, flat_elements(load.shape)
    count = shape.num_parameters
    own = 0 if load.dtype == "float32" else elements * load.size
    formula = f"{count} weights in {load.dtype}" if own else f"{count} weights: the fp32 masters themselves"
    built = count * load.size
    return (
        MemoryItem("drafter weights", own, formula, "drafter.num_layers"),
        MemoryItem("master weights, two moments, gradient sum", 4 * elements * FP32, "4 x fp32", "drafter.num_layers"),
        MemoryItem("weights as built", built, "until the optimizer has taken them over", "drafter.num_layers", ("loading",)),
    )


def _ends(load: DrafterLoad) -> tuple[MemoryItem, ...]:
    table = load.shape.vocab_size * load.shape.hidden_size * load.size
    if load.ends_of_target:
        return (MemoryItem("frozen head", 0, "the target's embedding"),)
    return (
        MemoryItem("frozen embedding", table if load.embedding_on_device else 0, "V D"),
        MemoryItem("frozen head", 0 if load.tied and load.embedding_on_device else table, "V D, or the embedding itself"),
    )


def _on_cuda(load: DrafterLoad) -> tuple[MemoryItem, ...]:
    shape, size, width = load.shape, load.size, load.shape.hidden_size
    arrays = ARRAY_BUFFERS * array_bytes(load)
    noisy = load.tokens * shape.num_taps * width * BYTES[load.slot_dtype] if load.noise else 0
    queries, keys, head = load.queries, load.tokens + load.queries, shape.head_dim
    return (
        MemoryItem("arrays of uses", arrays, f"{ARRAY_BUFFERS} x batch, spans and tiles", "plan.pack_anchors"),
        MemoryItem("cuBLAS workspaces", 2 * CUBLAS_WORKSPACE_BYTES, "one for each thread: forward, backward"),
        MemoryItem("kept: hidden states with noise", noisy, "T K D, where noise is added", "plan.pack_tokens", DRAFTING),
        MemoryItem("kept: fused context", 2 * load.tokens * width * size, "2 T D", "plan.pack_tokens", IN_LAYERS),
        MemoryItem("kept: rotations", 2 * (queries + keys) * head * size, "2 (T + 2 Q) C", "plan.pack_anchors", IN_LAYERS),
        MemoryItem("kept: embeddings of blocks", (load.anchors + 1) * width * size, "U D", "plan.pack_anchors", IN_LAYERS),
        *_kept_by_layers(load),
        *_passing(load),
        *_dense(load, device="cuda"),
    )


def _kept_by_layers(load: DrafterLoad) -> tuple[MemoryItem, ...]:
    """What the two steps of each layer save for backward; the last layer's MLP runs on the R rows that predict alone."""
    shape, size = load.shape, load.size
    width, layers = shape.hidden_size, shape.num_layers
    heads, shared = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    queries, keys, distinct = load.queries, load.tokens + load.queries, load.anchors + 1
    sums = queries * shape.num_attention_heads * FP32
    # the first layer's input is the embeddings, counted above; its projections are those of the distinct inputs
    first = distinct * heads + (load.tokens + distinct) * shared + 2 * queries * heads + 2 * keys * shared
    later = queries * width + 3 * queries * heads + 3 * keys * shared
    attention = (first + (layers - 1) * later) * size + layers * sums
    mlp = width + 2 * shape.intermediate_size
    whole = (layers - 1) * queries * mlp * size
    last = load.rows * mlp * size
    return (
        MemoryItem(
            "kept: attention of all layers",
            attention,
            "(layers - 1) (Q (D + 3 H C) + 3 (T + Q) G C) + (2 Q + U) H C + (3 T + 2 Q + U) G C, layers Q H in fp32",
            "plan.pack_anchors",
            IN_LAYERS,
        ),
        MemoryItem("kept: MLPs but the last", whole, "(layers - 1) Q (D + 2 F)", "plan.pack_anchors", IN_LAYERS),
        MemoryItem("kept: last MLP", last, "R (D + 2 F)", "plan.pack_anchors", DRAFTING[:4]),
    )


def _passing(load: DrafterLoad) -> tuple[MemoryItem, ...]:
    """What comes and goes: at the loss, at its gradient, and in the widest steps of backward, which is the last layer's."""
    shape, size = load.shape, load.size
    width, inner = shape.hidden_size, shape.intermediate_size
    heads, shared = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    queries, keys, rows, picked = load.queries, load.tokens + load.queries, load.rows, load.loss_rows
    chunk = min(load.chunk_rows, picked)
    # of flex attention itself; or of what lies before it, when what flex kept is free again
    flex = 2 * queries * heads + 2 * keys * shared
    matrices = width * (heads + 2 * shared)
    inputs = keys * (shared + width) + queries * width + matrices
    attention = (queries * width + max(flex, inputs)) * size
    # when the product is there; or in the end, beside the gradients of three matrices, those of all Q rows
    mlp = max(rows * (width + inner), 2 * rows * width + 3 * width * inner + (queries + width) * heads + queries * width) * size
    pack, distinct = load.tokens * shape.num_taps * width, load.anchors + 1
    widened = pack * BYTES[load.slot_dtype] if BYTES[load.slot_dtype] != size else 0
    context = (pack + load.tokens * width + shape.num_taps * width**2) * size + widened
    # of the first layer, with all that is kept for it and what later ones had to give back to the context
    narrow = load.tokens + distinct
    first = (2 * load.tokens + distinct + keys + narrow) * width + 2 * (queries + keys) * shape.head_dim + matrices
    first += (2 * distinct + queries) * heads + (3 * narrow + 2 * keys) * shared
    return (
        MemoryItem(
            "an MLP's product and result", rows * (width + inner) * size, "R (D + F)", "plan.pack_anchors", ("forward",)
        ),
        MemoryItem(
            "input of the final norm", rows * width * size, "R D", "plan.pack_anchors", ("loss", "gradient of the loss")
        ),
        MemoryItem("rows of the loss", picked * width * size, "M D, then their gradient", "plan.pack_anchors", ("loss",)),
        MemoryItem("logits of a chunk", chunk * shape.vocab_size * size, f"{chunk} V", "objective.chunk_rows", ("loss",)),
        MemoryItem(
            "weighted gradient of rows",
            picked * width * (size + 2 * FP32),
            "M D, and 2 M D in fp32",
            "plan.pack_anchors",
            ("gradient of the loss",),
        ),
        MemoryItem(
            "gradients inside an MLP",
            mlp,
            "max(R (D + F), 2 R D + 3 D F + (Q + D) H C + Q D)",
            "plan.pack_anchors",
            ("gradients of an MLP",),
        ),
        MemoryItem(
            "gradients inside an attention",
            attention,
            "Q D + max(2 Q H C + 2 (T + Q) G C, (T + Q) (G C + D) + Q D + D (H C + 2 G C))",
            "plan.pack_anchors",
            ("gradients of an attention",),
        ),
        MemoryItem(
            "gradients of the context",
            max(context, first * size),
            "max(T K D + T D + K D D, D (4 T + 2 U + Q + H C + 2 G C) + H C (2 U + Q) + G C (5 T + 3 U + 2 Q) + C (2 T + 4 Q))",
            "plan.pack_tokens",
            ("gradients of the context",),
        ),
    )


def _on_cpu(load: DrafterLoad) -> tuple[MemoryItem, ...]:
    """What the backward pass needs: inputs (in fp32) and outputs of norms, heads before and after theirs, the MLP."""
    shape, size, width = load.shape, load.size, load.shape.hidden_size
    queries = load.queries
    layer = (shape.num_parameters - shape.num_taps * width * width) // shape.num_layers
    heads, shared = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    per_query = 8 * width + 6 * heads + 5 * shared + 4 * shape.intermediate_size
    layers = shape.num_layers * (queries * per_query + load.tokens * 5 * shared)
    ends = (4 * load.tokens + 5 * queries) * width
    statistics = shape.num_layers * queries * shape.num_attention_heads * FP32
    formula = "layers (Q (8 D + 6 H C + 5 G C + 4 F) + T 5 G C) + (4 T + 5 Q) D, and Q H in fp32 a layer"
    chunk = min(load.chunk_rows, load.rows)
    fp32_rows = 0 if size == FP32 else min(SOFTMAX_ROWS_ON_CPU, chunk)
    logits = (chunk * size + fp32_rows * FP32) * shape.vocab_size
    keys = "plan.pack_anchors"
    return (
        MemoryItem("gradients of a layer", layer * size, "added to the sum and dropped", "drafter.num_layers", DRAFTING),
        MemoryItem("logits of a chunk", logits, f"{chunk} V, and {fp32_rows} V in fp32", "objective.chunk_rows", DRAFTING),
        MemoryItem(
            "rows of the loss", 3 * load.rows * width * size, "3 N (B - 1) D: gathered, gradient, place", keys, DRAFTING
        ),
        MemoryItem("pack in use", load.tokens * shape.num_taps * width * size, "T K D", "plan.pack_tokens", DRAFTING),
        MemoryItem("drafter activations", (layers + ends) * size + statistics, formula, keys, DRAFTING),
        *_dense(load, device="cpu"),
    )


def _dense(load: DrafterLoad, *, device: Device) -> tuple[MemoryItem, ...]:
    """Dense masks, boolean and in the compute type, with the keys and values that are gathered for them; none with flex."""
    if load.uses_flex(device):
        return ()
    shape, size, tokens, queries = load.shape, load.size, load.tokens, load.queries
    shared, groups = shape.num_key_value_heads * shape.head_dim, 1
    if device == "cuda":
        keys, copies, what = tokens + queries, tokens + queries, "T + Q"
        groups += shape.num_attention_heads // shape.num_key_value_heads  # the kernel takes no groups: heads are repeated
    else:
        # Tiles of 128 queries see the documents that their anchors lie in: taken as a quarter of the pack at most.
        keys = tokens // 4 + TILE_QUERIES
        copies, what = -(-queries // TILE_QUERIES) * keys, f"T / 4 + {TILE_QUERIES}"
    masks = len(set(shape.layer_types)) * queries * keys * (1 + size)
    gathered = shape.num_layers * copies * 2 * shared * groups * size
    return (
        MemoryItem("attention masks", masks, f"Q ({what}) for each kind of layer", "plan.pack_anchors", DRAFTING),
        MemoryItem("keys and values gathered for them", gathered, f"layers 2 G C ({what})", "plan.pack_anchors", DRAFTING),
    )
