"""Masks in two halves: over arrays that have travelled they are the masks that `make_masks` makes at once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from block_cases import make_case, make_embedding, make_shape

from slipstream.drafter import build_drafter
from slipstream.drafter.mask_arrays import mask_arrays, masks_over

ARRAYS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
BACKWARD = ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")


def drafter_and_case(attention: str):
    shape = make_shape(layer_types=("full", "sliding"), window=9, block=8)
    case = make_case(lengths=(100, 60, 80), capacity=256, slots=96, block=8)
    return build_drafter(shape=shape, dtype="float32", device="cpu", seed=1, attention=attention), case


def test_flex_masks_are_the_same() -> None:
    drafter, case = drafter_and_case("flex")
    arrays = {name: torch.tensor(array) for name, array in mask_arrays(drafter, case.batch).items()}
    ours, wanted = masks_over(drafter, arrays, context_tokens=256), drafter.make_masks(case.batch)
    assert ours.keys() == wanted.keys() == {"full", "sliding"}
    for kind, mask in wanted.items():
        for name in (*ARRAYS, *BACKWARD):
            assert torch.equal(getattr(ours[kind], name), getattr(mask, name)), (kind, name)
        assert ours[kind].seq_lengths == mask.seq_lengths
        assert ours[kind].BLOCK_SIZE == mask.BLOCK_SIZE
        query, key = torch.arange(96 * 8)[:, None], torch.arange(256 + 96 * 8)[None]
        zero = torch.zeros((), dtype=torch.int64)
        assert torch.equal(ours[kind].mask_mod(zero, zero, query, key), mask.mask_mod(zero, zero, query, key)), kind


def test_a_pass_with_dense_masks_is_the_same() -> None:
    drafter, case = drafter_and_case("sdpa")
    arrays = {name: torch.tensor(array) for name, array in mask_arrays(drafter, case.batch).items()}
    masks = masks_over(drafter, arrays, context_tokens=256)
    results = [
        drafter(hidden_TKD=case.hidden_TKD, batch=case.batch, embedding_VD=make_embedding(), masks=given)
        for given in (masks, drafter.make_masks(case.batch))
    ]
    assert torch.allclose(results[0], results[1], atol=1e-5)
    dense = masks["full"][0].visible
    assert dense is not None
    assert dense.shape == (96 * 8, 256 + 96 * 8)


@pytest.mark.parametrize("attention", ["flex", "sdpa"])
def test_shapes_do_not_depend_on_the_anchors(attention: str) -> None:
    """They travel in slots of one size."""
    drafter, case = drafter_and_case(attention)
    other = make_case(lengths=(250,), capacity=256, slots=96, block=8, num_anchors=3).batch
    one, two = mask_arrays(drafter, case.batch), mask_arrays(drafter, other)
    assert {name: (array.shape, array.dtype) for name, array in one.items()} == {
        name: (array.shape, array.dtype) for name, array in two.items()
    }
    assert any(not np.array_equal(array, two[name]) for name, array in one.items())
