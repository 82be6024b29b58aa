"""Eight-bit rows: what rounding may lose, what it may not touch; and the kernels, which must give the reference's bytes.

The kernels run on CUDA, or on a CPU in Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest
import torch

from slipstream.device import float8

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="only CUDA builds of torch bring Triton")
kernel_test = [needs_triton] if INTERPRETED else [needs_triton, pytest.mark.gpu]


def hard_rows(width: int, *, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Rows of all magnitudes, with massive activations, zeros of both signs, halfway cases, and what is not finite."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(40, width, generator=generator) * 2.0 ** torch.randint(-60, 60, (40, 1), generator=generator)
    rows[0] = 0.0
    rows[1] = -0.0
    rows[2, 3] = 3000 * rows[2].abs().max()
    rows[3] *= 2.0 ** torch.randint(-30, 1, (width,), generator=generator)
    steps = torch.arange(width) % 32
    rows[4] = (steps + 0.5) * 2.0**-9  # halfway between subnormals of e4m3, with a largest that makes the scale 1
    rows[4, -1] = 448.0
    rows[5] = (16 + steps.float() / 2) * 4.0  # halfway between normal ones
    rows[5, -1] = 300.0
    rows[6, 0] = float("nan")
    rows[7, 5] = float("inf")
    rows[8] = float("-inf")
    rows[9] *= 2.0**-110
    rows[10] = 2.0**-126 * rows[10].sign()
    rows[11, 7] = torch.finfo(torch.bfloat16).max
    rows[12, 7] = 448.0 * 2**5
    rows[12] = rows[12].clamp(-448.0 * 2**5, 448.0 * 2**5)
    rows[13, 7] = torch.nextafter(torch.tensor(448.0), torch.tensor(449.0))
    rows[13] = rows[13].clamp(-449, 449)
    return rows.to(dtype)


def quantised(
    rows: torch.Tensor, *, how: Any = float8, num_tokens: int | None = None, taps: int = 3
) -> tuple[torch.Tensor, ...]:
    """Values, scales and flags of rows that were written into the middle tap of a slot full of NaN, on the CPU."""
    values = torch.full((len(rows), taps, rows.shape[1]), 0x7F, dtype=torch.uint8, device=rows.device).view(float8.DTYPE)
    scale = torch.full((len(rows), taps), float("nan"), device=rows.device)
    bad = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
    limit = None if num_tokens is None else torch.tensor([num_tokens], dtype=torch.int32, device=rows.device)
    how.quantise_rows(rows, values_RD=values[:, 1], scale_R=scale[:, 1], bad_R=bad, num_tokens=limit)
    untouched = values.view(torch.uint8)[:, [0, 2]]
    assert bool((untouched == 0x7F).all())
    assert bool(scale[:, [0, 2]].isnan().all())
    return values[:, 1].contiguous().cpu(), scale[:, 1].contiguous().cpu(), bad.cpu()


def restored(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    out = torch.full(values.shape, 7.0, dtype=dtype)
    float8.dequantise(values, scale_TK=scale, out_TKD=out)
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_error_is_at_most_a_sixteenth_of_the_value_or_half_a_step(dtype: torch.dtype) -> None:
    rows = hard_rows(96, dtype=dtype)
    values, scale, bad = quantised(rows)
    finite = torch.isfinite(rows.float())
    assert torch.equal(bad, ~finite.all(dim=1))
    assert torch.equal(scale.isnan(), bad)
    assert bool(restored(values, scale)[bad].isnan().all()), "nothing of such a row comes back finite"
    rows, values, scale = rows[~bad], values[~bad], scale[~bad]
    wanted = rows.float()
    top = wanted.abs().amax(dim=1)
    tiny = top < 2.0**-100
    assert bool((scale[tiny] == 0).all())
    assert not values[tiny].view(torch.uint8).any()
    error = (restored(values, scale) - wanted).abs()
    saturated = rows.float().abs() > 448 * 2.0**119  # the last binade: the largest bf16
    allowed = torch.maximum(wanted.abs() / 16, scale[:, None] * 2.0**-10)
    allowed = torch.where(saturated, wanted.abs() / 8, allowed)
    assert bool((error <= allowed)[~tiny].all())
    normal = torch.randn(64, 1024, generator=torch.Generator().manual_seed(1))
    found = restored(*quantised(normal)[:2])
    assert 0.020 < float((found - normal).norm() / normal.norm()) < 0.028


def test_scales_are_the_least_powers_of_two_that_fit() -> None:
    rows = hard_rows(96, dtype=torch.float32)
    rows = rows[torch.isfinite(rows).all(dim=1)]
    values, scale, _ = quantised(rows)
    top = rows.abs().amax(dim=1)
    used = (top >= 2.0**-100) & (top < 2.0**127)
    mantissa, _ = torch.frexp(scale[used])
    assert bool((mantissa == 0.5).all())
    assert bool((top[used] <= 448 * scale[used]).all())
    assert bool((top[used] > 224 * scale[used]).all())
    assert not bool(values.float().isnan().any())


def test_bf16_holds_what_comes_back_and_taking_it_again_changes_nothing() -> None:
    rows = hard_rows(96, dtype=torch.bfloat16)
    values, scale, _ = quantised(rows[torch.isfinite(rows).all(dim=1)])
    wide, narrow = restored(values, scale), restored(values, scale, torch.bfloat16)
    assert torch.equal(wide, narrow.float())
    assert bool(torch.isfinite(narrow).all())
    again = quantised(narrow)
    assert torch.equal(restored(*again[:2]), wide)


def test_padding_is_zero_whatever_stood_there() -> None:
    rows = torch.full((40, 64), float("nan"))
    rows[:5] = 1.5
    values, scale, bad = quantised(rows, num_tokens=5)
    assert not bad.any()
    assert not values[5:].view(torch.uint8).any()
    assert not scale[5:].any()
    assert bool((restored(values, scale)[:5] == 1.5).all())


@pytest.mark.parametrize("width", [96, 576] if INTERPRETED else [96, 576, 4096, 5120])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_tokens", [None, 33])
@pytest.mark.parametrize("marked", [pytest.param(None, marks=kernel_test)], ids=["kernel"])
def test_the_kernels_bytes_are_the_references(width: int, dtype: torch.dtype, num_tokens: int | None, marked: None) -> None:
    from slipstream.device import float8_kernel

    for seed in range(2 if INTERPRETED else 8):
        rows = hard_rows(width, dtype=dtype, seed=seed)
        values, scale, bad = quantised(rows, num_tokens=num_tokens)
        found = quantised(rows.to(DEVICE), how=float8_kernel, num_tokens=num_tokens)
        assert torch.equal(found[0].view(torch.uint8), values.view(torch.uint8))
        torch.testing.assert_close(found[1], scale, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(found[2], bad)
        out = torch.full(values.shape, 7.0, dtype=dtype, device=DEVICE)
        float8_kernel.dequantise(values.to(DEVICE), scale_TK=scale.to(DEVICE), out_TKD=out)
        torch.testing.assert_close(out.cpu(), restored(values, scale, dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("marked", [pytest.param(None, marks=kernel_test)], ids=["kernel"])
def test_the_kernel_reads_every_code(marked: None) -> None:
    from slipstream.device import float8_kernel

    codes = torch.arange(256, dtype=torch.uint8)
    codes[[0x7F, 0xFF]] = 0  # NaN, which is never written
    values, scale = codes.view(float8.DTYPE).view(1, 1, 256), torch.full((1, 1), 2.0**-3)
    out = torch.empty(1, 1, 256, device=DEVICE)
    float8_kernel.dequantise(values.to(DEVICE), scale_TK=scale.to(DEVICE), out_TKD=out)
    assert torch.equal(out.cpu(), values.float() * 2.0**-3)
