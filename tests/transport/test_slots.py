"""Slots: where their bytes lie, their own version counters, their seals."""

from __future__ import annotations

import pytest
import torch

from slipstream.device.shared import SharedMemory
from slipstream.transport.slots import SlotLayout, SlotPool

ODD = SlotLayout(pack_tokens=2, num_taps=3, hidden_size=10, dtype="float32", last_hidden=True)


@pytest.mark.parametrize(("dtype", "width"), [("bfloat16", 2), ("float32", 4)])
@pytest.mark.parametrize("last_hidden", [False, True])
def test_layout(dtype: str, width: int, last_hidden: bool) -> None:
    layout = SlotLayout(pack_tokens=128, num_taps=5, hidden_size=576, dtype=dtype, last_hidden=last_hidden)
    assert layout.hidden_bytes == 128 * 5 * 576 * width
    assert layout.last_hidden_bytes == (128 * 576 * width if last_hidden else 0)
    assert layout.nbytes == layout.hidden_bytes + layout.last_hidden_bytes  # both are multiples of 128 already


def test_layout_aligns_what_is_odd() -> None:
    assert (ODD.hidden_bytes, ODD.last_hidden_offset, ODD.last_hidden_bytes, ODD.nbytes) == (240, 256, 80, 384)


def test_eight_bit_slots_have_scales_beside_them() -> None:
    layout = SlotLayout(pack_tokens=130, num_taps=5, hidden_size=6, dtype="float8_e4m3", last_hidden=True)
    assert (layout.hidden_bytes, layout.scale_bytes, layout.last_hidden_bytes) == (3900, 2600, 1560)
    assert (layout.scale_offset, layout.last_hidden_offset, layout.nbytes) == (3968, 3968 + 2688, 3968 + 2688 + 1664)
    pool = SlotPool.private(layout, 2)
    hidden, scale, last = pool.hidden(1), pool.scale(1), pool.last_hidden(1)
    assert scale is not None
    assert last is not None
    assert (hidden.dtype, scale.dtype, last.dtype) == (torch.float8_e4m3fn, torch.float32, torch.bfloat16)
    assert (hidden.shape, scale.shape, last.shape) == ((130, 5, 6), (130, 5), (130, 6))
    seals = {pool.seal(1, 0, 0)}
    for tensor in (hidden, scale, last):
        tensor.view(torch.uint8)[129, -1] ^= 1
        seals.add(pool.seal(1, 0, 0))
    assert len(seals) == 4, "every part is sealed"
    plain = SlotLayout(pack_tokens=8192, num_taps=5, hidden_size=5120, dtype="bfloat16")
    halved = SlotLayout(pack_tokens=8192, num_taps=5, hidden_size=5120, dtype="float8_e4m3")
    assert 0.5 < halved.nbytes / plain.nbytes < 0.501


def test_layout_refuses_what_cannot_be_sealed() -> None:
    with pytest.raises(AssertionError, match="32-bit"):
        SlotLayout(pack_tokens=1, num_taps=1, hidden_size=3, dtype="bfloat16")
    with pytest.raises(AssertionError, match="float16"):
        SlotLayout(pack_tokens=1, num_taps=1, hidden_size=4, dtype="float16")  # type: ignore[arg-type]


def test_two_mappings_of_one_memory_see_the_same_slots_and_no_others() -> None:
    memory = SharedMemory.create(ODD.nbytes * 3)
    writer, reader = (SlotPool.shared(ODD, 3, memory) for _ in range(2))
    for slot in range(3):
        writer.hidden(slot).fill_(slot + 1)
        last = writer.last_hidden(slot)
        assert last is not None
        last.fill_(-slot - 1)
    for slot in range(3):
        assert bool((reader.hidden(slot) == slot + 1).all())
        last = reader.last_hidden(slot)
        assert last is not None
        assert bool((last == -slot - 1).all())
        assert reader.hidden(slot).shape == (2, 3, 10)
        assert last.shape == (2, 10)
        assert reader.hidden(slot).data_ptr() % 128 == last.data_ptr() % 128 == 0
        assert writer.seal(slot, 7, 0) == reader.seal(slot, 7, 0)
    memory.close()


def test_memory_of_another_size_is_refused() -> None:
    memory = SharedMemory.create(ODD.nbytes * 3)
    with pytest.raises(AssertionError, match="do not hold 2 slots"):
        SlotPool.shared(ODD, 2, memory)
    memory.close()


def test_each_slot_has_a_version_counter_of_its_own_even_when_made_in_inference_mode() -> None:
    with torch.inference_mode():
        pool = SlotPool.private(ODD, 2)
    weight = torch.ones(10, requires_grad=True)
    loss = (pool.hidden(0) * weight).sum()
    with torch.inference_mode():  # as the target writes the next pack
        pool.hidden(1).fill_(3)
        pool.last_hidden(0).fill_(3)  # type: ignore[union-attr]
    loss.backward()
    assert weight.grad is not None
    loss = (pool.hidden(0) * weight).sum()
    pool.hidden(0).fill_(3)
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()


def test_a_seal_covers_every_tensor_of_the_slot_and_its_identity() -> None:
    pool = SlotPool.private(ODD, 2)
    pool.hidden(0).normal_()
    before = pool.seal(0, 5, 0)
    assert pool.seal(0, 5, 0) == before
    assert len({before, pool.seal(0, 5, 1), pool.seal(0, 6, 0)}) == 3
    pool.hidden(1).copy_(pool.hidden(0))
    assert pool.seal(1, 5, 0) != before
    last = pool.last_hidden(0)
    assert last is not None
    last[1, 9] = 1e-30
    assert pool.seal(0, 5, 0) != before


def test_without_last_hidden_there_is_none() -> None:
    pool = SlotPool.private(SlotLayout(pack_tokens=2, num_taps=1, hidden_size=4, dtype="bfloat16"), 1)
    assert pool.last_hidden(0) is None
    assert pool.hidden(0).dtype is torch.bfloat16
    pool.close()
    pool.close()
