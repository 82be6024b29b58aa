"""Memory on CUDA: the drafter's parts against the tensors of its own code, and both stages against a measured GPU."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from live_bytes import LiveBytes, MetaFlex, as_one_kernel

from slipstream.config.recipe import ObjectiveSection, OptimizerSection
from slipstream.config.target_info import DeltaNet, spread_taps
from slipstream.drafter import FAMILIES, fused
from slipstream.drafter.dflash import PASSES, DFlashDrafter
from slipstream.launch.bench import SHAPES, DrafterWork
from slipstream.launch.bench.drafter_work import make_columns
from slipstream.launch.bench.target import TARGETS, random_info
from slipstream.objective import BlockLossParts
from slipstream.observe import Account
from slipstream.plan.memory_drafter import DrafterLoad, array_bytes, drafter_items, flat_elements
from slipstream.plan.memory_items import DRAFTING, GIB, MemoryItem, Moment, peak_moment, slot_bytes
from slipstream.plan.memory_recordings import POOL_FILL, replayed_drafter
from slipstream.plan.memory_target import FUSED_TYPES, TargetLoad, target_items
from slipstream.plan.weights import count_target_weights
from slipstream.records import HiddenPack
from slipstream.target.fused import NORM_OFFSETS
from slipstream.trainer import optim
from slipstream.trainer.column import ColumnPass
from slipstream.trainer.optim import FlatAdamW
from slipstream.trainer.placing import Placed
from slipstream.trainer.tally import StepTally

META = torch.device("meta")
LINEAR_CE = sys.modules["slipstream.objective.linear_ce"]  # the package shows a function of that name
WIDE = dataclasses.replace(SHAPES["smollm2"], intermediate_size=96, vocab_size=60_000)
NARROW = dataclasses.replace(SHAPES["smollm2"], num_layers=2, layer_types=("full",) * 2, vocab_size=512, intermediate_size=64)


class Placing:
    """Stands for `StagedPlacing`: arrays on the device are counted by the plan as persistent buffers."""

    def __init__(self, live: LiveBytes, load: DrafterLoad) -> None:
        self._live, self._load = live, load

    def send(self, batch: Any, _staged: Any) -> Placed:
        """A batch on the meta device, uncounted."""
        self._live.paused = True
        moved = {f.name: v.to(META) for f in dataclasses.fields(batch) if isinstance(v := getattr(batch, f.name), torch.Tensor)}
        rows = torch.empty(self._load.anchors + 1, self._load.shape.hidden_size, dtype=torch.bfloat16, device=META)
        self._live.paused = False
        masks = dict.fromkeys(self._load.shape.layer_types)
        return Placed(batch=dataclasses.replace(batch, **moved), embedding_VD=rows, masks=masks)

    def used(self) -> None:
        """Nothing waits for it."""


@pytest.fixture
def on_meta(monkeypatch: pytest.MonkeyPatch) -> LiveBytes:
    """The meta device does what CUDA does."""
    monkeypatch.setitem(PASSES, "meta", DFlashDrafter.fused_pass)  # type: ignore[arg-type]
    monkeypatch.setitem(LINEAR_CE.ROW_PASSES, "meta", lambda: lambda *_, **__: None)
    monkeypatch.setitem(optim.UPDATES, "meta", lambda: lambda **_: None)  # type: ignore[arg-type]
    monkeypatch.setitem(optim.SUMS, "meta", lambda: optim.torch_accumulate)  # type: ignore[arg-type]
    return LiveBytes()


def load_of(shape: Any, work: DrafterWork) -> DrafterLoad:
    return DrafterLoad(
        shape=shape, tokens=work.documents * work.document_tokens, anchors=work.anchors, chunk_rows=work.chunk_rows,
        dtype="bfloat16", slot_dtype="bfloat16", attention="flex", tied=False, embedding_on_device=False,
    )  # fmt: skip


def at(items: Any, moment: Moment) -> int:
    """What is held in a moment, without what torch's meta device does not show: workspaces, and arrays counted beside."""
    beside = ("cuBLAS workspaces", "arrays of uses")
    return sum(item.nbytes for item in items if item.held(moment) and item.name not in beside)


@pytest.mark.parametrize(
    ("shape", "work"),
    [
        (SHAPES["qwen3.6-27b"], DrafterWork(packs=2)),
        (SHAPES["qwen3-8b"], DrafterWork(documents=4, anchors=512, chunk_rows=2048, packs=1)),
        (WIDE, DrafterWork(anchors=256, chunk_rows=4096, packs=1)),
        (NARROW, DrafterWork(documents=8, anchors=64, chunk_rows=128, packs=2)),
    ],
    ids=["27b, two packs", "8b", "logits are the widest", "context is the widest"],
)
def test_a_step_holds_what_the_plan_says(on_meta: LiveBytes, shape: Any, work: DrafterWork) -> None:
    """One pack after the other through the trainer's own pass, sizes only: at the loss, and at the end of backward."""
    live, load = on_meta, load_of(shape, work)
    items, columns = drafter_items(load, device="cuda"), make_columns(shape=shape, work=work)[0]
    peaks: dict[str, int] = {}
    with live, as_one_kernel(live, fused):
        drafter = FAMILIES["dflash"](shape=shape, dtype=torch.bfloat16, device=META, attention="sdpa")
        drafter.kernel = MetaFlex()
        head_VD = torch.empty(shape.vocab_size, shape.hidden_size, dtype=torch.bfloat16, device=META)
        optimizer = FlatAdamW(drafter, section=OptimizerSection(), num_extra=StepTally.size(shape.block_size))
        optimizer._stale = set()  # as on CUDA
        assert len(optimizer.master) == flat_elements(shape)
        tally = StepTally(optimizer.extra, block_size=shape.block_size)
        assert live.peak == pytest.approx(at(items, "loading"), rel=1e-3)
        assert live.now == pytest.approx(at(items, "answering"), rel=1e-3)  # a moment of none of its parts
        slot = slot_bytes(pack_tokens=load.tokens, num_taps=shape.num_taps, hidden_size=shape.hidden_size, dtype="bfloat16")
        persistent = live.now + slot
        hidden_TKD = torch.empty(load.tokens, shape.num_taps, shape.hidden_size, dtype=torch.bfloat16, device=META)

        class Watched(BlockLossParts):
            def sum_up(self, *rows: Any, **keys: Any) -> Any:
                peaks["forward"] = max(live.peak, peaks.get("forward", 0))
                live.reset()
                sums = BlockLossParts.sum_up(self, *rows, **keys)
                peaks["loss"] = max(live.peak, peaks.get("loss", 0))
                live.reset()
                return sums

        column_pass = ColumnPass(
            drafter=drafter, ends=_Ends(head_VD), loss=None, noise=None, target_fingerprint="t", device=META,
            account=Account("memory"), placing=Placing(live, load),
            parts=Watched(ObjectiveSection(chunk_rows=work.chunk_rows)),
        )  # fmt: skip
        optimizer.zero_grad()
        for column in columns:
            pack = HiddenPack(
                pack_id=column.use.pack_id, slot=0, generation=0, hidden_TKD=hidden_TKD, last_hidden_TD=None, seal=0,
                target_fingerprint="t",
            )  # fmt: skip
            staged = dataclasses.replace(column, staged=object())  # type: ignore[arg-type]
            live.reset()
            column_pass(pack, staged, denominator=1.0, tally=tally)
            peaks["backward"] = max(live.peak, peaks.get("backward", 0))
            assert live.now == pytest.approx(persistent, rel=1e-6), "a pack leaves nothing behind"
    assert peaks["loss"] == pytest.approx(at(items, "loss") + slot, rel=2e-3)
    backward = max(at(items, moment) for moment in DRAFTING[2:])
    assert peaks["backward"] == pytest.approx(backward + slot, rel=1e-2)
    assert max(peaks.values()) == pytest.approx(max(at(items, moment) for moment in DRAFTING) + slot, rel=1e-2)


@pytest.mark.parametrize("name", list(SHAPES))
def test_a_pass_without_gradients_holds_what_the_plan_says(on_meta: LiveBytes, name: str) -> None:
    live, shape, work = on_meta, SHAPES[name], DrafterWork(packs=1)
    load, column = load_of(shape, work), make_columns(shape=shape, work=work)[0][0]
    with live, as_one_kernel(live, fused):
        drafter = FAMILIES["dflash"](shape=shape, dtype=torch.bfloat16, device=META, attention="sdpa")
        drafter.kernel = MetaFlex()
        hidden_TKD = torch.empty(load.tokens, shape.num_taps, shape.hidden_size, dtype=torch.bfloat16, device=META)
        placed, before = Placing(live, load).send(column.batch, None), live.now
        live.reset()
        with torch.no_grad():
            drafter(hidden_TKD=hidden_TKD, batch=placed.batch, embedding_VD=placed.embedding_VD, masks=placed.masks)
    (planned,) = [item for item in replayed_drafter(load, several=False) if item.moments == ("validation",)]
    assert live.peak - before == pytest.approx(planned.nbytes, rel=1e-2)


def test_recordings_keep_what_a_launched_step_holds_and_not_its_logits() -> None:
    load = load_of(SHAPES["smollm2"], DrafterWork(packs=1))
    launched, replayed = drafter_items(load, device="cuda"), replayed_drafter(load, several=False)
    (pool,) = [item.nbytes for item in replayed if item.name == "the drafter's recordings"]
    held = {moment: sum(item.nbytes for item in launched if moment in item.moments) for moment in DRAFTING}
    (logits,) = [item.nbytes for item in launched if item.name == "logits of a chunk"]
    rows = load.loss_rows * 576 * 2
    held["loss"] -= logits + rows
    assert pool == pytest.approx((max(held.values()) + rows) / POOL_FILL, rel=1e-9)
    (twice,) = [item.nbytes for item in replayed_drafter(load, several=True) if item.name == "the drafter's recordings"]
    assert twice - pool == pytest.approx(rows / POOL_FILL, rel=1e-6)
    assert peak_moment(replayed, without=("loading",))[0] == "loss"


@dataclasses.dataclass
class _Ends:
    head_VD: torch.Tensor
    embedding_VD: torch.Tensor = dataclasses.field(default_factory=lambda: torch.empty(0))


def test_arrays_of_a_use_are_those_that_travel() -> None:
    shape, work = SHAPES["smollm2"], DrafterWork(documents=2, document_tokens=256, anchors=64, chunk_rows=256)
    from slipstream.drafter.mask_arrays import mask_arrays
    from slipstream.trainer.metadata import ArrayLayout

    batch = make_columns(shape=shape, work=work)[0][0].batch
    drafter = FAMILIES["dflash"](shape=shape, dtype=torch.bfloat16, device=META, attention="flex")
    arrays = {f.name: v for f in dataclasses.fields(batch) if isinstance(v := getattr(batch, f.name), torch.Tensor)}
    arrays |= mask_arrays(drafter, batch)
    load = dataclasses.replace(load_of(shape, work), embedding_on_device=True)
    assert array_bytes(load) == ArrayLayout.of(arrays).nbytes


@pytest.mark.parametrize(("chunk_rows", "most_gib"), [(3328, 42.6), (1664, 41.9)])
def test_a_step_of_the_27b_shape_keeps_below_its_goal(chunk_rows: int, most_gib: float) -> None:
    """Its predecessor, which held 43.3 GiB on an H200 (LAB_LOG, first run of the CUDA engine), was predicted to hold 43.3."""
    load = load_of(SHAPES["qwen3.6-27b"], DrafterWork(chunk_rows=chunk_rows))
    slot = slot_bytes(pack_tokens=load.tokens, num_taps=5, hidden_size=5120, dtype="bfloat16")
    items = (*drafter_items(load, device="cuda"), MemoryItem("pack", slot, "T K D"))
    assert peak_moment(items, without=("loading",))[1] / GIB < most_gib


@pytest.mark.parametrize(("tokens", "measured_gib"), [(16384, 49.7)], ids=["one H200, 62 layers of the 27B shape"])
def test_the_measured_target_is_met(tokens: int, measured_gib: float) -> None:
    config = TARGETS["qwen3.6-27b"]()
    info, taps = random_info(config), spread_taps(num_layers=64, num_taps=5)
    assert info.delta_net == DeltaNet(num_key_heads=16, num_value_heads=48, key_size=128, value_size=128, conv_taps=4)
    load = TargetLoad(
        info=info, weights=count_target_weights(info), tokens=tokens, depth=taps[-1] + 1, dtype="bfloat16", device="cuda"
    )
    slot = slot_bytes(pack_tokens=tokens, num_taps=5, hidden_size=5120, dtype="bfloat16")
    items = (*target_items(load), MemoryItem("slot", slot, "T K D"))
    moment, nbytes = peak_moment(items, without=("loading", "tuning"))
    assert moment == "target's delta rule"
    assert nbytes / GIB == pytest.approx(measured_gib, rel=0.01)


def test_fused_types_are_those_of_the_engine() -> None:
    classes = {"Llama": "llama", "Mistral": "mistral", "Qwen3": "qwen3", "Qwen3_5": "qwen3_5"}
    fused_types = {classes[name.removesuffix("DecoderLayer")] for name in NORM_OFFSETS}
    assert {name.removesuffix("_text") for name in FUSED_TYPES} == fused_types


def test_weights_by_formula_are_the_hybrid_s(tmp_path: Path) -> None:
    config = TARGETS["qwen3.6-27b"]()
    counted = count_target_weights(random_info(config))
    assert sum(counted.layers) / 1e9 == pytest.approx(24.353, abs=5e-4)
