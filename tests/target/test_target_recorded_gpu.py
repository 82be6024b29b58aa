"""Captures replayed from CUDA graphs: the bits of launched ones, without waiting and without allocating."""

from __future__ import annotations

import pytest
import torch
from test_target_engine_gpu import MODELS, PACK_TOKENS, TAPS, allocated, capture, make_pack

from slipstream.config import read_target_info
from slipstream.device.recorder import CudaRecorder
from slipstream.target.frame import FrameSize
from slipstream.target.graphs import consider_recording
from slipstream.target.huggingface import load_target

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

SIZES = (FrameSize(num_sequences=8, longest=768), FrameSize(num_sequences=32, longest=768))
HELD = [make_pack(), make_pack((20,) * 30, seed=4), make_pack((768, 768, 512), seed=5), make_pack((5,), seed=6)]
TOO_LONG = make_pack((900, 20), seed=7)


@pytest.mark.parametrize(("kind", "dtype"), [("mistral", "bfloat16"), ("llama", "bfloat16"), ("qwen3", "float8")])
def test_replayed_captures_are_launched_ones(tmp_path, kind, dtype):
    if dtype == "float8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no float8")
    torch._dynamo.reset()
    torch.manual_seed(5)
    MODELS[kind]().to(torch.bfloat16).save_pretrained(tmp_path)
    info = read_target_info(str(tmp_path))
    launched, replayed = (
        load_target(info=info, dtype=dtype, tap_layers=TAPS, device="cuda", pack_tokens=PACK_TOKENS) for _ in range(2)
    )
    launched.fill_frames(SIZES)
    report = consider_recording(
        replayed,
        wish="on",
        sizes=SIZES,
        pack_tokens=PACK_TOKENS,
        slot_dtype=torch.bfloat16,
        recorder=CudaRecorder(torch.device("cuda", torch.cuda.current_device()), stage="target"),
        finish=torch.cuda.synchronize,
    )
    assert report.used, report
    assert report.recorded is not None
    assert report.plain is not None
    assert report.recorded.launch_seconds < report.plain.launch_seconds / 2, report
    for pack in (*HELD, TOO_LONG, *HELD):
        assert torch.equal(capture(replayed, pack), capture(launched, pack))
    assert int(replayed.bad_rows) == int(launched.bad_rows) == 0

    slot = capture(replayed, HELD[0])
    torch.cuda.synchronize()
    before = allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for pack in HELD:
            replayed.capture(pack, hidden_TKD=slot)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert allocated() == before
