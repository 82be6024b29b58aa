"""A run's target and recordings: which sizes of frame hold the plan's packs, and what was decided, told as a line of metrics.

Shape letters: P packs.
"""

from __future__ import annotations

import logging
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from slipstream.config import DrafterShape, Recipe, TargetInfo
from slipstream.corpus.store import CorpusStore
from slipstream.device.recorder import CudaRecorder
from slipstream.launch.planning import RunPlan
from slipstream.records import Int64Array
from slipstream.target.frame import FrameSize
from slipstream.target.graphs import consider_recording, run_crowded
from slipstream.target.huggingface import HuggingFaceTarget, load_target
from slipstream.transport.layout import SlotLayout
from slipstream.transport.slots import DTYPES

log = logging.getLogger(__name__)

FEWEST_SEQUENCES = 16
"""Of a frame's sizes, which are powers of two: attention launches a block for each sequence and 128 tokens of the longest one,
and those without work cost nanoseconds. Each size is a recording."""
ROUNDED_TO = 128
"""Tokens that a block of queries has in attention: lengths between cost nothing."""


def load_recipe_target(*, recipe: Recipe, info: TargetInfo, shape: DrafterShape, device: str) -> HuggingFaceTarget:
    """The recipe's target, with the taps of its drafter. Raises `TargetError`."""
    return load_target(
        info=info,
        dtype=recipe.target.dtype,
        tap_layers=shape.tap_layers,
        device=device,
        packing=recipe.target.packing,
        pack_tokens=recipe.plan.pack_tokens,
    )


def record_target(
    target: HuggingFaceTarget, *, recipe: Recipe, plan: RunPlan, layout: SlotLayout, device: str
) -> dict[str, object] | None:
    """Record a target's forward where that pays (`placement.cuda_graphs`), in warm-up; nothing on a CPU.

    Where it is launched, a pack that needs as much as any of the plan is launched once.
    Returns the line of metrics that tells what was decided.
    """
    if device == "cpu":
        return None
    began = time.perf_counter()
    sizes = plan_sizes(recipe=recipe, plan=plan)
    target.fill_frames(sizes)
    report = consider_recording(
        target,
        wish=recipe.placement.cuda_graphs,
        sizes=sizes,
        pack_tokens=recipe.plan.pack_tokens,
        slot_dtype=DTYPES[layout.dtype],
        recorder=CudaRecorder(torch.device("cuda", torch.cuda.current_device()), stage="target"),
        finish=torch.cuda.synchronize,
    )
    if not report.used:
        run_crowded(
            target,
            num_documents=most_documents(plan) + 1,
            pack_tokens=recipe.plan.pack_tokens,
            slot_dtype=DTYPES[layout.dtype],
        )
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    log.info("CUDA graphs of the target, %d sizes, are %s (%.1f s)", len(sizes), report.told(), seconds)
    return {"kind": "target_warm_up", "step": plan.start_step, "seconds": seconds, "cuda_graphs": asdict(report)}


def plan_sizes(*, recipe: Recipe, plan: RunPlan) -> list[FrameSize]:
    """Sizes of frame that hold every pack of a plan, validation included."""
    arrays, lengths = plan.schedule.arrays, CorpusStore.open(Path(recipe.corpus.path)).num_tokens
    packs = [item.pack for item in plan.validation]
    of_answers = [int(np.diff(pack.starts).max(initial=0)) for pack in packs]
    return frame_sizes(
        num_documents=np.array([*np.diff(arrays.pack_starts), *(pack.num_documents for pack in packs)], dtype=np.int64),
        num_tokens=np.array([*arrays.tokens_of_pack, *(pack.num_tokens for pack in packs)], dtype=np.int64),
        longest_document=max([int(lengths[arrays.document_ids].max(initial=1)), *of_answers]),
        pack_tokens=recipe.plan.pack_tokens,
    )


def most_documents(plan: RunPlan) -> int:
    """Of one pack of a plan, validation included."""
    return max(int(np.diff(plan.schedule.arrays.pack_starts).max()), *(item.pack.num_documents for item in plan.validation), 1)


def frame_sizes(
    *, num_documents: Int64Array, num_tokens: Int64Array, longest_document: int, pack_tokens: int
) -> list[FrameSize]:
    """The sizes that packs of `num_documents` and `num_tokens`, both `[P]`, need: powers of two of sequences, all of them with
    the longest document's length, rounded up.
    """
    longest = min(-(-longest_document // ROUNDED_TO) * ROUNDED_TO, pack_tokens)
    needed = num_documents - (num_tokens - pack_tokens) // longest
    exponents = np.unique(np.ceil(np.log2(np.maximum(needed, FEWEST_SEQUENCES))).astype(np.int64))
    return [FrameSize(num_sequences=1 << int(exponent), longest=longest) for exponent in exponents]
