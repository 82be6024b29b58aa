"""The kernels that mix tokens, as one record: attention, the convolution and the delta rule, each told where documents end.

On CUDA they are PyTorch's variable-length flash attention and FLA's Triton kernels; a target that needs one of them and cannot
have it is refused. A float8 target's products are here too. There is no other set here: what tests compare with is theirs.

Shape letters: T tokens of a row · H query or value heads · G key heads · E head size · W taps of the convolution.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from slipstream.errors import TargetError
from slipstream.target.float8 import Float8Weight, ScaledProduct, cuda_product
from slipstream.target.frame import Frame


class Attention(Protocol):
    """Causal attention inside each sequence of a frame; `window` counts the keys a token sees, itself among them."""

    def __call__(
        self, query_THE: Tensor, key_TGE: Tensor, value_TGE: Tensor, *, frame: Frame, scale: float, window: int | None
    ) -> Tensor:
        """Attended values `[T, H, E]`."""


Convolution = Callable[[Tensor, Tensor, Frame], Tensor]
"""(`[T, D]` any row stride, weight `[D, W]`, frame) → silu of the causal depthwise convolution, `[T, D]` contiguous."""
DeltaRule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Frame], Tensor]
"""(query and key `[T, G, E]`, value `[T, H, E]`, log decay and strength `[T, H]`, frame) → `[T, H, E]`; norms query and key."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """One implementation of each kernel, and how often each was launched: the proof that no layer went another way.

    `convolution` and `delta_rule` are there for hybrid targets, `product` for those in float8.
    """

    attention: Attention
    convolution: Convolution | None
    delta_rule: DeltaRule | None
    product: ScaledProduct | None = None
    calls: Counter[str] = field(default_factory=Counter)

    def attend(
        self, query_THE: Tensor, key_TGE: Tensor, value_TGE: Tensor, *, frame: Frame, scale: float, window: int | None
    ) -> Tensor:
        """Launch `attention` and count it."""
        self.calls["attention"] += 1
        return self.attention(query_THE, key_TGE, value_TGE, frame=frame, scale=scale, window=window)

    def convolve(self, rows_TD: Tensor, weight_DW: Tensor, *, frame: Frame) -> Tensor:
        """Launch `convolution` and count it."""
        assert self.convolution is not None
        self.calls["convolution"] += 1
        return self.convolution(rows_TD, weight_DW, frame)

    def mix(self, query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, strength: Tensor, *, frame: Frame) -> Tensor:
        """Launch `delta_rule` and count it."""
        assert self.delta_rule is not None
        self.calls["delta_rule"] += 1
        return self.delta_rule(query, key, value, log_decay, strength, frame)

    def multiply(self, rows_TD: Tensor, weight: Float8Weight) -> Tensor:
        """Launch `product` and count it: rows in e4m3 times a weight's transpose, `[T, P]`, scales of rows left out."""
        assert self.product is not None
        self.calls["float8 product"] += 1
        return self.product(rows_TD, weight.weight_PD, weight.row_step, weight.weight_step)


def cuda_kernels(*, hybrid: bool, float8: bool = False) -> Kernels:
    """The kernels of a CUDA device; those of FLA only for a hybrid target. Raises `TargetError` when one cannot be had."""
    convolution, delta_rule = _fla_kernels() if hybrid else (None, None)
    product = cuda_product() if float8 else None
    return Kernels(attention=_flash_attention(), convolution=convolution, delta_rule=delta_rule, product=product)


def _flash_attention() -> Attention:
    flash = _flash_operator()

    def attention(
        query_THE: Tensor, key_TGE: Tensor, value_TGE: Tensor, *, frame: Frame, scale: float, window: int | None
    ) -> Tensor:
        borders, longest = frame.cu_seqlens_M, frame.longest
        left = -1 if window is None or window >= longest else window - 1
        attended: Tensor = flash(
            query_THE,
            key_TGE,
            value_TGE,
            borders,
            borders,
            longest,
            longest,
            0.0,  # dropout
            left == -1,  # causal without a window; with one, the window to the right says it
            False,  # debug mask
            scale=scale,
            window_size_left=left,
            window_size_right=0,
        )[0]
        return attended

    return attention


def _flash_operator() -> Any:
    """What `torch.nn.attention.varlen.varlen_attn` calls, without the operator in Python around it and the zeros it fills.

    The longest sequence only sets how many blocks are launched (and whether a window is none); what lies past a sequence's end
    returns at once, so sequences may be empty, and `longest` longer than any: mha_varlen_fwd in torch's flash_api.cpp.
    """
    packet: Any = getattr(torch.ops.aten, "_flash_attention_forward", None)
    operator = None if packet is None else packet.default
    known = set() if operator is None else {argument.name for argument in operator._schema.arguments}
    if not {"cum_seq_q", "window_size_left", "window_size_right"} <= known:
        raise _missing("variable-length flash attention with windows", "install torch 2.11 or newer")
    return operator


def _fla_kernels() -> tuple[Convolution, DeltaRule]:
    try:
        import fla.utils
        from fla.modules.causal_conv1d import causal_conv1d
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except ImportError as error:
        raise _missing("the gated delta rule (flash-linear-attention)", "pip install flash-linear-attention") from error
    # FLA remembers what it derived from a tensor by the tensor's identity: borders written into memory that is used again
    # would be taken for those of the pack before. It reads this flag at every call.
    fla.utils.FLA_DISABLE_TENSOR_CACHE = True

    def convolution(rows_TD: Tensor, weight_DW: Tensor, frame: Frame) -> Tensor:
        convolved, _ = causal_conv1d(
            rows_TD[None],
            weight_DW,
            activation="silu",
            backend="triton",
            cu_seqlens=frame.cu_seqlens_M,
            chunk_indices=frame.chunks_C2,
        )
        return _first(convolved)

    def delta_rule(query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, strength: Tensor, frame: Frame) -> Tensor:
        mixed, _ = chunk_gated_delta_rule(
            query[None],
            key[None],
            value[None],
            log_decay[None],
            strength[None],
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=frame.cu_seqlens_M,
            chunk_indices=frame.chunks_C2,
        )
        return _first(mixed)

    return convolution, delta_rule


def _first(batch: Any) -> Tensor:
    first: Tensor = batch[0]
    return first


def _missing(what: str, hint: str) -> TargetError:
    return TargetError(
        key="placement.device",
        value="cuda",
        rule=f"this target needs {what}, which cannot be had (torch {torch.__version__}); nothing slower takes its place",
        hint=hint,
    )
