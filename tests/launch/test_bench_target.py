"""What the target's bench claims to measure: the true shapes, and the formula of useful work. Its timing needs a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModel

from slipstream.errors import UsageError
from slipstream.launch.bench import Ceilings
from slipstream.launch.bench.target import TARGETS, measure_target, mixed_pack, random_info, useful_flops
from slipstream.target.isolation import pack_documents


def matrix_parameters(config) -> int:
    with torch.device("meta"):
        model = AutoModel.from_config(config, dtype=torch.bfloat16)
    return sum(weight.numel() for weight in model.layers.parameters() if weight.ndim == 2)


@pytest.mark.parametrize(("shape", "billions"), [("qwen3.6-27b", 24.351), ("qwen3-8b", 6.946), ("smollm2", 0.106)])
def test_shapes_have_the_parameters_of_their_models(shape, billions):
    assert matrix_parameters(TARGETS[shape]()) / 1e9 == pytest.approx(billions, abs=5e-4)


def test_the_hybrid_is_three_delta_nets_to_one_attention():
    config = TARGETS["qwen3.6-27b"]()
    assert config.layer_types == (["linear_attention"] * 3 + ["full_attention"]) * 16
    assert random_info(config).is_hybrid
    assert not random_info(TARGETS["smollm2"]()).is_hybrid


@pytest.mark.parametrize("tokens", [4096, 8192, 16384])
def test_packs_hold_documents_of_mixed_lengths_and_a_little_padding(tokens):
    packs = [mixed_pack(tokens, vocab_size=100, seed=seed) for seed in (1, 2)]
    for pack in packs:
        lengths = np.diff(pack.starts)
        assert 0.98 * tokens <= pack.num_tokens < tokens
        assert lengths.max() > 3 * lengths.min()
    assert packs[0].starts.tolist() != packs[1].starts.tolist()


def test_useful_work_is_two_per_parameter_and_token_and_the_causal_half_of_attention():
    config = TARGETS["qwen3.6-27b"]()
    ids = np.zeros(30, dtype=np.int32)
    pack = pack_documents([ids[:10], ids[:20]], capacity_tokens=64)
    assert useful_flops(config, parameters=7, pack=pack, layers=3) == 2 * 7 * 30
    assert useful_flops(config, parameters=0, pack=pack, layers=8) == 2 * 2 * 24 * 256 * (10**2 + 20**2)


def test_unknown_shapes_are_refused():
    with pytest.raises(UsageError, match=r"qwen3\.6-27b, qwen3-8b, smollm2"):
        measure_target(shape="x", pack_tokens=1024, ceilings=Ceilings(1.0, 1.0, 1.0), say=print)
