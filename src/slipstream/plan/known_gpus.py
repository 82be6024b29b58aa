"""Stage costs without a measurement: useful work over what a known GPU is expected to reach, or launching. No torch.

Only the H200 was measured (LAB_LOG.md, "first run of the CUDA engine", "Qwen3-8B beside SpecForge", "CUDA graphs of the
drafter's step"); every other line scales its figures by peak arithmetic and memory bandwidth: estimates, which say so.
Seconds of launching are those of that machine's CPU whatever the GPU, and where they set the pace that is said too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from slipstream.config import DrafterShape, TargetInfo
from slipstream.plan.flops import drafter_flops, target_flops
from slipstream.plan.schedule import Schedule
from slipstream.plan.throughput import StageCosts
from slipstream.plan.weights import TargetWeights
from slipstream.records import Int32Array

TARGET_SHARE = 591 / 989.4
"""Of the dense bf16 peak, a 27B-shaped target on an H200: 591 useful TFLOP/s, 0.74 of a measured 8192^3 product."""
DRAFTER_SHARE = 589 / 989.4
"""The same for the drafter's forward and backward: 243 useful TFLOP in 412 ms."""
WIDE = 5120
"""Width of the hidden states that both shares were measured at."""
NARROW = 1000
"""Width at which an H200 reads and writes for as long as it multiplies: the drafter's step takes 2.3 times its work at the
shares above at 576 (15.9 ms replayed, 13.5 in a run), 1.0 times at 4,096 (242 ms, of which this makes 255)."""
COPY_SHARE = 0.77
"""Of the memory bandwidth, the optimizer on an H200: 30 bytes a weight, 1.73 B weights in 14 ms."""
OPTIMIZER_BYTES = 30
TARGET_LAUNCH_SECONDS = 0.0009
"""Launching one layer of the target: 25 ms for 28, in two runs of SmolLM2 on an H200."""
DRAFTER_LAUNCH_SECONDS = 0.006
"""Launching one layer of the drafter forward and backward: 29 to 33 ms for five, in those runs and a bench."""
REPLAY_SECONDS = 0.0025
"""Launching a use of the drafter that is replayed: 2.2 to 2.6 ms, there. Taken for a replayed forward of the target too."""
BETWEEN_SECONDS = 0.0015
"""What a thread does between uses besides launching: hooks, metrics, the next arrays; there."""
RECORDED_FROM = 0.5
"""placement.cuda_graphs = "auto" replays what launching takes a larger share of than this (`device.graph_choice`)."""
NVLINK, PCIE = 230.0, 17.0
"""GB/s at which two ranks sum gradients; neither was measured."""


@dataclass(frozen=True, slots=True)
class KnownGpu:
    """A GPU by its datasheet: dense bf16 peak with fp32 sums, memory in GB (1e9), its bandwidth, and the link to its peers."""

    name: str
    peak_tflops: float
    memory_gb: float
    bandwidth_gb_per_second: float
    link_gb_per_second: float
    measured: bool = False

    @property
    def arithmetic_per_byte(self) -> float:
        """Operations that it can do in the time in which it reads a byte."""
        return self.peak_tflops * 1e3 / self.bandwidth_gb_per_second

    @property
    def source(self) -> str:
        """Where costs on this GPU come from, in words."""
        return f"table: {self.name}, " + ("ratios measured" if self.measured else "estimated from ratios of an H200")


_H200 = KnownGpu("H200", 989.4, 141, 4800, NVLINK, measured=True)
KNOWN_GPUS: tuple[tuple[str, KnownGpu], ...] = (
    (r"\bB300\b", KnownGpu("B300", 2250, 288, 8000, NVLINK)),
    (r"\bG?B200\b", KnownGpu("B200", 2250, 180, 8000, NVLINK)),
    (r"\bGH200\b", KnownGpu("GH200", 989.4, 96, 4000, PCIE)),
    (r"\bH200\b", _H200),
    (r"\bH100\b.*\bPCIe\b", KnownGpu("H100 PCIe", 756, 80, 2000, PCIE)),
    (r"\bH100\b.*\bNVL\b", KnownGpu("H100 NVL", 835, 94, 3900, PCIE)),
    (r"\bH100\b", KnownGpu("H100", 989.4, 80, 3350, NVLINK)),
    (r"\bA100\b.*\b40\s?GB\b", KnownGpu("A100 40GB", 312, 40, 1555, NVLINK)),
    (r"\bA100\b", KnownGpu("A100 80GB", 312, 80, 2039, NVLINK)),
    (r"\bL40S\b", KnownGpu("L40S", 362, 48, 864, PCIE)),
    (r"\bL4\b", KnownGpu("L4", 121, 24, 300, PCIE)),
    (r"\bRTX PRO 6000\b", KnownGpu("RTX PRO 6000 Blackwell", 503.8, 96, 1792, PCIE)),
    (r"\bRTX 5090\b", KnownGpu("RTX 5090", 209.5, 32, 1792, PCIE)),
    (r"\bRTX 4090\b", KnownGpu("RTX 4090", 165.2, 24, 1008, PCIE)),
    (r"\bRTX A6000\b", KnownGpu("RTX A6000", 154.8, 48, 768, PCIE)),
    (r"\bRTX 3090\b", KnownGpu("RTX 3090", 71, 24, 936, PCIE)),
)
"""By a pattern of the driver's name; the first that fits counts."""


def find_gpu(name: str) -> KnownGpu | None:
    """The table's line for a driver's name such as "NVIDIA H100 80GB HBM3", or for one of its own names."""
    words = re.sub(r"[-_]", " ", name)
    return next((gpu for pattern, gpu in KNOWN_GPUS if re.search(pattern, words, flags=re.IGNORECASE)), None)


@dataclass(frozen=True, slots=True)
class PackShape:
    """What an average pack of a run holds: real tokens, the sum of squared document lengths, and anchors of one use."""

    tokens: float
    squared_tokens: float
    anchors: float

    @classmethod
    def of(cls, schedule: Schedule, *, num_tokens: Int32Array) -> PackShape:
        """From a schedule and the token counts of the corpus' documents, int32 `[D]`."""
        arrays, packs = schedule.arrays, max(1, schedule.summary().packs)
        lengths = num_tokens[arrays.document_ids].astype(float)
        return cls(
            tokens=float(arrays.tokens_of_pack.sum()) / packs,
            squared_tokens=float((lengths * lengths).sum()) / packs,
            anchors=float(arrays.anchors_of_pack.sum()) / packs,
        )


@dataclass(frozen=True, slots=True)
class _Stage:
    """Seconds of a stage: the device's own work, and launching it."""

    device: float
    launch: float

    @property
    def alone(self) -> float:
        """What it takes in a process of its own."""
        return max(self.device, self.launch)


def estimate_costs(
    *,
    gpu: KnownGpu,
    info: TargetInfo,
    shape: DrafterShape,
    weights: TargetWeights,
    pack: PackShape,
    pack_tokens: int,
    replays: int = 1,
    cuda_graphs: Literal["auto", "on", "off"] = "auto",
    target_recordable: bool = True,
) -> StageCosts:
    """Stage costs of one GPU for an average pack: useful work over the share of the peak that an H200 reached, or launching.

    Every weight of a layer counts as used, so that a mixture of experts is overestimated. An anchor sees half of its
    document in the mean; all slots of a block count as supervised. Narrow models read and write for longer than they
    multiply (`_work_seconds`). A stage takes no less than launching its kernels, unless it is replayed (`_stage`; the target's
    forward only if it is `target_recordable`, which hybrids are not); where one process does both, one stage is launched while
    the device works on the other, which `colocated_ratio` says, for so many `replays`.
    """
    depth = shape.tap_layers[-1] + 1
    target, drafter = _flops(info=info, shape=shape, weights=weights, pack=pack, pack_tokens=pack_tokens)
    parameters = shape.num_parameters
    made = _stage(
        _work_seconds(target, gpu=gpu, share=TARGET_SHARE, width=shape.hidden_size),
        launch=depth * TARGET_LAUNCH_SECONDS,
        cuda_graphs=cuda_graphs if target_recordable else "off",
    )
    used = _stage(
        _work_seconds(drafter, gpu=gpu, share=DRAFTER_SHARE, width=shape.hidden_size),
        launch=shape.num_layers * DRAFTER_LAUNCH_SECONDS,
        cuda_graphs=cuda_graphs,
        between=BETWEEN_SECONDS,
    )
    device, launch = made.device / replays + used.device, made.launch / replays + used.launch
    paced = "; paced by launching, which goes with the CPU" if made.launch > made.device or used.launch > used.device else ""
    return StageCosts(
        target_seconds_per_pack=made.alone,
        drafter_seconds_per_use=used.alone,
        tokens_per_pack=pack.tokens,
        step_seconds=parameters * OPTIMIZER_BYTES / (gpu.bandwidth_gb_per_second * 1e9 * COPY_SHARE),
        reduce_seconds=parameters * 4 / (gpu.link_gb_per_second * 1e9),
        colocated_ratio=(made.alone / replays + used.alone) / max(device, launch),
        source=gpu.source + paced,
    )


def _flops(
    *, info: TargetInfo, shape: DrafterShape, weights: TargetWeights, pack: PackShape, pack_tokens: int
) -> tuple[float, float]:
    """Useful work of the target on an average pack, and of one use of it in the drafter."""
    depth = shape.tap_layers[-1] + 1
    kinds = info.layer_types[:depth]
    target = target_flops(
        matrix_parameters=sum(weights.layers[:depth]),
        tokens=pack.tokens,
        attention_layers=sum(kind != "linear_attention" for kind in kinds),
        attention_width=info.num_attention_heads * info.head_dim,
        squared_tokens=pack.squared_tokens,
    )
    context = pack.squared_tokens / max(1.0, pack.tokens) / 2
    anchors = round(pack.anchors)
    return target, drafter_flops(
        shape=shape,
        tokens=pack_tokens,
        anchors=anchors,
        visible_pairs=anchors * shape.block_size * (context + shape.block_size),
        rows=anchors * (shape.block_size - 1),
    )


def _work_seconds(flops: float, *, gpu: KnownGpu, share: float, width: int) -> float:
    """Seconds of a device for so much work, by a roofline: bytes go with the width of the hidden states, products with its
    square, so that narrow models are bound by memory, the more so the more arithmetic a GPU has for its bandwidth (Williams,
    Waterman and Patterson 2009)."""
    narrow = NARROW * gpu.arithmetic_per_byte / _H200.arithmetic_per_byte
    return flops / (gpu.peak_tflops * 1e12 * share) * (1 + narrow / width) / (1 + NARROW / WIDE)


def _stage(device: float, *, launch: float, cuda_graphs: str, between: float = 0.0) -> _Stage:
    """A stage, replayed where the recipe wants that or leaves it open and launching takes most of it."""
    plain = _Stage(device=device, launch=launch)
    replayed = cuda_graphs == "on" or (cuda_graphs == "auto" and plain.launch > RECORDED_FROM * plain.alone)
    return _Stage(device=device, launch=(REPLAY_SECONDS if replayed else launch) + between)
