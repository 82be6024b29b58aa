"""Stage costs from the JSON of benches: scaled to the run's packs, refused where the bench was of another model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from slipstream.config import DrafterShape
from slipstream.plan.bench_costs import PartialCosts, RunShape, costs_of_bench, join_costs
from slipstream.plan.known_gpus import PackShape
from slipstream.plan.weights import TargetWeights

SHAPE = DrafterShape(
    num_layers=5, block_size=16, mask_token_id=0, tap_layers=(1, 16, 31, 46, 61), hidden_size=5120, intermediate_size=17408,
    num_attention_heads=32, num_key_value_heads=8, head_dim=128, vocab_size=248320, rms_norm_eps=1e-6, rope_theta=1e6,
    max_position_embeddings=4096, layer_types=("full",) * 5, sliding_window=None, num_target_layers=64, initializer_range=0.02,
)  # fmt: skip
PACK = PackShape(tokens=8128, squared_tokens=8128 * 1024, anchors=512)
RUN = RunShape(
    shape=SHAPE,
    weights=TargetWeights(layers=(380_000_000,) * 64, embedding=0, head=0, source="test"),
    pack=PACK,
    pack_tokens=8192,
)
TARGET: dict[str, Any] = {
    "shape": "qwen3.6-27b", "layers": 62, "matrix_parameters": 62 * 380_000_000, "real_tokens": 16256.0, "milliseconds": 1300.0,
}  # fmt: skip
DRAFTER: dict[str, Any] = {
    "milliseconds": 414.0, "phases": {"forward": 86.0, "optimizer": 14.0}, "parameters": SHAPE.num_parameters,
}  # fmt: skip
WORK = {"documents": 2, "document_tokens": 2048, "anchors": 1024, "packs": 1}


def test_a_targets_time_goes_with_tokens_and_layers() -> None:
    found = costs_of_bench({"device": "NVIDIA H200", "target": TARGET}, run=RUN)
    assert found == PartialCosts(target_seconds_per_pack=0.65, source="bench target on NVIDIA H200")
    half = {**TARGET, "layers": 31, "matrix_parameters": 31 * 380_000_000, "milliseconds": 650.0}
    assert costs_of_bench({"target": half}, run=RUN).target_seconds_per_pack == pytest.approx(0.65)


def test_a_drafters_time_goes_with_useful_work_and_its_optimizer_comes_once_a_step() -> None:
    same = replace(RUN, pack=PackShape(tokens=4096, squared_tokens=4096 * 2048, anchors=1024), pack_tokens=4096)
    found = costs_of_bench({"drafter": DRAFTER, "work": WORK}, run=same)
    assert found.drafter_seconds_per_use == pytest.approx(0.400)
    assert found.step_seconds == pytest.approx(0.014)
    other = costs_of_bench({"drafter": DRAFTER, "work": WORK}, run=RUN).drafter_seconds_per_use
    assert other is not None
    assert 0.2 < other < 0.4, "half the anchors, twice the context"
    three = costs_of_bench({"drafter": {**DRAFTER, "milliseconds": 1214.0}, "work": {**WORK, "packs": 3}}, run=same)
    assert three.drafter_seconds_per_use == pytest.approx(0.400)


def test_a_pipeline_knows_both_stages_and_what_they_take_together() -> None:
    pipeline = {
        "layers": 62, "real_tokens": 8128.0, "pack_tokens": 8192, "anchors": 512,
        "figures": [{"target_milliseconds": 650.0, "drafter_milliseconds": 300.0, "ratio": 0.97}],
    }  # fmt: skip
    found = costs_of_bench({"device": "NVIDIA H200", "shape": "qwen3.6-27b", "pipeline": pipeline}, run=RUN)
    costs = join_costs([found], run=RUN)
    assert costs.target_seconds_per_pack == pytest.approx(0.650)
    assert costs.drafter_seconds_per_use == pytest.approx(0.300)
    assert costs.colocated_ratio == 0.97
    assert costs.tokens_per_pack == 8128
    assert costs.source == "bench pipeline of qwen3.6-27b on NVIDIA H200"


def test_two_files_together_are_whole_and_one_alone_is_not() -> None:
    target = costs_of_bench({"target": TARGET}, run=RUN)
    drafter = costs_of_bench({"drafter": DRAFTER, "work": WORK}, run=RUN)
    costs = join_costs([target, drafter], run=RUN)
    assert costs.source == "bench target on an unnamed device, bench drafter on an unnamed device"
    with pytest.raises(ValueError, match="no file measured the drafter"):
        join_costs([target], run=RUN)
    with pytest.raises(ValueError, match="no file measured the target"):
        join_costs([drafter], run=RUN)


def test_benches_of_other_models_are_refused() -> None:
    with pytest.raises(ValueError, match=r"another target, qwen3.6-27b: 200.0 M weights a layer, this recipe's 380.0 M"):
        costs_of_bench({"target": {**TARGET, "matrix_parameters": 62 * 200_000_000}}, run=RUN)
    with pytest.raises(ValueError, match="of another drafter: 7 weights"):
        costs_of_bench({"drafter": {**DRAFTER, "parameters": 7}, "work": WORK}, run=RUN)
    assert costs_of_bench({"transport": {}}, run=RUN) == PartialCosts()
