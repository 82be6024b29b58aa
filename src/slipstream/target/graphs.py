"""Whether a target's forwards are replayed from recordings: decided in warm-up, by what a pack costs the CPU and takes in all.

Shape letters as in `capture`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from slipstream.device.graph_choice import GraphReport, Wish, should_record, time_steps
from slipstream.device.recorder import Recorder
from slipstream.records import Pack
from slipstream.target.frame import FrameSize
from slipstream.target.huggingface import HuggingFaceTarget
from slipstream.target.isolation import pack_documents
from slipstream.target.layouts import CHUNK_TOKENS
from slipstream.target.recorded import SlotMemory


def consider_recording(
    target: HuggingFaceTarget,
    *,
    wish: Wish,
    sizes: Sequence[FrameSize],
    pack_tokens: int,
    slot_dtype: torch.dtype,
    recorder: Recorder,
    finish: Callable[[], None],
) -> GraphReport:
    """Record a target's packed forward if that is wished or pays, for packs that one of `sizes` holds.

    Slots are to be of `slot_dtype`. A target that cannot be recorded stays as it is, whatever the wish: the report says why.
    `finish` waits for the device.
    """
    if wish == "off":
        return GraphReport(used=False, why='placement.cuda_graphs = "off"')
    if target.unrecordable is not None:
        return GraphReport(used=False, why=f"a pack is launched kernel by kernel, since {target.unrecordable}")
    pack = full_pack(pack_tokens, longest=sizes[0].longest, vocab_size=target.info.vocab_size)
    slot = new_slot(target, pack_tokens=pack_tokens, dtype=slot_dtype)

    def capture(_: None = None) -> None:
        hidden_TKD, scale_TK, last_hidden_TD = slot.parts
        assert hidden_TKD is not None
        target.capture(pack, hidden_TKD=hidden_TKD, scale_TK=scale_TK, last_hidden_TD=last_hidden_TD)

    capture()
    plain = time_steps(capture, prepare=lambda: None, finish=finish)
    used, why = should_record(plain, wish=wish, of="a pack")
    report = GraphReport(used=used, why=why, plain=plain)
    if not used:
        return report
    nbytes = target.record(recorder, sizes=sizes, slot=slot, example=pack)
    recorded = time_steps(capture, prepare=lambda: None, finish=finish)
    return replace(report, recorded=recorded, nbytes=nbytes)


def new_slot(target: HuggingFaceTarget, *, pack_tokens: int, dtype: torch.dtype) -> SlotMemory:
    """Zeroed memory on the target's device, as for a slot of a transport."""
    device, shape = target.bad_rows.device, (pack_tokens, target.num_taps, target.hidden_size)
    with torch.inference_mode(False):
        return SlotMemory(
            hidden_TKD=torch.zeros(shape, dtype=dtype, device=device),
            scale_TK=torch.zeros(shape[:2], device=device) if dtype == torch.float8_e4m3fn else None,
            last_hidden_TD=torch.zeros(shape[0], shape[2], dtype=target.dtype, device=device) if target.last_hidden else None,
        )


def full_pack(pack_tokens: int, *, longest: int, vocab_size: int) -> Pack:
    """Documents of `longest` tokens until a pack is full, the last one shorter: every size of that length holds it."""
    ids = np.arange(pack_tokens, dtype=np.int32) % np.int32(vocab_size)
    documents = [ids[start : start + longest] for start in range(0, pack_tokens, longest)]
    return pack_documents(documents, capacity_tokens=pack_tokens)


def crowded_pack(pack_tokens: int, *, num_documents: int, vocab_size: int) -> Pack:
    """A full pack of so many documents, cut so that chunked kernels have as many chunks as such a pack can have."""
    num_documents = min(num_documents, pack_tokens)
    whole, rest = divmod(pack_tokens - num_documents, CHUNK_TOKENS)
    lengths = [CHUNK_TOKENS * (whole // num_documents + (at < whole % num_documents)) + 1 for at in range(num_documents)]
    lengths[-1] += rest
    ids = np.arange(pack_tokens, dtype=np.int32) % np.int32(vocab_size)
    return pack_documents(np.split(ids, np.cumsum(lengths)[:-1]), capacity_tokens=pack_tokens)


def run_crowded(target: HuggingFaceTarget, *, num_documents: int, pack_tokens: int, slot_dtype: torch.dtype) -> None:
    """Launch a pack with the most chunks, for warm-up: what delta nets allocate grows with them, and no later pack needs more.

    `num_documents` is the most that a pack has, padding counted. Nothing for a target that takes no document of that length.
    """
    pack = crowded_pack(pack_tokens, num_documents=num_documents, vocab_size=target.info.vocab_size)
    if target.accepts(pack):
        hidden_TKD, scale_TK, last_hidden_TD = new_slot(target, pack_tokens=pack_tokens, dtype=slot_dtype).parts
        assert hidden_TKD is not None
        target.capture(pack, hidden_TKD=hidden_TKD, scale_TK=scale_TK, last_hidden_TD=last_hidden_TD)
