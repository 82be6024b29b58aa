"""A terminal taken over for a while: whole frames are drawn, keys and changes of size are heard, and all is given back.

Only lines that changed are written, in one update, so that nothing flickers and a slow connection has little to carry.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import signal
import termios
import tty
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any

from rich.console import Console
from rich.text import Text

ENTER = "\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[2J"
"""The other screen, no cursor, no wrapping at the right edge."""
LEAVE = "\x1b[0m\x1b[?7h\x1b[?25h\x1b[?1049l"
BEGIN_UPDATE, END_UPDATE = "\x1b[?2026h", "\x1b[?2026l"
"""A terminal that knows these shows what is between them at once; others ignore them."""
SEQUENCES = {
    "\x1b[A": "up", "\x1b[B": "down", "\x1b[C": "right", "\x1b[D": "left", "\x1b[Z": "back_tab",
    "\x1bOA": "up", "\x1bOB": "down", "\x1bOC": "right", "\x1bOD": "left", "\t": "tab",
}  # fmt: skip
END_OF_KEYS = "end"
ENDING = (signal.SIGTERM, signal.SIGHUP)
WITHOUT_CURSOR = ("", "dumb", "unknown")
"""Values of TERM whose terminals cannot move the cursor."""


class Screen:
    """Draws on the terminal behind two descriptors, one to read keys from and one to write to. A context.

    While it is entered, SIGTERM and SIGHUP end the process by `SystemExit` with 128 and the signal's number, as a shell
    reports them; stopping (Ctrl-Z) gives the terminal back until the process goes on.
    """

    def __init__(self, *, keys: int, out: int) -> None:
        self._keys, self._out = keys, out
        self._drawn: list[Text] = []
        self._size = (0, 0)
        self._before: list[Any] = []
        self._handlers: dict[int, Any] = {}
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in cells, now."""
        found = os.get_terminal_size(self._out)
        return max(1, found.columns), max(1, found.lines)

    def draw(self, rows: Sequence[Text]) -> None:
        """Show a frame; lines that are there already are not written again."""
        if self.size != self._size:
            self._size, self._drawn = self.size, []
        parts = [] if self._drawn else ["\x1b[2J"]
        for number, row in enumerate(rows):
            if number >= len(self._drawn) or not _same(self._drawn[number], row):
                parts.append(f"\x1b[{number + 1};1H{self._ansi(row)}\x1b[0m")
        self._drawn = list(rows)
        if parts:
            self._write(BEGIN_UPDATE + "".join(parts) + END_UPDATE)

    def wait(self, seconds: float) -> list[str]:
        """Keys that come within some seconds; none when the time is over or the size has changed. "end" when none can come."""
        ready, _, _ = select.select([self._keys, self._woken], [], [], max(0.0, seconds))
        if self._woken in ready:
            os.read(self._woken, 1024)
        if self._keys not in ready:
            return []
        read = os.read(self._keys, 1024)
        return split_keys(read.decode("utf-8", errors="replace")) if read else [END_OF_KEYS]

    def __enter__(self) -> Screen:
        self._before = termios.tcgetattr(self._keys)
        handled: dict[int, Callable[[int, FrameType | None], None]] = dict.fromkeys(ENDING, self._end)
        handled |= {signal.SIGWINCH: self._resized, signal.SIGTSTP: self._stop}
        for number, handler in handled.items():
            self._handlers[number] = signal.signal(number, handler)
        self._take()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._give_back()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        os.close(self._woken)
        os.close(self._wake)

    def _take(self) -> None:
        tty.setcbreak(self._keys)
        self._drawn = []
        self._write(ENTER)

    def _give_back(self) -> None:
        with contextlib.suppress(OSError, termios.error):  # a terminal that has gone needs nothing back
            self._write(LEAVE)
            termios.tcsetattr(self._keys, termios.TCSADRAIN, self._before)

    def _end(self, number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    def _resized(self, number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake, b"r")

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._give_back()
        signal.raise_signal(signal.SIGSTOP)
        self._take()
        self._resized(number, frame)

    def _ansi(self, row: Text) -> str:
        """The line and the blanks behind it: erasing what is left of it would take the last cell along."""
        row = row.copy()
        row.truncate(self._size[0], overflow="crop", pad=True)
        file = io.StringIO()
        console = Console(file=file, force_terminal=True, width=self._size[0], highlight=False, legacy_windows=False)
        console.print(row, end="", no_wrap=True, overflow="crop", crop=True)
        return file.getvalue()

    def _write(self, text: str) -> None:
        data = text.encode("utf-8", errors="replace")
        while data:
            data = data[os.write(self._out, data) :]


def _same(one: Text, other: Text) -> bool:
    """Whether two lines look the same: texts that are equal may still differ in the style of the whole."""
    return one == other and one.style == other.style


def split_keys(text: str) -> list[str]:
    """Keys by name, or as the character they send; an escape sequence that is not known is left out."""
    keys = []
    while text:
        known = next((sequence for sequence in SEQUENCES if text.startswith(sequence)), None)
        if known is not None:
            keys.append(SEQUENCES[known])
            text = text[len(known) :]
        elif text.startswith("\x1b"):
            text = _after_sequence(text)
        else:
            keys.append(text[0])
            text = text[1:]
    return keys


def _after_sequence(text: str) -> str:
    """What is behind an escape sequence: it ends with its first letter or `~`."""
    if len(text) < 2 or text[1] not in "[O":
        return text[1:]
    for place, character in enumerate(text[2:], start=2):
        if character.isalpha() or character == "~":
            return text[place + 1 :]
    return ""
