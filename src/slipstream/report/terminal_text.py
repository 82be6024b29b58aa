"""Lines of text for a terminal: fitted to a width, put side by side, wrapped, and numbers in few cells."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import numpy as np
from rich.text import Text

from slipstream.observe.clock import clock_time


def fitted(rows: Sequence[Text], *, width: int, height: int) -> list[Text]:
    """Exactly `height` lines, none wider than `width` cells."""
    found = []
    for row in rows[:height]:
        line = row.copy()
        line.truncate(width, overflow="ellipsis")
        found.append(line)
    return found + [Text() for _ in range(height - len(found))]


def beside(blocks: Sequence[Sequence[Text]], *, width: int, gap: int = 2) -> list[Text]:
    """Blocks of lines next to each other, of equal widths (see `columns_of`), with a gap between them."""
    if len(blocks) == 1:
        return list(blocks[0])
    each = column_width(width, len(blocks), gap=gap)
    rows = []
    for number in range(max(map(len, blocks))):
        row = Text()
        for block in blocks:
            part = block[number].copy() if number < len(block) else Text()
            part.truncate(each, overflow="ellipsis", pad=True)
            row.append(" " * gap if row else "").append_text(part)
        rows.append(row)
    return rows


def column_width(width: int, columns: int, *, gap: int = 2) -> int:
    """Width of each of some equal columns."""
    return (width - gap * (columns - 1)) // columns


def apart(left: Text, right: Text, *, width: int) -> Text:
    """Two texts at both ends of a line; the left one is cut when they do not fit, the right one goes when there is no room."""
    room = width - right.cell_len - 1
    left = left.copy()
    if room < 8:
        left.truncate(width, overflow="ellipsis")
        return left
    left.truncate(room, overflow="ellipsis")
    return left.append(" " * (width - left.cell_len - right.cell_len)).append_text(right)


def heading(title: str, *, width: int, told: str = "") -> Text:
    """A line with a title, and something said of it at its right end."""
    row = Text().append("─ ", style="dim").append(title, style="bold").append(" ")
    end = f" {told} ─" if told and row.cell_len + len(told) + 6 <= width else ""
    row.append("─" * max(0, width - row.cell_len - len(end)), style="dim")
    return row.append(end, style="dim")


def wrapped(text: str, width: int, *, indent: str = "", hanging: str | None = None) -> list[str]:
    """Lines of a sentence, the first behind `indent`, the others behind `hanging`."""
    return textwrap.wrap(text, max(width, 12), initial_indent=indent, subsequent_indent=indent if hanging is None else hanging)


def cut(rows: Sequence[Text], *, width: int, height: int) -> list[Text]:
    """At most so many rows; where some are left out, the last one ends in an ellipsis."""
    if len(rows) <= height:
        return list(rows)
    kept = list(rows[: max(0, height)])
    if kept:
        last = kept[-1].copy()
        last.rstrip()
        last.truncate(width - 2, overflow="crop")
        kept[-1] = last.append(" …")
    return kept


def with_parts(row: Text, parts: Sequence[tuple[str, str]], *, width: int) -> Text:
    """The row and as many labelled values behind it as fit."""
    for label, value in parts:
        if row.cell_len + len(label) + len(value) + 2 > width:
            break
        row.append(f"  {label}", style="dim").append(value)
    return row


def short(value: float) -> str:
    """A number in at most six cells."""
    size = abs(value)
    if size >= 1e12 or not np.isfinite(value):
        return f"{value:.0e}"
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "K")):
        if size >= limit:
            scaled = value / (1e3 if unit == "K" else limit)
            return f"{scaled:.0f}{unit}" if abs(scaled) >= 100 else f"{scaled:.1f}{unit}"
    if size >= 1000:
        return f"{value:.0f}"
    if size >= 100:
        return f"{value:.1f}"
    if size >= 0.01 or value == 0:
        return f"{value:.3g}"
    return f"{value:.1g}"


def exact(value: float) -> str:
    """A number with as many digits as say something."""
    return short(value) if abs(value) >= 10_000 else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """Hours, minutes and seconds; days where there are any."""
    whole = int(seconds)
    days = f"{whole // 86400}d " if whole >= 86400 else ""
    return days + clock_time(whole % 86400)


def window_name(seconds: float | None) -> str:
    """A window in words."""
    if seconds is None:
        return "whole run"
    return f"last {seconds:.0f} s" if seconds < 120 else f"last {seconds / 60:.0f} min"


def capital(text: str) -> str:
    """The sentence with its first letter large."""
    return text[:1].upper() + text[1:]
