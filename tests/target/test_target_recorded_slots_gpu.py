"""Replays on CUDA into slots of both kinds, their bad rows; and attention, which does not depend on what fills borders up."""

from __future__ import annotations

import pytest
import torch
from test_target_engine_gpu import MODELS, PACK_TOKENS, TAPS, WINDOW, make_pack
from torch.nn.attention.varlen import varlen_attn

from slipstream.config import read_target_info
from slipstream.device.recorder import CudaRecorder
from slipstream.target.frame import FrameRing, FrameSize, send_frame
from slipstream.target.graphs import consider_recording, new_slot
from slipstream.target.huggingface import load_target
from slipstream.target.kernels import cuda_kernels
from slipstream.target.layouts import Packing, lay_out

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

SIZES = (FrameSize(num_sequences=16, longest=768), FrameSize(num_sequences=64, longest=768))
PACKS = (make_pack(), make_pack((40,) * 45, seed=3), make_pack((5,), seed=4))


def loaded(folder):
    torch._dynamo.reset()
    torch.manual_seed(5)
    MODELS["llama"]().to(torch.bfloat16).save_pretrained(folder)
    info = read_target_info(str(folder))
    return load_target(info=info, dtype="bfloat16", tap_layers=TAPS, device="cuda", pack_tokens=PACK_TOKENS)


def considered(target, *, slots):
    return consider_recording(
        target,
        wish="on",
        sizes=SIZES,
        pack_tokens=PACK_TOKENS,
        slot_dtype=slots,
        recorder=CudaRecorder(torch.device("cuda", torch.cuda.current_device()), stage="target"),
        finish=torch.cuda.synchronize,
    )


def captured(target, pack, *, slots):
    """The bytes of a slot that held rubbish before."""
    slot = new_slot(target, pack_tokens=PACK_TOKENS, dtype=slots)
    parts = [part.view(torch.uint8).fill_(0x7F) for part in slot.parts if part is not None]
    target.capture(pack, hidden_TKD=slot.hidden_TKD, scale_TK=slot.scale_TK)
    return [part.clone() for part in parts]


@pytest.mark.parametrize("slots", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_slots_and_bad_rows_of_replays_are_those_of_launches(tmp_path, slots):
    """One target, launched first: its weights, one of which is not finite then, are the recordings' too."""
    target = loaded(tmp_path)
    launched = [captured(target, pack, slots=slots) for pack in PACKS]
    assert considered(target, slots=slots).used
    for pack, expected in zip(PACKS, launched, strict=True):
        for ours, theirs in zip(captured(target, pack, slots=slots), expected, strict=True):
            assert torch.equal(ours, theirs)
    assert int(target.bad_rows) == 0
    target._model.embed_tokens.weight[int(PACKS[0].token_ids[400])] = float("inf")
    replayed = captured(target, PACKS[0], slots=slots)
    bad, target._recorded = int(target.bad_rows), None
    for ours, theirs in zip(replayed, captured(target, PACKS[0], slots=slots), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    assert int(target.bad_rows) == 2 * bad > 0


@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("window", [None, WINDOW])
def test_attention_depends_neither_on_empty_sequences_nor_on_the_longest(size, window):
    """Bit for bit what torch's own function gives on the borders as they are."""
    kernels, ring, pack = cuda_kernels(hybrid=False), FrameRing(torch.device("cuda")), PACKS[0]
    torch.manual_seed(1)
    heads = [torch.randn(PACK_TOKENS, count, size, device="cuda", dtype=torch.bfloat16) for count in (9, 3, 3)]
    (forward,) = lay_out(pack, packing=Packing.PACKED)
    borders, longest = torch.from_numpy(forward.cu_seqlens).cuda(), forward.longest
    asked = {"scale": size**-0.5, "window_size": (-1 if window is None else window - 1, 0)}
    try:
        expected = varlen_attn(*heads, borders, borders, longest, longest, **asked)
    except ValueError:  # later torch wants leave for grouped heads
        expected = varlen_attn(*heads, borders, borders, longest, longest, **asked, enable_gqa=True)
    for held in (None, *SIZES, FrameSize(num_sequences=200, longest=PACK_TOKENS)):
        frame = send_frame(forward, num_tokens=pack.num_tokens, ring=ring, compiled=False, size=held)
        given = kernels.attend(*heads, frame=frame, scale=asked["scale"], window=window)
        assert torch.equal(given[: pack.num_tokens], expected[: pack.num_tokens]), held
