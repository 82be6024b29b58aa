"""Seals: equal to their definition, and different for every way in which a slot can be wrong."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.transport.seals import checksum, make_seal


def defined(words: list[int], first_word: int = 0) -> int:
    """The definition, in Python integers."""
    return sum(word * (2 * (first_word + i) + 1) for i, word in enumerate(words)) % 2**64


def random_words(count: int, *, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31 - 1, (count,), dtype=torch.int32, generator=generator)


@given(
    words=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=50),
    first_word=st.integers(0, 2**40),
)
def test_it_is_its_definition(words: list[int], first_word: int) -> None:
    assert checksum(torch.tensor(words, dtype=torch.int32), first_word=first_word) == defined(words, first_word)


@pytest.mark.parametrize("count", [0, 1, 4095, 4096, 4097, 7 * 4096, 7 * 4096 + 17, 8 * 4096, 300_001])
def test_it_is_its_definition_across_blocks(count: int) -> None:
    words = random_words(count)
    assert checksum(words) == defined(words.tolist())


def test_extremes_wrap_as_defined() -> None:
    words = torch.full((70 * 4096 + 3,), -(2**31), dtype=torch.int32)
    assert checksum(words) == defined(words.tolist())


def test_parts_add_up() -> None:
    words = random_words(10_000)
    parts = checksum(words[:6000].clone()) + checksum(words[6000:].clone(), first_word=6000)
    assert parts % 2**64 == checksum(words)


@settings(max_examples=60, deadline=None)
@given(position=st.integers(0, 69_999), bit=st.integers(0, 31))
def test_any_flipped_bit_shows(position: int, bit: int) -> None:
    words = random_words(70_000)
    before = checksum(words)
    words.numpy().view("uint32")[position] ^= 1 << bit
    assert checksum(words) != before


@settings(max_examples=60, deadline=None)
@given(first=st.integers(0, 999), second=st.integers(0, 999))
def test_swapped_rows_show(first: int, second: int) -> None:
    """A plain sum would not see it."""
    rows = random_words(1000 * 64).view(1000, 64)
    before = checksum(rows.view(-1))
    rows[[first, second]] = rows[[second, first]]
    assert (checksum(rows.view(-1)) == before) is (first == second)


def test_identity_is_part_of_the_seal() -> None:
    seals = {
        make_seal(total=total, pack_id=pack_id, slot=slot, generation=generation)
        for total in (0, 1, 2**64 - 1)
        for pack_id in (-1, 0, 1, 2)
        for slot in (0, 1, 2)
        for generation in (0, 1, 2)
    }
    assert len(seals) == 3 * 4 * 3 * 3
    assert all(0 <= seal < 2**64 for seal in seals)


def test_the_seal_of_today_is_the_seal_of_tomorrow() -> None:
    """Pinned: the kernel on a GPU and this code must agree."""
    total = checksum(torch.arange(-5, 100_000, dtype=torch.int32))
    assert total == defined(list(range(-5, 100_000)))
    assert make_seal(total=total, pack_id=3, slot=1, generation=2) == 0x204E718341F549EB


def test_it_works_in_every_grad_mode_and_takes_no_second_slot() -> None:
    words = random_words(8_000_000)
    expected = checksum(words)
    with torch.inference_mode():
        assert checksum(words) == expected
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        checksum(words)
    largest = max(event.self_cpu_memory_usage for event in profile.events())
    assert 0 < largest < words.nbytes // 50


def test_it_refuses_other_tensors() -> None:
    with pytest.raises(AssertionError, match="int32"):
        checksum(torch.zeros(4))
    with pytest.raises(AssertionError, match="flat"):
        checksum(torch.zeros(4, 4, dtype=torch.int32))
