"""Host memory of a run on CUDA: against the code that takes it, in the moments in which it does; and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from slipstream.config import make_recipe, read_target_info, resolve_drafter
from slipstream.drafter import build_drafter
from slipstream.errors import PlanError
from slipstream.plan import MemoryPlan, plan_memory
from slipstream.plan.memory_host import PROCESS_BYTES, HostMemory
from slipstream.plan.memory_items import GIB
from slipstream.plan.weights import count_converted
from slipstream.trainer.optim import FlatAdamW

CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "tie_word_embeddings": False,
}
LAYER = 3 * 160 * 64
"""The weights of a layer in `target`: its MLP will do."""
END = 256 * 64


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A target of 8 layers whose files are in bf16."""
    write_target(tmp_path)
    return tmp_path


def write_target(folder: Path, *, dtype: torch.dtype = torch.bfloat16, **config: Any) -> None:
    """Its config and its files, with a tower and a drafting head that are not loaded."""
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    tensors = {
        f"model.language_model.layers.{layer}.mlp.{name}.weight": torch.zeros(160, 64, dtype=dtype)
        for layer in range(8)
        for name in ("gate", "up", "down")
    }
    ends = {"model.language_model.embed_tokens.weight": END, "lm_head.weight": END}
    beside = {"model.visual.layers.0.weight": 99999, "mtp.layers.0.weight": 99999}
    tensors |= {
        name: torch.zeros(size, dtype=torch.float32 if name in beside else dtype) for name, size in (ends | beside).items()
    }
    save_file(tensors, folder / "model.safetensors")


def memory_of(target: Path, /, *, device: str = "cuda", gpu: int | None = None, slots: int = 3, **sections: Any) -> MemoryPlan:
    """The memory plan of a recipe for that target, with taps on layers 1, 3 and 5."""
    raw: dict[str, Any] = {
        "name": "host",
        "target": {"model": str(target), "num_taps": 3},
        "corpus": {"path": "corpus"},
        "plan": {"pack_tokens": 256, "pack_anchors": 32, "packs_per_step": 4, "replays": 2, "replay_distance": 10},
        "drafter": {"mask_token_id": 3, "num_layers": 2, "block_size": 8},
    }
    for name, section in sections.items():
        raw[name] = raw.get(name, {}) | section
    recipe = make_recipe(raw)
    info = read_target_info(str(target), weights=recipe.target.weights)
    return plan_memory(
        recipe=recipe,
        info=info,
        shape=resolve_drafter(recipe=recipe, info=info),
        schedule_slots_per_column=slots,
        device=device,  # type: ignore[arg-type]
        gpu_memory_bytes=gpu,
    )


def host_of(target: Path, mode: Any = "split", /, **given: Any) -> HostMemory:
    """Its host side."""
    host = memory_of(target, **given).host_of(mode)
    assert host is not None
    return host


def parts(host: HostMemory) -> dict[str, int]:
    """Bytes by name."""
    return {item.name: item.nbytes for item in host.items}


def test_a_checkpoint_is_copied_into_as_much_as_the_optimizer_s_state_takes(target: Path) -> None:
    recipe = make_recipe(
        {
            "name": "host",
            "target": {"model": str(target), "num_taps": 3},
            "corpus": {"path": "corpus"},
            "drafter": {"mask_token_id": 3, "num_layers": 2, "block_size": 8},
        }
    )
    shape = resolve_drafter(recipe=recipe, info=read_target_info(str(target)))
    drafter = build_drafter(shape=shape, dtype="bfloat16", device="cpu", seed=None, attention="sdpa")
    optimizer = FlatAdamW(drafter, section=recipe.optimizer)
    state = sum(flat.nbytes for flat in (optimizer.master, optimizer.exp_avg, optimizer.exp_avg_sq))
    several = host_of(target, placement={"drafter_ranks": 2})
    assert parts(several)["copy for checkpoints"] == state, "of rank 0 alone"


def test_slots_count_in_host_memory_where_they_lie(target: Path) -> None:
    plan = memory_of(target)
    slots = 12 * plan.slot_nbytes
    assert parts(host_of(target))["slots"] == parts(host_of(target, "colocated"))["slots"] == slots
    assert parts(host_of(target, "colocated", gpu=100 * GIB))["slots"] == 0, "on the GPU"
    workers = {"placement": {"target_workers": 3}}
    assert parts(host_of(target, **workers))["page tables of slots"] == slots // 4096 * 8 * 4
    assert memory_of(target, device="cpu").host == ()


def test_files_in_bf16_are_mapped_and_others_copied_by_every_float8_worker(target: Path) -> None:
    float8 = {"target": {"dtype": "float8", "num_taps": 3, "model": str(target)}, "placement": {"target_workers": 5}}
    name = "target before it is rounded"
    assert parts(host_of(target, **float8))[name] == 0
    write_target(target, dtype=torch.float32)
    assert parts(host_of(target, **float8))[name] == 5 * 2 * (6 * LAYER + END), "up to the last tap"
    assert parts(host_of(target, "colocated", **float8))[name] == 2 * (6 * LAYER + END), "one rank"
    assert parts(host_of(target, placement={"target_workers": 5}))[name] == 0, "bf16 goes onto the GPU"
    drawn = {**float8, "target": {**float8["target"], "weights": "random"}}
    assert parts(host_of(target, **drawn))[name] == 0


def test_an_embedding_of_its_own_stays_in_host_memory(target: Path) -> None:
    name, two = "frozen embedding", {"drafter_ranks": 2}
    assert parts(host_of(target, placement=two))[name] == 0, "mapped from its file"
    as_fp32 = {"mask_token_id": 3, "dtype": "float32", "num_layers": 2, "block_size": 8}
    assert parts(host_of(target, placement=two, drafter=as_fp32))[name] == 2 * END * 4
    assert parts(host_of(target, placement=two, target={"weights": "random"}))[name] == 2 * END * 2
    write_target(target, dtype=torch.float32)
    assert parts(host_of(target, placement=two))[name] == 2 * END * 2
    write_target(target, dtype=torch.float32, tie_word_embeddings=True)
    assert parts(host_of(target, placement=two))[name] == 0


def test_what_is_held_together(target: Path) -> None:
    """In split a worker may load while all slots are there; a colocated process has loaded before it has any."""
    write_target(target, dtype=torch.float32)
    float8 = {"target": {"dtype": "float8"}, "slots": 100}
    for placement, together in (("split", True), ("colocated", False)):
        host = host_of(target, placement, **float8)
        sizes = parts(host)
        loading = sizes["target before it is rounded"]
        later = sum(sizes.values()) - loading
        assert min(loading, sizes["slots"]) > 0
        assert host.peak_bytes == later + loading * together
    several = host_of(target, "colocated", placement={"drafter_ranks": 2}, **float8)
    assert several.peak_bytes == sum(parts(several).values())
    assert parts(several)["processes themselves"] == 2 * PROCESS_BYTES


@pytest.mark.parametrize(
    ("given", "key", "part"),
    [
        ({"slots": 400_000}, "plan.replays, plan.replay_distance or plan.packs_per_step", "slots"),
        ({"drafter": {"num_layers": 400}}, "drafter.num_layers", "copy for checkpoints"),
        ({"target": {"dtype": "float8"}, "placement": {"target_workers": 5000}}, "placement.target_workers", "target before"),
    ],
)
def test_a_host_too_small_is_refused_with_what_to_lower(target: Path, given: dict[str, Any], key: str, part: str) -> None:
    write_target(target, dtype=torch.float32)
    host = host_of(target, **given)
    host.check(memory_bytes=host.peak_bytes)
    with pytest.raises(PlanError) as refused:
        host.check(memory_bytes=host.peak_bytes - 1)
    assert (refused.value.key, refused.value.value) == ("placement.mode", "split")
    assert f"which needs {host.peak_bytes / GIB:.1f} GiB: " in refused.value.rule
    assert refused.value.hint.startswith(f"lower {key}: {part}")
    assert refused.value.hint.count("plan.replays") == 1, "slots and their page tables have one key"
    assert "drafter.num_layers: copy for checkpoints" in refused.value.hint


def test_headers_are_read_once_and_again_when_a_file_has_changed(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan asks for them in every placement, and a start makes several plans."""
    read: list[Path] = []
    real = Path.open

    def opened(path: Path, *given: Any, **keys: Any) -> Any:
        if path.suffix == ".safetensors":
            read.append(path)
        return real(path, *given, **keys)

    monkeypatch.setattr(Path, "open", opened)
    info = read_target_info(str(target))
    before = [count_converted(info, dtype="float32", depth=2) for _ in range(3)]
    assert before[0].decoder > 0
    assert before == before[:1] * 3
    assert len(read) <= len(list(target.glob("*.safetensors")))
    write_target(target, dtype=torch.float32)
    assert count_converted(info, dtype="float32", depth=2).decoder == 0
