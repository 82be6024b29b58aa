"""Allocator settings of children: drafters' segments grow, the user's own settings stay, contradictions are refused."""

from __future__ import annotations

import pytest

from slipstream.errors import PreflightError
from slipstream.launch.allocator import allocator_settings


def test_drafters_get_segments_that_grow_and_targets_torchs_own() -> None:
    assert allocator_settings(role="drafter", environ={}) == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert allocator_settings(role="target", environ={}) == {}


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_what_the_user_set_stays(name: str) -> None:
    assert allocator_settings(role="drafter", environ={name: "backend:cudaMallocAsync"}) == {}


def test_two_settings_that_differ_are_refused() -> None:
    both = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}
    with pytest.raises(PreflightError, match=r"PYTORCH_CUDA_ALLOC_CONF.*max_split_size_mb:64.*expandable_segments:True"):
        allocator_settings(role="target", environ=both)
    both["PYTORCH_CUDA_ALLOC_CONF"] = both["PYTORCH_ALLOC_CONF"]
    assert allocator_settings(role="drafter", environ=both) == {}
