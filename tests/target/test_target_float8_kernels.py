"""The kernels of float8 roundings against plain torch: on CUDA, or on a CPU in Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

from slipstream.target import float8_elementwise

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="only CUDA builds of torch bring Triton"),
    *([] if INTERPRETED else [pytest.mark.gpu]),
]


def assert_rounded_alike(left, right):
    """Equal steps, and equal values but for those near a border, which another exponential moves to the neighbour."""
    (values, step), (expected, expected_step) = left, right
    assert (values.dtype, values.shape, step.shape) == (expected.dtype, expected.shape, expected_step.shape)
    torch.testing.assert_close(step, expected_step, rtol=1e-5, atol=0)
    values, expected = values.float(), expected.float()
    compared = torch.ones_like(expected, dtype=torch.bool)
    if INTERPRETED:
        # The interpreter loses the carry of what rounds up to a power of two; 0 and what is below 2^-6 it rounds its own way.
        compared = (torch.frexp(expected).mantissa.abs() != 0.5) & (expected.abs() >= 2**-6)
        assert compared.float().mean() > 0.5
    values, expected = values[compared], expected[compared]
    assert ((values - expected).abs() <= 2**-3 * expected.abs() + 2**-9).all()
    assert (values != expected).float().mean() < 0.002


@pytest.mark.parametrize("width", [96, 2048, 2050, 5000])
def test_swiglu(width):
    from slipstream.target import float8_kernels

    torch.manual_seed(0)
    size = torch.tensor([1e-3, 0.0, 3.0, 100.0], device=DEVICE)[:, None]
    rows = (torch.randn(4, 2 * width, device=DEVICE) * size).bfloat16()
    assert_rounded_alike(float8_kernels.swiglu(rows), float8_elementwise.swiglu(rows))


@pytest.mark.parametrize(("heads", "size"), [(48, 128), (4, 16), (3, 24)])
def test_gated_norm(heads, size):
    """The gate is columns of a projection, as the mixer hands it over."""
    from slipstream.target import float8_kernels

    torch.manual_seed(1)
    mixed = torch.randn(5, heads, size, device=DEVICE).bfloat16()
    projected = torch.randn(5, 2 * heads * size + 64, device=DEVICE).bfloat16()
    gate, scale = projected[:, 64 : 64 + heads * size].unflatten(1, (heads, size)), torch.rand(size, device=DEVICE)
    given = mixed, gate, scale, 1e-6
    assert_rounded_alike(float8_kernels.gated_norm(*given), float8_elementwise.gated_norm(*given))


@pytest.mark.skipif(INTERPRETED, reason="the interpreter has no NaN in e4m3")
def test_what_is_not_finite_spoils_its_own_row_alone():
    from slipstream.target import float8_kernels

    torch.manual_seed(2)
    rows = torch.randn(4, 2 * 300, device=DEVICE).bfloat16()
    clean, clean_step = float8_kernels.swiglu(rows)
    rows[1, 5], rows[2, 299] = float("nan"), float("inf")
    values, step = float8_kernels.swiglu(rows)
    back = values.float() * step[:, None]
    assert torch.isfinite(back).all(dim=1).tolist() == [True, False, False, True]
    for row in (0, 3):
        assert torch.equal(values[row].float(), clean[row].float())
        assert step[row] == clean_step[row]
