"""Hidden states in eight bits: e4m3 values (`torch.float8_e4m3fn`) and one fp32 scale for each token and tap.

A scale is a power of two, the smallest at which the largest of its row is at most 448, e4m3's largest. Scaling is then
exact, forwards and back: what is lost is the rounding to three bits of mantissa alone (at most 1/16 of a value, 2.6 % root
mean square), values below 2^-17 of their row's largest become 0, and every device gives the same bytes. Rows whose largest
is below 2^-100 are 0, with scale 0. Not int8: a token with massive activations would leave no step for the others.

On CUDA one Triton kernel does each direction (`float8_kernel`); on a CPU plain torch, which is also the tests' reference.

Shape letters: R rows, of one tap · T context tokens · K tapped layers · D hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

DTYPE = torch.float8_e4m3fn
LARGEST = 448.0
"""Of e4m3: 1.75 * 2^8."""
_SMALLEST_TOP = 2.0**-100


def quantise_rows(
    hidden_RD: Tensor, *, values_RD: Tensor, scale_R: Tensor, bad_R: Tensor, num_tokens: Tensor | None = None
) -> None:
    """Write rows of one tap into a slot: e4m3 `values_RD` and fp32 `scale_R`, on the device and stream of all of them.

    A row with a value that is not finite gets the scale NaN, so that none of it comes back finite, and is flagged in `bad_R`
    (bool, never cleared here); its bytes are those of the row with 0 there. Rows from `num_tokens` int32 `[1]` on are padding:
    0, scale 0, not flagged. `values_RD` and `scale_R` may be columns of a slot.
    """
    assert values_RD.dtype == DTYPE, values_RD.dtype
    if values_RD.device.type == "cuda":
        from slipstream.device import float8_kernel  # here, not above: there is no Triton without a GPU

        float8_kernel.quantise_rows(hidden_RD, values_RD=values_RD, scale_R=scale_R, bad_R=bad_R, num_tokens=num_tokens)
        return
    wide_RD = hidden_RD.float()
    real_R = torch.ones_like(bad_R) if num_tokens is None else torch.arange(len(wide_RD)) < num_tokens
    finite_RD = torch.isfinite(wide_RD)
    spoilt_R = real_R & ~finite_RD.all(dim=-1)
    bad_R |= spoilt_R
    kept_RD = torch.where(finite_RD & real_R[:, None], wide_RD, 0.0)
    top_R = kept_RD.abs().amax(dim=-1)
    kept_RD = torch.where((top_R >= _SMALLEST_TOP)[:, None], kept_RD, 0.0)
    power_R, inverse_R = _powers(top_R)
    values_RD.copy_((kept_RD * inverse_R[:, None]).clamp(-LARGEST, LARGEST).to(DTYPE))
    scale_R.copy_(torch.where(top_R >= _SMALLEST_TOP, power_R, 0.0).masked_fill(spoilt_R, torch.nan))


def dequantise(values_TKD: Tensor, *, scale_TK: Tensor, out_TKD: Tensor) -> None:
    """Write `values * scale` into `out_TKD`, fp32 or bf16: exact, since bf16 holds every e4m3 value times a power of two.

    On CUDA nothing is allocated; all are contiguous.
    """
    assert values_TKD.dtype == DTYPE, values_TKD.dtype
    assert values_TKD.shape == out_TKD.shape, (values_TKD.shape, out_TKD.shape)
    if values_TKD.device.type == "cuda":
        from slipstream.device import float8_kernel

        float8_kernel.dequantise(values_TKD, scale_TK=scale_TK, out_TKD=out_TKD)
        return
    with torch.no_grad():
        out_TKD.copy_(values_TKD.float() * scale_TK[..., None])


def _powers(top_R: Tensor) -> tuple[Tensor, Tensor]:
    """The scale 2^n of each row, the least with top <= 448 * 2^n, and 2^-n, read off the exponent bits of fp32 `top_R`.

    Adding 0x1FFFFF carries into the exponent if the mantissa is above 1.75. The last binade of fp32 has no room for that:
    there values saturate at 448, so that what comes back is finite in bf16 too.
    """
    bits_R = top_R.clamp(min=_SMALLEST_TOP).view(torch.int32)
    exponent_R = ((bits_R.long() + 0x1FFFFF) >> 23).clamp(max=254)
    power_R, inverse_R = ((exponent_R - 8) << 23, (262 - exponent_R) << 23)
    return power_R.int().view(torch.float32), inverse_R.int().view(torch.float32)
