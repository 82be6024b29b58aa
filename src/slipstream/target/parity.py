"""What `slipstream check` proves of a target before anything is trained on it: that what we capture is what the model computes.

Shape letters as in `capture`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from slipstream.config import TargetInfo
from slipstream.errors import TargetError
from slipstream.records import Pack
from slipstream.target.huggingface import HuggingFaceTarget, load_target
from slipstream.target.layouts import Forward, Packing, lay_out
from slipstream.target.loading import load_decoder

TOLERANCE: dict[str, float] = {"float32": 1e-5, "bfloat16": 2e-2}
"""Closeness relative to a tap's maximum, where another shape of forward moves the rounding."""

FLOAT8_TOLERANCE = 0.25
"""Mean error of a token's hidden state that float8 may cause: a rounded product is off by 0.037 of its norm, and layers add up.
0.077 was computed behind 28 layers of SmolLM2-135M on its own answers; random weights multiply it."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One proof: what was `measured`, at most what is `allowed`, and whether that holds. `detail` says it in words."""

    name: str
    passed: bool
    measured: float
    allowed: float
    detail: str


def check_target(
    *,
    info: TargetInfo,
    dtype: str,
    tap_layers: Sequence[int],
    pack: Pack,
    device: str = "cpu",
    packing: str = "auto",
    block_parity: Callable[[Tensor], CheckResult] | None = None,
    on_progress: Callable[[int, int, str], None] = lambda done, of, text: None,
) -> list[CheckResult]:
    """Prove a target on one pack: ascending taps, isolation, captured states, packed against alone, finite states, and blocks.

    Captured states are compared with `output_hidden_states` of the whole model, per tap, relative to the tap's maximum;
    isolation is by perturbation and exactly 0. `block_parity`, given the captured states, compares the drafter's train-mode
    block with its decode-mode block. The pack needs two documents or more. A float8 target is compared with the whole model in
    bfloat16, each document alone, per tap, by `row_error`. Raises `TargetError` where the target cannot be loaded as asked; a
    proof that fails is a result. `on_progress(done, of, what)` hears of each stage as it begins.
    """
    if pack.num_documents < 2:
        raise TargetError(key="prompts", value=pack.num_documents, rule="isolation needs two documents or more in the pack")
    on_progress(0, 5, "loads the target up to its last tap")
    target = load_target(info=info, dtype=dtype, tap_layers=tap_layers, device=device, packing=packing)
    on_progress(1, 5, "changes documents, captures states")
    results = [_check_taps(target), *_check_isolation(target, pack=pack)]
    captured_TKD = target.hidden_states(pack, packing=target.packing)
    bad_rows = int(target.bad_rows)
    results.append(CheckResult("finite", bad_rows == 0, float(bad_rows), 0.0, "token rows that are not finite"))
    packing_used = target.packing
    # The cut model goes before the whole one comes: a large target fits once.
    del target
    on_progress(2, 5, "loads the whole target")
    model = load_decoder(info=info, dtype=dtype, device=device)
    on_progress(3, 5, "computes its own hidden states")
    alone_TKD = _reference(model, pack=pack, tap_layers=tap_layers, packing=Packing.ALONE)
    if dtype == "float8":
        results += _check_float8(captured_TKD, alone_TKD, pack=pack, tap_layers=tap_layers)
    else:
        same_TKD = _reference(model, pack=pack, tap_layers=tap_layers, packing=packing_used)
        results += _check_taps_equal(captured_TKD, same_TKD, tap_layers=tap_layers, allowed=TOLERANCE[dtype])
        results.append(_check_alone(captured_TKD, alone_TKD, packing=packing_used, allowed=TOLERANCE[dtype]))
    if block_parity is not None:
        on_progress(4, 5, "trains and serves blocks")
        results.append(block_parity(captured_TKD))
    on_progress(5, 5, "done")
    return results


def relative_difference(left_TKD: Tensor, right_TKD: Tensor) -> Tensor:
    """Largest difference of each tap `[K]`, as a share of the tap's maximum on the right."""
    left, right = left_TKD.float(), right_TKD.float()
    scale_K = right.abs().amax(dim=(0, 2)).clamp(min=torch.finfo(torch.float32).tiny)
    return (left - right).abs().amax(dim=(0, 2)) / scale_K


def row_error(left_TKD: Tensor, right_TKD: Tensor) -> Tensor:
    """Norm of the difference of a token's hidden state over the norm on the right, mean over the tokens, for each tap `[K]`.

    By token, since a few of them can be larger than all others together. Rows that are 0 on the right are left out.
    """
    size_TK = right_TKD.float().norm(dim=-1)
    error_TK = (left_TKD.float() - right_TKD.float()).norm(dim=-1) / size_TK
    real_TK = size_TK > 0
    mean_K: Tensor = error_TK.where(real_TK, 0.0).sum(dim=0) / real_TK.sum(dim=0).clamp(min=1)
    return mean_K


def _check_taps(target: HuggingFaceTarget) -> CheckResult:
    taps, last = target.tap_layers, target.info.num_layers - 2
    ascending = all(left < right for left, right in pairwise(taps))
    detail = f"layers {list(taps)}, ascending, below the last"
    return CheckResult("taps", ascending and taps[-1] <= last, float(taps[-1]), float(last), detail)


def _check_isolation(target: HuggingFaceTarget, *, pack: Pack) -> list[CheckResult]:
    leak = target.leak(packing=target.packing, pack=pack)
    how = f"{target.packing.value}; the document itself moved by {leak.own:.2g}"
    felt = leak.own > 0
    return [
        CheckResult("isolation", felt and leak.others == 0, leak.others, 0.0, f"change in other documents, {how}"),
        CheckResult(
            "isolation, next 8",
            felt and leak.next_first == 0,
            leak.next_first,
            0.0,
            "change in the next document's first 8 tokens",
        ),
    ]


def _check_taps_equal(
    captured_TKD: Tensor, reference_TKD: Tensor, *, tap_layers: Sequence[int], allowed: float
) -> list[CheckResult]:
    difference_K = relative_difference(captured_TKD, reference_TKD).tolist()
    return [
        CheckResult(
            f"capture, layer {tap}",
            difference <= allowed,
            difference,
            allowed,
            f"hidden_states[{tap + 1}] of the whole model",
        )
        for tap, difference in zip(tap_layers, difference_K, strict=True)
    ]


def _check_float8(captured_TKD: Tensor, reference_TKD: Tensor, *, pack: Pack, tap_layers: Sequence[int]) -> list[CheckResult]:
    tokens = slice(0, pack.num_tokens)
    error_K = row_error(captured_TKD[tokens], reference_TKD[tokens]).tolist()
    return [
        CheckResult(
            f"float8, layer {tap}",
            error <= FLOAT8_TOLERANCE,
            error,
            FLOAT8_TOLERANCE,
            f"mean error of a token against hidden_states[{tap + 1}] of the whole model in bfloat16",
        )
        for tap, error in zip(tap_layers, error_K, strict=True)
    ]


def _check_alone(captured_TKD: Tensor, alone_TKD: Tensor, *, packing: Packing, allowed: float) -> CheckResult:
    difference = float(relative_difference(captured_TKD, alone_TKD).max())
    detail = "each document in a forward of its own"
    return CheckResult(f"{packing.value} against alone", difference <= allowed, difference, allowed, detail)


@torch.inference_mode()
def _reference(model: Any, *, pack: Pack, tap_layers: Sequence[int], packing: Packing) -> Tensor:
    """Hidden states `[T, K, D]` as the whole model itself reports them, padding rows 0."""
    shape = (pack.capacity_tokens, len(tap_layers), model.config.hidden_size)
    reference_TKD = torch.zeros(shape, dtype=model.dtype, device=model.device)
    for forward in lay_out(pack, packing=packing):
        hidden_states = _all_hidden_states(model, forward)
        for span in forward.spans:
            for tap, layer in enumerate(tap_layers):
                rows_SD = hidden_states[layer + 1][span.row, : span.length]
                reference_TKD[span.start : span.start + span.length, tap] = rows_SD
    return reference_TKD


def _all_hidden_states(model: Any, forward: Forward) -> tuple[Tensor, ...]:
    output = model(
        input_ids=torch.from_numpy(forward.token_ids).to(model.device),
        position_ids=torch.from_numpy(forward.position_ids).to(model.device),
        use_cache=False,
        output_hidden_states=True,
    )
    states: tuple[Tensor, ...] = output.hidden_states
    return states
