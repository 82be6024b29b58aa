"""What a process took at most: torch's peaks before and after recordings, and what recordings keep beside."""

from __future__ import annotations

import pytest

from slipstream.device.allocated import Taken, allocated_memory, off_by


def test_without_recordings_the_peaks_are_torch_s() -> None:
    taken = Taken()
    assert (taken.peak(7), taken.reserved(9)) == (7, 9)
    assert (taken.kept_bytes, taken.replayed) == (0, ())


def test_what_recordings_keep_is_added_from_then_on() -> None:
    """A forward pass leaves 40 of its pool's 50 to tensors, which its backward pass gives back."""
    taken = Taken()
    taken.keep(10, stage="drafter", peak=100, reserved=130)
    taken.keep(40, stage="drafter", peak=60, reserved=140)
    assert taken.peak(20) == 100, "it was more before"
    assert taken.peak(70) == 120, "70 handed out, 50 kept"
    assert (taken.reserved(120), taken.reserved(150)) == (140, 150)
    assert (taken.kept_bytes, taken.replayed) == (50, ("drafter",))


def test_between_two_recordings_the_earlier_one_counts() -> None:
    taken = Taken()
    taken.keep(50, stage="target", peak=10, reserved=0)
    taken.keep(5, stage="drafter", peak=90, reserved=0)
    assert taken.peak(0) == 140
    assert taken.replayed == ("target", "drafter")


def test_peaks_are_forgotten_and_recordings_are_not() -> None:
    taken = Taken()
    taken.keep(50, stage="drafter", peak=500, reserved=600)
    taken.forget_peaks()
    assert (taken.peak(8), taken.reserved(9)) == (58, 9)


def test_a_process_without_a_gpu_has_nothing_to_tell() -> None:
    assert allocated_memory() is None
    assert off_by(predicted=11, measured=10) == pytest.approx(0.1)
