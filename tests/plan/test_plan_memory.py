"""Closed forms of memory, against tensors' sizes and the transport's own layout; refusals."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from slipstream.config import make_recipe, read_target_info, resolve_drafter
from slipstream.errors import PlanError
from slipstream.plan import owned_columns, plan_memory, resolve_placement, slot_bytes
from slipstream.plan.memory import GIB
from slipstream.plan.memory_processes import NCCL_BYTES, Processes
from slipstream.plan.weights import count_target_weights
from slipstream.transport.layout import SlotLayout

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "tie_word_embeddings": False,
}
LAYER = {
    "self_attn.q_proj.weight": (64, 64),
    "self_attn.k_proj.weight": (32, 64),
    "self_attn.v_proj.weight": (32, 64),
    "self_attn.o_proj.weight": (64, 64),
    "mlp.gate_proj.weight": (160, 64),
    "mlp.up_proj.weight": (160, 64),
    "mlp.down_proj.weight": (64, 160),
    "input_layernorm.weight": (64,),
    "post_attention_layernorm.weight": (64,),
}


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A dense target: its config and no weights."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def recipe_of(target: Path, **sections):
    """A recipe for that target."""
    raw = {
        "name": "memory",
        "target": {"model": str(target), "num_taps": 3},
        "corpus": {"path": "corpus"},
        "plan": {"pack_tokens": 256, "pack_anchors": 32, "packs_per_step": 4},
        "drafter": {"mask_token_id": 3, "num_layers": 2, "block_size": 8},
        "placement": {"cuda_graphs": "off"},
    }
    for name, section in sections.items():
        raw[name] = raw.get(name, {}) | section
    return make_recipe(raw)


def memory_of(target: Path, *, slots: int = 3, device: str = "cpu", **sections):
    """The memory plan of such a recipe."""
    recipe, info = recipe_of(target, **sections), read_target_info(str(target))
    return plan_memory(
        recipe=recipe,
        info=info,
        shape=resolve_drafter(recipe=recipe, info=info),
        schedule_slots_per_column=slots,
        device=device,
    )


def item(process, name: str) -> int:
    """Bytes of one item."""
    (found,) = [entry.nbytes for entry in process.items if entry.name == name]
    return found


@pytest.mark.parametrize("last_hidden", [False, True])
@pytest.mark.parametrize(
    ("tokens", "taps", "hidden", "dtype"),
    [
        (128, 5, 64, "bfloat16"),
        (384, 3, 6, "float32"),
        (128, 1, 5, "bfloat16"),
        (128, 5, 64, "float8_e4m3"),
        (384, 3, 7, "float8_e4m3"),
    ],
)
def test_a_slot_is_as_large_as_the_transport_makes_it(tokens, taps, hidden, dtype, last_hidden):
    layout = SlotLayout(pack_tokens=tokens, num_taps=taps, hidden_size=hidden, dtype=dtype, last_hidden=last_hidden)
    assert (
        slot_bytes(pack_tokens=tokens, num_taps=taps, hidden_size=hidden, dtype=dtype, last_hidden=last_hidden) == layout.nbytes
    )


def test_dense_weights_by_formula_equal_those_in_the_files(target):
    by_formula = count_target_weights(read_target_info(str(target)))
    assert by_formula.source == "dense formula"
    tensors = {f"model.layers.{i}.{name}": np.zeros(shape, np.float32) for i in range(8) for name, shape in LAYER.items()}
    ends = {"model.embed_tokens.weight": np.zeros((256, 64), np.float32), "lm_head.weight": np.zeros((256, 64), np.float32)}
    tower = {"model.visual.layers.0.weight": np.zeros(99999, np.float32)}
    save_file({**tensors, **ends, **tower}, target / "model.safetensors")
    by_header = count_target_weights(read_target_info(str(target)))
    assert by_header.source == "file headers"
    assert by_header.layers == by_formula.layers
    assert (by_header.embedding, by_header.head) == (256 * 64, 256 * 64)


def test_experts_are_counted_from_the_files(target):
    tensors = {
        f"model.layers.{i}.mlp.experts.{e}.up.weight": np.zeros((10, 64), np.float32) for i in range(8) for e in range(20)
    }
    save_file(tensors, target / "model.safetensors")
    assert count_target_weights(read_target_info(str(target))).layers == (20 * 640,) * 8
    (target / "model.safetensors").write_bytes(b"\xff" * 64)
    assert count_target_weights(read_target_info(str(target))).source == "dense formula"


def test_items_are_the_sizes_of_the_tensors(target):
    memory = memory_of(target)
    colocated, runs_target, drafter = memory.processes
    layer = sum(int(np.prod(shape)) for shape in LAYER.values())
    # Taps are spread over layers 1 to 5, so layers 0 to 5 are kept.
    assert item(runs_target, "target weights") == (256 * 64 + 6 * layer) * 2
    # two norms of heads a layer, 16 wide, take 64 elements each
    weights = 2 * (layer + 2 * 64) + 3 * 64 * 64 + 2 * 64
    assert item(drafter, "drafter weights") == weights * 2
    assert item(drafter, "master weights, two moments, gradient sum") == weights * 16
    assert item(drafter, "frozen embedding") == item(drafter, "frozen head") == 256 * 64 * 2
    assert item(drafter, "pack in use") == 256 * 3 * 64 * 2
    assert item(drafter, "logits of a chunk") == (32 * 7 * 2 + 64 * 4) * 256
    assert item(drafter, "attention masks") == 256 * (64 + 128) * 3
    assert {entry.name for entry in colocated.items} == {entry.name for entry in (*runs_target.items, *drafter.items)}
    assert memory.slot_nbytes == 256 * 3 * 64 * 2
    assert memory.num_slots == 4 * 3
    assert memory.total_bytes("split") == runs_target.peak_bytes + drafter.peak_bytes + memory.host_slot_bytes


def test_fp32_masters_are_the_weights_themselves(target):
    drafter = memory_of(target, drafter={"dtype": "float32"}).of("split")[1]
    assert item(drafter, "drafter weights") == 0


def test_answering_is_a_process_of_its_own_before_all_others(target):
    plain, answering = memory_of(target), memory_of(target, validation={"prompts": "x.jsonl", "max_new_tokens": 4096})
    for mode in ("split", "colocated"):
        process = answering.of(mode)[-1]
        assert process.role == "answers"
        assert item(process, "whole target") > item(answering.of("split")[0], "target weights")
        assert process.peak_bytes > plain.total_bytes(mode)
        assert answering.total_bytes(mode) == process.peak_bytes


def test_kernels_without_a_dense_mask_do_not_pay_for_one(target):
    names = [entry.name for process in memory_of(target, device="cuda").processes for entry in process.items]
    assert not [name for name in names if "mask" in name]
    dense = memory_of(target, device="cuda", drafter={"attention": "sdpa"}).of("split")[1]
    assert item(dense, "attention masks") == 256 * 512 * 3


def test_device_slots_of_each_role(target):
    memory = memory_of(target, device="cuda")
    slot = memory.slot_nbytes
    colocated, runs_target, drafter = memory.processes
    assert item(runs_target, "device slots") == 2 * slot
    assert item(drafter, "device buffers of packs") == 3 * slot
    assert item(colocated, "slots on the device") == 2 * slot
    recipe, info = recipe_of(target), read_target_info(str(target))
    shape = resolve_drafter(recipe=recipe, info=info)
    arguments = {"recipe": recipe, "info": info, "shape": shape, "schedule_slots_per_column": 3, "device": "cuda"}
    with_guest = plan_memory(**arguments, validation_slots=4)
    assert item(with_guest.of("split")[1], "device buffers of packs") == 4 * slot
    assert item(with_guest.of("colocated")[0], "slots on the device") == 6 * slot
    weights = count_target_weights(info)
    processes = Processes(recipe=recipe, info=info, shape=shape, weights=weights, device="cuda")
    room = processes.room(gpu_memory_bytes=2 * GIB)
    without = 2 * GIB * 0.95 - room
    just = int((without + 2 * slot) / 0.95) + 1
    assert item(plan_memory(**arguments, gpu_memory_bytes=just).of("colocated")[0], "slots on the device") == 2 * slot
    small = plan_memory(**arguments, gpu_memory_bytes=just - slot).of("colocated")[0]
    assert item(small, "device slots") + item(small, "device buffers of packs") == 5 * slot


def test_replayed_slots_lie_where_the_run_puts_them(target):
    """3 slots a column and 2 kept: all on a GPU with room for them, else in host memory, as where its size is unknown."""
    recipe, info = recipe_of(target, plan={"replays": 2, "replay_distance": 10}), read_target_info(str(target))
    shape = resolve_drafter(recipe=recipe, info=info)
    arguments = {"recipe": recipe, "info": info, "shape": shape, "schedule_slots_per_column": 3, "validation_slots": 2}
    processes = Processes(recipe=recipe, info=info, shape=shape, weights=count_target_weights(info), device="cuda")
    slot, number = processes.slot_nbytes, 4 * 3 + 2
    enough = int((2 * GIB * 0.95 - processes.room(gpu_memory_bytes=2 * GIB) + number * slot) / 0.95) + 1
    there = plan_memory(**arguments, device="cuda", gpu_memory_bytes=enough)
    assert item(there.of("colocated")[0], "slots on the device") == number * slot
    assert there.colocated_on_device
    assert (there.slots_in_host_memory("colocated"), there.slots_in_host_memory("split")) == (0, number)
    for size in (enough - slot, None):
        beside = plan_memory(**arguments, device="cuda", gpu_memory_bytes=size)
        process = beside.of("colocated")[0]
        assert item(process, "device slots") + item(process, "device buffers of packs") == (2 + 4) * slot
        assert not beside.colocated_on_device
        assert beside.slots_in_host_memory("colocated") == number
    assert plan_memory(**arguments).slots_in_host_memory("colocated") == number, "on a CPU"


def test_ranks_keep_validation_packs_in_turn(target):
    """5 packs over 2 ranks: 3 slots in the fuller one, 5 in all."""
    recipe, info = recipe_of(target, placement={"drafter_ranks": 2}), read_target_info(str(target))
    shape = resolve_drafter(recipe=recipe, info=info)
    arguments = {"recipe": recipe, "info": info, "shape": shape, "schedule_slots_per_column": 3, "device": "cuda"}
    memory = plan_memory(**arguments, validation_slots=5)
    assert item(memory.of("colocated")[0], "slots on the device") == (2 + 3) * memory.slot_nbytes
    assert memory.num_slots == 4 * 3 + 5


def test_slots_on_the_gpu_need_no_host_memory(target):
    memory = memory_of(target, device="cuda", placement={"host_memory_gb": 1e-6})
    memory.check_host_slots("colocated")
    with pytest.raises(PlanError, match="needs 12 slots"):
        memory.check_host_slots("split")


def test_on_a_gpu_the_embedding_is_no_drafter_s_and_a_tied_one_is_there_once(target):
    untied = memory_of(target, device="cuda")
    for process in (untied.of("colocated")[0], untied.of("split")[1]):
        assert item(process, "frozen embedding") == 0
        assert item(process, "frozen head") == 256 * 64 * 2
    (target / "config.json").write_text(json.dumps(CONFIG | {"tie_word_embeddings": True}))
    tied = memory_of(target, device="cuda")
    assert item(tied.of("split")[1], "frozen embedding") + item(tied.of("split")[1], "frozen head") == 256 * 64 * 2
    assert item(tied.of("colocated")[0], "frozen head") == 0, "the target's own"
    other = memory_of(target, device="cuda", drafter={"dtype": "float32"}).of("colocated")[0]
    assert item(other, "frozen embedding") == 256 * 64 * 4


def test_ranks_that_are_not_alone_pay_for_nccl(target):
    outside = [
        memory_of(target, device="cuda", placement={"drafter_ranks": ranks}).of("split")[1].outside_bytes for ranks in (1, 2, 4)
    ]
    assert outside[1] - outside[0] > NCCL_BYTES
    assert outside[2] - outside[1] == outside[1] - outside[0] - NCCL_BYTES, "a second neighbour"
    assert memory_of(target, placement={"drafter_ranks": 2}).of("split")[1].outside_bytes == 0


@pytest.mark.parametrize("wish", ["auto", "on", "off"])
def test_what_may_be_replayed_is_planned_either_way(target, wish):
    memory = memory_of(target, device="cuda", placement={"cuda_graphs": wish})
    choices = {
        "auto": [(), ("target",), ("drafter",), ("target", "drafter")], "on": [("target", "drafter")], "off": [()]
    }[wish]  # fmt: skip
    colocated = [process for process in memory.alternatives if process.role == "colocated"]
    assert [process.replayed for process in colocated] == choices
    planned = memory.of("colocated")[0]
    assert planned.replayed == (() if wish == "off" else ("target", "drafter")), "a tiny model waits for its launches"
    if wish == "auto":
        peaks = [process.peak_bytes for process in colocated]
        assert peaks == sorted(peaks)
    if wish != "off":
        names = [entry.name for entry in planned.items]
        assert {"the target's recordings", "the drafter's recordings"} <= set(names)
        assert not [name for name in names if name.startswith("kept: MLPs")]
    assert [process.replayed for process in memory_of(target, placement={"cuda_graphs": "auto"}).alternatives] == [()] * 3


def test_only_one_moment_s_parts_count_at_a_time(target):
    drafter = memory_of(target, device="cuda", objective={"chunk_rows": 16}).of("split")[1]
    wide = memory_of(target, device="cuda", objective={"chunk_rows": 256}).of("split")[1]
    assert item(wide, "logits of a chunk") == 16 * item(drafter, "logits of a chunk")
    assert drafter.peak_bytes == sum(entry.nbytes for entry in drafter.at_peak())
    assert drafter.training_bytes <= drafter.peak_bytes
    names = {entry.name for entry in drafter.at_peak()}
    assert not {"logits of a chunk", "gradients inside an MLP"} <= names


def test_the_number_of_ranks_does_not_change_the_slots(target):
    plans = [memory_of(target, placement={"drafter_ranks": ranks, "target_workers": 3}) for ranks in (1, 2, 4)]
    assert len({plan.host_slot_bytes for plan in plans}) == 1
    assert [plan.of("split")[1].count for plan in plans] == [1, 2, 4]


def test_slots_above_the_budget_are_refused_with_needs_and_keys(target):
    needed = 4 * 3 * 256 * 3 * 64 * 2
    memory_of(target, placement={"host_memory_gb": needed / GIB}).check_host_slots("split")
    short = memory_of(target, placement={"host_memory_gb": (needed - 1) / GIB})
    with pytest.raises(PlanError) as refused:
        short.check_host_slots("split")
    message = str(refused.value)
    assert message.startswith("placement.host_memory_gb = 0.001: the schedule needs 12 slots")
    for key in ("plan.replays", "plan.replay_distance", "plan.packs_per_step"):
        assert key in message


def test_a_machine_too_small_is_refused(target):
    memory = memory_of(target)
    memory.check_machine(placement="split", memory_bytes=memory.total_bytes("split"))
    with pytest.raises(PlanError, match=r"placement.mode = 'split'"):
        memory.check_machine(placement="split", memory_bytes=memory.total_bytes("split") - 1)


def test_a_gpu_too_small_is_refused_with_the_biggest_part_and_its_key(target):
    memory = memory_of(target, device="cuda")
    placement = resolve_placement(
        placement=recipe_of(target, placement={"mode": "split"}).placement, device="cuda", num_devices=1
    )
    together = sum(process.device_bytes for process in memory.of("split"))
    memory.check_gpus(placement=placement, gpu_memory_bytes=[together])
    memory.check_gpus(placement=placement, gpu_memory_bytes=[None])
    with pytest.raises(PlanError, match="GPU 0 has") as refused:
        memory.check_gpus(placement=placement, gpu_memory_bytes=[together - 1])
    biggest = max(memory.of("split"), key=lambda process: process.device_bytes).at_peak()[0]
    assert biggest.name in str(refused.value)
    assert "lower " in str(refused.value)


def test_a_target_that_answers_must_fit_alone(target):
    memory = memory_of(target, device="cuda", validation={"prompts": "x.jsonl", "max_new_tokens": 8192, "batch_size": 64})
    placement = resolve_placement(
        placement=recipe_of(target, placement={"mode": "split"}).placement, device="cuda", num_devices=2
    )
    answering = memory.of("split")[-1].device_bytes
    memory.check_gpus(placement=placement, gpu_memory_bytes=[answering, answering])
    with pytest.raises(PlanError, match=r"GPU 0 has .*\(answers\).*validation.batch_size"):
        memory.check_gpus(placement=placement, gpu_memory_bytes=[answering - 1, answering])


def test_columns_are_shared_out_evenly_or_refused_with_the_nearest_counts():
    owned = [owned_columns(rank=rank, ranks=3, num_columns=6) for rank in range(3)]
    assert owned == [(0, 3), (1, 4), (2, 5)]
    with pytest.raises(PlanError, match=r"plan.packs_per_step = 8: .*drafter_ranks \(3\).*nearest: 6 or 9"):
        owned_columns(rank=0, ranks=3, num_columns=8)


@pytest.mark.parametrize(
    ("section", "device", "devices", "expected"),
    [
        ({}, "cpu", 1, ["colocated 0 None"]),
        ({}, "cpu", 2, ["target 0 None", "drafter 0 None"]),
        ({"mode": "colocated", "drafter_ranks": 2}, "cuda", 2, ["colocated 0 0", "colocated 1 1"]),
        ({"target_workers": 2, "drafter_ranks": 2}, "cuda", 4, ["target 0 0", "target 1 1", "drafter 0 2", "drafter 1 3"]),
        ({"mode": "split"}, "cuda", 1, ["target 0 0", "drafter 0 0"]),
        ({"target_gpus": [1], "drafter_gpus": [0]}, "cuda", 2, ["target 0 1", "drafter 0 0"]),
    ],
)
def test_processes_of_a_placement(target, section, device, devices, expected):
    placement = resolve_placement(placement=recipe_of(target, placement=section).placement, device=device, num_devices=devices)
    assert [f"{process.role} {process.rank} {process.gpu}" for process in placement.processes] == expected


@pytest.mark.parametrize(
    ("section", "device"),
    [
        ({"drafter_gpus": [2]}, "cuda"),
        ({"drafter_gpus": [0, 1]}, "cuda"),
        ({"drafter_gpus": [0]}, "cpu"),
        ({"target_gpus": [-1]}, "cuda"),
    ],
)
def test_gpus_that_are_not_there_are_refused(target, section, device):
    (key,) = section
    with pytest.raises(PlanError, match=f"placement.{key}"):
        resolve_placement(placement=recipe_of(target, placement=section).placement, device=device, num_devices=2)
