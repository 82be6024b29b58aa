"""Memory of a target that captures, part by part, and of one that answers the validation prompts.

On CUDA, where the engine's fused layers run (`target/fused.py`, `attention.py`, `delta_net.py`), the parts are the tensors of
that code and of FLA's delta rule, in the moment in which most of them are alive; elsewhere an estimate of a layer of
transformers' own.

Letters: T context tokens of a pack · D hidden size · F width of an MLP · H, G query and key heads · C width of a head · P
columns of a merged projection · for a delta net: J key heads of width E, I value heads of width W.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from slipstream.config import TargetInfo
from slipstream.plan.memory_drafter import CUBLAS_WORKSPACE_BYTES
from slipstream.plan.memory_items import BYTES, FP32, MIB, MemoryItem, Moment
from slipstream.plan.weights import TargetWeights, is_delta_net

FUSED_TYPES = ("llama", "mistral", "qwen3", "qwen3_5", "qwen3_5_text")
"""Targets, by `model_type`, whose layers the engine replaces with its own (`target/fused.py`, `NORM_OFFSETS`)."""
COLUMNS_MULTIPLE = 128
"""To which a delta net's merged projection is filled up (`target/delta_net.py`)."""
CHUNK_TOKENS = 64
"""Tokens of a chunk of FLA's delta rule: a matrix of it is held for each chunk and head."""
TUNER_BYTES = 256 * MIB
"""What Triton's tuner clears between two timings, to empty the cache of the GPU; only while kernels are tuned."""

ANSWERING: tuple[Moment, ...] = ("reading prompts", "answering")
MOMENTS: tuple[Moment, ...] = ("target's attention", "target's delta rule", "target's MLP")


@dataclass(frozen=True, slots=True)
class TargetLoad:
    """What one process captures: packs of `tokens`, through layers 0 to `depth` - 1; `fused` by the engine's layers."""

    info: TargetInfo
    weights: TargetWeights
    tokens: int
    depth: int
    dtype: str
    device: Literal["cpu", "cuda"]

    @property
    def size(self) -> int:
        """Bytes of an element of hidden states."""
        return BYTES[self.dtype]

    @property
    def float8(self) -> bool:
        """Whether the large matrices are in e4m3."""
        return self.dtype == "float8"

    @property
    def fused(self) -> bool:
        """Whether the engine's own layers run."""
        return self.device == "cuda" and self.dtype != "float32" and self.info.model_type in FUSED_TYPES


def target_items(load: TargetLoad) -> tuple[MemoryItem, ...]:
    """All parts of a target but its slots."""
    info, size = load.info, load.size
    kinds = [is_delta_net(info, layer) for layer in range(load.depth)]
    filling = _filling(info) * info.hidden_size * sum(kinds) if load.fused else 0
    captured = (sum(load.weights.layers[: load.depth]) + load.weights.embedding + filling) * size
    if load.float8:
        captured -= sum(_rounded(info, layer) for layer in range(load.depth)) * (size - 1)
    items = [
        MemoryItem(
            "target weights",
            captured,
            f"embedding and layers 0 to {load.depth - 1}, {load.weights.source}",
            "target.tap_layers",
        )
    ]
    if load.device == "cuda":
        items.append(MemoryItem("target's cuBLAS workspace", CUBLAS_WORKSPACE_BYTES, "of the thread that captures"))
    if not load.fused:
        return (*items, *_of_transformers(load))
    times, how = (3, "merged, then rounded") if load.float8 else (1, "held twice while layers are fused")
    merged = times * max(load.weights.layers[: load.depth]) * size
    items.append(MemoryItem("weights of a layer, merged", merged, how, "", ("loading",)))
    row = (2 * size + load.float8) * load.tokens * info.hidden_size
    rows = "2 T D, and T D in e4m3" if load.float8 else "2 T D"
    parts = [_mlp(load), *([_attention(load)] if not all(kinds) else [])]
    if any(kinds):
        tuner = "between two timings, in the first forward, unless they are cached"
        parts += [_delta_rule(load), MemoryItem("what Triton's tuner clears", TUNER_BYTES, tuner, "", ("tuning",))]
    moments = tuple(dict.fromkeys(moment for part in parts for moment in part.moments))
    return (*items, MemoryItem("residual stream and normed rows", row, rows, "plan.pack_tokens", moments), *parts)


def answering_items(load: TargetLoad, *, batch: int, answer_tokens: int) -> tuple[MemoryItem, ...]:
    """A whole target that answers `batch` prompts at once: its weights, and a layer of the prompts or the cache of the answers.

    How long prompts are is not known yet: they are taken to be as long as answers may be.
    """
    info, size = load.info, load.size
    whole = (sum(load.weights.layers) + load.weights.embedding + load.weights.head) * size
    linear = sum(is_delta_net(info, layer) for layer in range(info.num_layers))
    cached = batch * answer_tokens * 2 * info.num_key_value_heads * info.head_dim * (info.num_layers - linear) * size
    net = info.delta_net
    states = 0 if net is None else batch * linear * net.num_value_heads * net.key_size * net.value_size * FP32
    prompt = _of_transformers(replace(load, tokens=batch * answer_tokens, device="cuda"))[0].nbytes
    return (
        MemoryItem("whole target", whole, f"all layers and ends, {load.weights.source}", "", ANSWERING),
        MemoryItem(
            "key-value cache of prompts",
            cached + states,
            "batch 2 G C layers a token, prompts as long as answers; states of delta nets",
            "validation.batch_size",
            ANSWERING,
        ),
        MemoryItem("key-value cache of answers", cached, "batch 2 G C layers a token", "validation.batch_size", ("answering",)),
        MemoryItem(
            "activations of prompts", prompt, "as of a pack of the same tokens", "validation.batch_size", ("reading prompts",)
        ),
        MemoryItem("logits of answers", batch * info.vocab_size * (size + FP32), "batch V", "validation.batch_size", ANSWERING),
    )


def _mlp(load: TargetLoad) -> MemoryItem:
    active = 1 if load.float8 else load.size
    nbytes = (2 * load.size + active) * load.tokens * load.info.intermediate_size
    formula = "T 2 F: gate and up; T F: their product" + (" in e4m3" if load.float8 else "")
    return MemoryItem("target's MLP", nbytes, formula, "plan.pack_tokens", ("target's MLP",))


def _attention(load: TargetLoad) -> MemoryItem:
    info, tokens = load.info, load.tokens
    heads, shared = info.num_attention_heads * info.head_dim, info.num_key_value_heads * info.head_dim
    projected = heads * (2 if info.attention_gate else 1) + 2 * shared
    nbytes = tokens * (projected + 2 * heads + shared) * load.size + tokens * info.num_attention_heads * FP32
    formula = "T (P + 2 H C + G C): projected, rotated, attended; T H in fp32"
    return MemoryItem("target's attention", nbytes, formula, "plan.pack_tokens", ("target's attention",))


def _delta_rule(load: TargetLoad) -> MemoryItem:
    """In the last kernel: projected rows, three convolutions, normed query and key, A, w, u, states, new values, output."""
    net, tokens = load.info.delta_net, load.tokens
    assert net is not None, "a delta net without its dimensions"
    projected = net.columns + _filling(load.info)
    convolved = 2 * net.keys + net.values
    inner = net.num_value_heads * (CHUNK_TOKENS + net.key_size) + 3 * net.values
    states = net.num_value_heads * net.key_size * net.value_size // CHUNK_TOKENS
    gates = net.num_value_heads * (2 * FP32 + load.size) + 2 * net.num_key_heads * FP32
    nbytes = tokens * ((projected + convolved + 2 * net.keys + inner + states) * load.size + gates)
    formula = "T (P + 4 J E + 4 I W + I (64 + E) + I E W / 64), gates in fp32"
    return MemoryItem("target's delta rule", nbytes, formula, "plan.pack_tokens", ("target's delta rule", "tuning"))


def _rounded(info: TargetInfo, layer: int) -> int:
    """Elements of a layer's matrices that are in e4m3 (`target/float8_layers.py`): all but a delta net's strength and step."""
    net = info.delta_net
    if net is not None and is_delta_net(info, layer):
        mixer = net.columns - 2 * net.num_value_heads + net.values
    else:
        heads, shared = info.num_attention_heads * info.head_dim, info.num_key_value_heads * info.head_dim
        mixer = heads * (3 if info.attention_gate else 2) + 2 * shared
    return info.hidden_size * (mixer + 3 * info.intermediate_size)


def _filling(info: TargetInfo) -> int:
    """Columns that fill a delta net's merged projection up."""
    return 0 if info.delta_net is None else -info.delta_net.columns % COLUMNS_MULTIPLE


def _of_transformers(load: TargetLoad) -> tuple[MemoryItem, ...]:
    info, tokens, size = load.info, load.tokens, load.size
    heads = info.head_dim * (2 * info.num_attention_heads + 2 * info.num_key_value_heads)
    active = tokens * (4 * info.hidden_size + 3 * info.intermediate_size + heads) * size
    formula = "estimate: T (4 D + 3 F + 2 C (H + G)), one layer at a time"
    items = [MemoryItem("target activations", active, formula, "plan.pack_tokens", MOMENTS)]
    if load.device == "cpu":
        mask = tokens * tokens * (1 + size)
        items.append(MemoryItem("target attention mask", mask, "T T, boolean and in floats", "plan.pack_tokens", MOMENTS))
    return tuple(items)
