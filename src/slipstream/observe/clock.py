"""Seconds as a clock shows them."""

from __future__ import annotations


def clock_time(seconds: float) -> str:
    """Hours, minutes and seconds, cut to whole ones: 3725.9 is "1:02:05"."""
    whole = int(seconds)
    return f"{whole // 3600}:{whole % 3600 // 60:02d}:{whole % 60:02d}"
