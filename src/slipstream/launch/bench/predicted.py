"""What the plan says of a bench's memory, to be put beside what the bench measures after warm-up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slipstream.config import DrafterShape, TargetInfo
from slipstream.launch.bench.drafter_work import DrafterWork
from slipstream.plan.memory_drafter import DrafterLoad, drafter_items
from slipstream.plan.memory_items import BEFORE_TRAINING, GIB, MemoryItem, peak_moment, slot_bytes
from slipstream.plan.memory_recordings import replayed_drafter, replayed_target
from slipstream.plan.memory_target import TargetLoad, target_items
from slipstream.plan.weights import count_target_weights


@dataclass(frozen=True, slots=True)
class PredictedMemory:
    """`gib` at the peak, which is in `moment`; `parts` in GiB, the largest first."""

    gib: float
    moment: str
    parts: Mapping[str, float]

    def beside(self, measured_gib: float) -> str:
        """ "predicted X GiB, measured Y GiB, off Z %"."""
        off = self.gib / measured_gib - 1
        return f"predicted {self.gib:.2f} GiB, measured {measured_gib:.2f} GiB, off {off:+.1%}"

    def told(self) -> str:
        """The parts in words."""
        return f"at {self.moment}: " + ", ".join(f"{name} {gib:.2f}" for name, gib in self.parts.items() if gib >= 0.005)


def predict_drafter(*, shape: DrafterShape, work: DrafterWork, replayed: bool = False) -> PredictedMemory:
    """Of a drafter's step as `bench_drafter` runs it: one pack on the device, the embedding in host memory."""
    load = DrafterLoad(
        shape=shape,
        tokens=work.documents * work.document_tokens,
        anchors=work.anchors,
        chunk_rows=work.chunk_rows,
        dtype="bfloat16",
        slot_dtype="bfloat16",
        attention="auto",
        tied=False,
        embedding_on_device=False,
    )
    items = replayed_drafter(load, several=work.packs > 1) if replayed else drafter_items(load, device="cuda")
    # the bench measures no acceptance
    items = tuple(item for item in items if item.moments != ("validation",))
    return _at_peak((*items, _pack(shape=shape, tokens=load.tokens)))


def predict_target(*, info: TargetInfo, taps: Sequence[int], pack_tokens: int, replayed: bool = False) -> PredictedMemory:
    """Of a target's pack as `measure_target` runs it: one slot on the device."""
    load = TargetLoad(
        info=info,
        weights=count_target_weights(info),
        tokens=pack_tokens,
        depth=taps[-1] + 1,
        dtype="bfloat16",
        device="cuda",
    )
    nbytes = slot_bytes(pack_tokens=pack_tokens, num_taps=len(taps), hidden_size=info.hidden_size, dtype="bfloat16")
    items = replayed_target(load, slot_nbytes=nbytes) if replayed else target_items(load)
    return _at_peak((*items, MemoryItem("slot", nbytes, "T K D")))


def _pack(*, shape: DrafterShape, tokens: int) -> MemoryItem:
    nbytes = slot_bytes(pack_tokens=tokens, num_taps=shape.num_taps, hidden_size=shape.hidden_size, dtype="bfloat16")
    return MemoryItem("pack", nbytes, "T K D")


def _at_peak(items: Sequence[MemoryItem]) -> PredictedMemory:
    moment, nbytes = peak_moment(items, without=BEFORE_TRAINING)
    held = sorted((item for item in items if item.held(moment)), key=lambda item: -item.nbytes)
    return PredictedMemory(gib=nbytes / GIB, moment=moment, parts={item.name: item.nbytes / GIB for item in held})
