"""Packed forwards replayed from recordings: the bits of launched ones, on a CPU model that keeps a CUDA graph's rules."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from forward_tape import TapeRecorder, attention
from reference_kernels import reference_kernels
from test_target_engine import TAPS, engine_target
from test_target_float8 import float8_target
from tiny_targets import HIDDEN, VOCAB, make_pack, save_target

from slipstream.device.graph_choice import StepTimes
from slipstream.errors import TargetError
from slipstream.target import graphs
from slipstream.target.frame import FrameSize
from slipstream.target.graphs import consider_recording, full_pack, new_slot
from slipstream.target.huggingface import load_target
from slipstream.target.layouts import Packing

T = 96
SIZES = (FrameSize(num_sequences=8, longest=40), FrameSize(num_sequences=32, longest=40))
PACKS = {
    "five and padding": make_pack(),
    "full": make_pack((40, 31, 25)),
    "short ones": make_pack((1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12)),
    "padding cut twice": make_pack((5,)),
    "another five": make_pack((11, 29, 2, 2, 17), seed=9),
}
RECORDABLE = ("llama", "mistral", "qwen3")


def tape_target(info, *, dtype="float32", last_hidden=False, taps=TAPS):
    if dtype == "float8":
        target = float8_target(info, taps=taps)
        kernels = replace(reference_kernels(), attention=attention, product=target.engine._kernels.product)
    else:
        target = engine_target(info, taps=taps, dtype=dtype, last_hidden=last_hidden)
        kernels = replace(reference_kernels(), attention=attention)
    target.engine._kernels = kernels
    target.fill_frames(SIZES)
    return target


def recorded(info, *, wish="on", slots=torch.float32, **keys):
    target, recorder = tape_target(info, **keys), TapeRecorder()
    report = consider_recording(
        target, wish=wish, sizes=SIZES, pack_tokens=T, slot_dtype=slots, recorder=recorder, finish=lambda: None
    )
    return target, recorder, report


def captured(target, pack, *, dtype=torch.float32, value=float("nan")):
    """The parts of a slot that held rubbish before."""
    slot = new_slot(target, pack_tokens=T, dtype=dtype)
    for part in slot.parts:
        if part is not None:
            part.view(torch.uint8).fill_(0x7F) if part.dtype == torch.float8_e4m3fn else part.fill_(value)
    hidden, scale, last = slot.parts
    assert target.capture(pack, hidden_TKD=hidden, scale_TK=scale, last_hidden_TD=last) == pack.num_tokens
    return [part.view(torch.uint8) for part in slot.parts if part is not None]


def assert_same(left, right):
    assert len(left) == len(right)
    assert all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


@pytest.fixture(scope="module", params=RECORDABLE)
def info(request, tmp_path_factory):
    return save_target(tmp_path_factory.mktemp(request.param), request.param)


@pytest.mark.parametrize("slots", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8"])
def test_replayed_forwards_are_launched_ones(info, dtype, slots):
    launched = tape_target(info, dtype=dtype)
    replayed, recorder, report = recorded(info, dtype=dtype, slots=slots)
    assert report.used
    before = [tape.num_replays for tape in recorder.tapes]
    for name in (*PACKS, *PACKS):
        assert_same(captured(replayed, PACKS[name], dtype=slots), captured(launched, PACKS[name], dtype=slots))
    grown = [tape.num_replays - then for tape, then in zip(recorder.tapes, before, strict=True)]
    assert grown == [8, 2], "the smallest size that holds a pack"
    assert int(launched.bad_rows) == int(replayed.bad_rows) == 0


def test_last_hidden_states_are_replayed_too(info):
    launched = tape_target(info, last_hidden=True)
    replayed, recorder, _ = recorded(info, last_hidden=True)
    for pack in PACKS.values():
        assert_same(captured(replayed, pack), captured(launched, pack))
    assert sum(tape.num_replays for tape in recorder.tapes) == 3 + len(PACKS)


def test_bad_rows_are_counted_by_replays_and_not_by_recording(info):
    """The pack that is recorded with has the poisoned token too."""
    launched, fresh = tape_target(info, taps=(0, 1)), tape_target(info, taps=(0, 1))
    pack, poisoned = make_pack((20, 20), capacity=T), 50
    pack.token_ids[30] = poisoned
    for target in (launched, fresh):
        target._model.embed_tokens.weight[poisoned] = float("inf")
    recorder = TapeRecorder()
    example = full_pack(T, longest=40, vocab_size=VOCAB)
    assert poisoned in example.token_ids
    slot = new_slot(fresh, pack_tokens=T, dtype=torch.float32)
    assert fresh.record(recorder, sizes=SIZES, slot=slot, example=example) > slot.nbytes + 4711
    assert int(fresh.bad_rows) == 0
    for times in (1, 2):
        assert_same(captured(fresh, pack), captured(launched, pack))
        assert int(fresh.bad_rows) == int(launched.bad_rows) > 0
        assert sum(tape.num_replays for tape in recorder.tapes) == times


def test_what_no_recording_fits_is_launched(info):
    launched = tape_target(info)
    replayed, recorder, _ = recorded(info)
    before = sum(tape.num_replays for tape in recorder.tapes)
    longer, many = make_pack((41, 20)), make_pack((1,) * 40)
    for pack in (longer, many):
        assert_same(captured(replayed, pack), captured(launched, pack))
    assert_same(captured(replayed, longer, dtype=torch.bfloat16), captured(launched, longer, dtype=torch.bfloat16))
    whole = replayed.hidden_states(PACKS["full"], packing=Packing.PADDED)
    assert torch.equal(whole, launched.hidden_states(PACKS["full"], packing=Packing.PADDED))
    assert not captured(replayed, make_pack((), capacity=T))[0].any()
    assert sum(tape.num_replays for tape in recorder.tapes) == before


def test_a_target_with_windows_launches_with_the_longest_sequence_of_its_size(tmp_path):
    """There kernels differ by whether a window is wider than the longest sequence: it is that of the plan, replayed or not."""
    asked = []

    def noting(*given, frame, **keys):
        asked.append((frame.longest, len(frame.cu_seqlens_M) - 1))
        return attention(*given, frame=frame, **keys)

    for kind, expected in (("mistral", (40, 8)), ("llama", (76, 3))):
        target = tape_target(save_target(tmp_path / kind, kind))
        target.engine._kernels = replace(target.engine._kernels, attention=noting)
        captured(target, make_pack((10, 10), capacity=T))
        assert set(asked) == {expected}, kind
        asked.clear()


def test_a_layer_that_goes_around_the_kernels_is_an_error_when_recorded(info):
    target = tape_target(info)
    target._model.layers[1].forward = lambda hidden_states, **_: hidden_states
    with pytest.raises(TargetError, match=r"launched .* not"):
        target.record(
            TapeRecorder(),
            sizes=SIZES,
            slot=new_slot(target, pack_tokens=T, dtype=torch.float32),
            example=full_pack(T, longest=40, vocab_size=VOCAB),
        )


@pytest.mark.parametrize(
    ("wish", "launch", "used", "why"),
    [
        ("auto", 0.0258, True, "launching takes 25.8 of 29.0 ms of a pack, more than 50%"),
        ("auto", 0.0043, False, "launching takes 4.3 of 29.0 ms of a pack, not more than 50%"),
        ("on", 0.0043, True, 'placement.cuda_graphs = "on"; launching takes 4.3 of 29.0 ms of a pack'),
        ("off", 0.0258, False, 'placement.cuda_graphs = "off"'),
    ],
)
def test_the_choice(info, monkeypatch, wish, launch, used, why):
    times = StepTimes(launch_seconds=launch, step_seconds=0.029)
    monkeypatch.setattr(graphs, "time_steps", lambda *_, **__: times)
    _, recorder, report = recorded(info, wish=wish)
    assert (report.used, report.why) == (used, why)
    assert report.plain == (None if wish == "off" else times)
    assert (report.recorded, bool(recorder.tapes)) == ((times, True) if used else (None, False))
    slot = T * len(TAPS) * HIDDEN * 4
    assert (report.nbytes > slot + 4711) == used


def test_what_cannot_be_recorded_says_why(tmp_path, monkeypatch):
    for wish in ("auto", "on"):
        _, recorder, report = recorded(save_target(tmp_path / wish, "hybrid"), wish=wish)
        assert not report.used
        assert report.why == (
            "a pack is launched kernel by kernel, since its delta nets launch as many programs as a pack's documents need"
        )
        assert not recorder.tapes
    info = save_target(tmp_path / "llama", "llama")
    assert load_target(info=info, dtype="float32", tap_layers=TAPS).unrecordable == "it runs as transformers has it"
    target = tape_target(info)
    assert target.unrecordable is None
    target.packing = Packing.PADDED
    assert target.unrecordable == "documents run padded"
    monkeypatch.setattr("slipstream.target.engine.can_fuse", lambda layers: False)
    assert tape_target(info).unrecordable == "its layers are those of transformers"


def test_sizes_hold_what_fits_and_fill_borders_up():
    size = FrameSize(num_sequences=6, longest=40)
    pack = make_pack((30, 17), capacity=T)
    borders = size.filled(pack.cu_seqlens(), num_tokens=pack.num_tokens)
    assert borders.dtype == np.int32
    assert borders.tolist() == [0, 30, 47, 87, 96, 96, 96]
    full = make_pack((40, 40, 16), capacity=T)
    assert size.filled(full.cu_seqlens(), num_tokens=T).tolist() == [0, 40, 80, 96, 96, 96, 96]
    for lengths, fits in (((40, 3, 3, 40), True), ((41,), False), ((1, 1, 1, 1), False), ((1, 1, 1), True)):
        pack = make_pack(lengths, capacity=T)
        assert size.holds(pack.cu_seqlens(), num_tokens=pack.num_tokens) == fits, lengths
