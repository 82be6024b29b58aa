"""The table of known GPUs: the H200's own measurements come out of it, names are told apart, small models hit the floor."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from slipstream.config import DrafterShape, TargetInfo
from slipstream.config.target_info import spread_taps
from slipstream.plan.flops import drafter_flops, target_flops
from slipstream.plan.known_gpus import BETWEEN_SECONDS, KNOWN_GPUS, REPLAY_SECONDS, PackShape, estimate_costs, find_gpu
from slipstream.plan.throughput import Layout, StageCosts, Workload, predict
from slipstream.plan.weights import TargetWeights


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA A100-PCIE-40GB", "A100 40GB"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000 Blackwell"),
        ("NVIDIA B200", "B200"),
        ("h200", "H200"),
    ],
)
def test_names_of_drivers(name: str, found: str) -> None:
    gpu = find_gpu(name)
    assert gpu is not None
    assert gpu.name == found


def test_a_name_that_is_not_in_the_table_is_not_guessed_at() -> None:
    assert find_gpu("Tesla V100-SXM2-16GB") is None
    assert find_gpu("NVIDIA L400") is None


def test_every_name_of_the_table_finds_its_own_line() -> None:
    assert [find_gpu(gpu.name) for _, gpu in KNOWN_GPUS] == [gpu for _, gpu in KNOWN_GPUS]


def shapes(
    *, hidden: int, intermediate: int, layers: int, heads: int, vocab: int, kv_heads: int = 8, head_dim: int = 128
) -> tuple[TargetInfo, DrafterShape]:
    common = {
        "hidden_size": hidden, "intermediate_size": intermediate, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "head_dim": head_dim, "vocab_size": vocab, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 4096,
        "sliding_window": None,
    }  # fmt: skip
    info = TargetInfo(
        folder=Path("none"), model_type="qwen3", num_layers=layers, tie_word_embeddings=False, bos_token_id=None,
        layer_types=("full_attention",) * layers, eos_token_ids=(), pad_token_id=None, **common,
    )  # fmt: skip
    shape = DrafterShape(
        num_layers=5, block_size=16, mask_token_id=0, tap_layers=spread_taps(num_layers=layers, num_taps=5),
        layer_types=("full",) * 5, num_target_layers=layers, initializer_range=0.02, **common,
    )  # fmt: skip
    return info, shape


def test_the_drafter_of_a_27b_target_takes_what_an_h200_was_measured_to_take() -> None:
    """412 ms a step of 4,096 tokens and 1,024 anchors, its optimizer's 14 ms included."""
    info, shape = shapes(hidden=5120, intermediate=17408, layers=64, heads=32, vocab=248320)
    gpu = find_gpu("H200")
    assert gpu is not None
    assert gpu.measured
    costs = estimate_costs(
        gpu=gpu,
        info=info,
        shape=shape,
        weights=TargetWeights(layers=(380_000_000,) * 64, embedding=0, head=0, source="test"),
        pack=PackShape(tokens=4096, squared_tokens=2 * 2048**2, anchors=1024),
        pack_tokens=4096,
    )
    assert costs.drafter_seconds_per_use + costs.step_seconds == pytest.approx(0.412, rel=0.05)
    assert costs.target_seconds_per_pack == pytest.approx(2 * 62 * 0.38e9 * 4096 / 591e12, rel=0.05)
    assert costs.source == "table: H200, ratios measured"
    slower = find_gpu("RTX 4090")
    assert slower is not None
    assert "estimated" in slower.source


def test_the_drafter_of_an_8b_target_takes_about_what_an_h200_was_measured_to_take() -> None:
    """242.5 ms, its optimizer's 9 ms included; not among what the shares were taken from."""
    info, shape = shapes(hidden=4096, intermediate=12288, layers=36, heads=32, vocab=151936)
    gpu = find_gpu("H200")
    assert gpu is not None
    costs = estimate_costs(
        gpu=gpu, info=info, shape=shape,
        weights=TargetWeights(layers=(190_000_000,) * 36, embedding=0, head=0, source="test"),
        pack=PackShape(tokens=4096, squared_tokens=2 * 2048**2, anchors=1024), pack_tokens=4096,
    )  # fmt: skip
    assert costs.drafter_seconds_per_use + costs.step_seconds == pytest.approx(0.2425, rel=0.07)
    assert costs.colocated_ratio == 1
    assert "launching" not in costs.source


def small(
    graphs: Literal["auto", "on", "off"] = "auto", *, replays: int = 1, name: str = "H200", target_recordable: bool = False
) -> StageCosts:
    """SmolLM2-135M and its drafter, on an average pack of its runs on GSM8K. There the target was launched kernel by kernel."""
    info, shape = shapes(hidden=576, intermediate=1536, layers=30, heads=9, vocab=49152, kv_heads=3, head_dim=64)
    gpu = find_gpu(name)
    assert gpu is not None
    return estimate_costs(
        gpu=gpu, info=info, shape=shape,
        weights=TargetWeights(layers=(3_540_000,) * 30, embedding=0, head=0, source="test"),
        pack=PackShape(tokens=4060, squared_tokens=4060 * 285, anchors=959), pack_tokens=4096,
        replays=replays, cuda_graphs=graphs, target_recordable=target_recordable,
    )  # fmt: skip


def test_a_small_model_takes_what_an_h200_was_measured_to_take() -> None:
    """In two runs the drafter's replayed use took 13.5 ms, launching the target 25.5 and 24.6 ms, and a step 32.0 and 30.9 ms
    without its validations: 126.9K and 131.5K tokens/s."""
    costs = small()
    assert costs.drafter_seconds_per_use == pytest.approx(0.0135, rel=0.05)
    assert costs.target_seconds_per_pack == pytest.approx(0.0250, rel=0.05)
    found = predict(costs=costs, layout=Layout("colocated", 0, 1), work=Workload(packs_per_step=1, replays=1, num_steps=1))
    assert found.trained_tokens_per_second == pytest.approx(129_200, rel=0.10)
    assert costs.source == "table: H200, ratios measured; paced by launching, which goes with the CPU"


def test_one_stage_is_launched_while_the_device_works_on_the_other() -> None:
    costs = small()
    thread = costs.target_seconds_per_pack + REPLAY_SECONDS + BETWEEN_SECONDS
    together = (costs.target_seconds_per_pack + costs.drafter_seconds_per_use) / costs.colocated_ratio
    assert together == pytest.approx(thread)
    often = small(replays=4)
    device = often.target_seconds_per_pack / 4 + often.drafter_seconds_per_use
    assert 1 < often.colocated_ratio < device / often.drafter_seconds_per_use


def test_without_recordings_the_drafter_takes_as_long_as_it_is_launched() -> None:
    """29.6 ms of a step of 30.2, launched."""
    costs = small("off")
    assert costs.drafter_seconds_per_use == pytest.approx(0.0302, rel=0.06)
    assert costs.colocated_ratio == pytest.approx(1)
    assert small("on") == small("auto")


def test_a_target_that_is_replayed_takes_what_its_device_does() -> None:
    """NVML saw kernels for 16 to 17 ms of a step in those runs, 13.7 of which were the drafter's."""
    costs = small(target_recordable=True)
    assert costs.target_seconds_per_pack == pytest.approx(0.0033, abs=0.0007)
    assert costs.colocated_ratio == pytest.approx(1)
    assert costs.source == "table: H200, ratios measured"


def test_narrow_models_are_slower_where_a_gpu_has_more_arithmetic_for_its_bandwidth() -> None:
    """An L4 multiplies 8.2 times as slowly as an H200, and reads 16 times as slowly."""
    assert 8.2 < small(name="L4").drafter_seconds_per_use / small().drafter_seconds_per_use < 16
    assert small(name="L4").source == "table: L4, estimated from ratios of an H200"


def test_useful_work_counts_matrices_and_the_causal_half() -> None:
    assert (
        target_flops(matrix_parameters=1000, tokens=10, attention_layers=2, attention_width=8, squared_tokens=50)
        == 2 * 1000 * 10 + 2 * 2 * 8 * 50
    )
    _, shape = shapes(hidden=64, intermediate=128, layers=12, heads=8, vocab=100)
    base = drafter_flops(shape=shape, tokens=128, anchors=8, visible_pairs=0, rows=0)
    assert drafter_flops(shape=shape, tokens=128, anchors=8, visible_pairs=0, rows=7) - base == 2 * 2 * 7 * 64 * 100
    assert drafter_flops(shape=shape, tokens=128, anchors=8, visible_pairs=3, rows=0) - base == 2 * 3 * 5 * 2 * 3 * 8 * 128
