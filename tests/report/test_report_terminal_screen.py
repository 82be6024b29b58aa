"""The screen that a view draws on, over a pseudo-terminal: what is written, what is heard, and what is given back."""

from __future__ import annotations

import os
import signal
import termios
from collections.abc import Iterator

import pytest
from rich.text import Text

from slipstream.report.terminal_screen import END_OF_KEYS, ENTER, LEAVE, Screen


class Pair:
    """A pseudo-terminal of 20 x 4 cells: `screen` at its inner end, this test at its outer one."""

    def __init__(self) -> None:
        self.outer, self.inner = os.openpty()
        termios.tcsetwinsize(self.inner, (4, 20))
        os.set_blocking(self.outer, False)
        self.screen = Screen(keys=self.inner, out=self.inner)

    def written(self) -> str:
        """What was written since the last look."""
        data = b""
        try:
            while part := os.read(self.outer, 4096):
                data += part
        except BlockingIOError:
            pass
        return data.decode()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    os.close(made.outer)
    os.close(made.inner)


def test_a_terminal_is_taken_and_given_back(pair: Pair) -> None:
    before = termios.tcgetattr(pair.inner)
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGWINCH, signal.SIGTSTP)]

    def fail() -> None:
        with pair.screen as screen:
            assert screen.size == (20, 4)
            assert not termios.tcgetattr(pair.inner)[3] & termios.ECHO
            assert pair.written() == ENTER
            raise ValueError("a mistake")

    with pytest.raises(ValueError, match="a mistake"):
        fail()
    assert pair.written() == LEAVE
    assert termios.tcgetattr(pair.inner) == before
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGWINCH, signal.SIGTSTP)] == handlers


def test_only_what_changed_is_written(pair: Pair) -> None:
    with pair.screen as screen:
        screen.draw([Text("one"), Text("two"), Text("x" * 30), Text()])
        first = pair.written()
        assert "\x1b[2J" in first
        assert "\x1b[1;1Hone" + " " * 17 in first
        assert "x" * 20 in first
        assert "x" * 21 not in first
        screen.draw([Text("one"), Text("TWO"), Text("x" * 30), Text()])
        second = pair.written()
        assert "TWO" in second
        assert "one" not in second
        assert "\x1b[2J" not in second
        screen.draw([Text("one"), Text("TWO"), Text("x" * 30), Text()])
        assert pair.written() == ""
        screen.draw([Text("one", style="red"), Text("TWO"), Text("x" * 30), Text()])
        assert "one" in pair.written(), "another colour is a change"
        termios.tcsetwinsize(pair.inner, (5, 30))
        screen.draw([Text("one", style="red"), Text("TWO")])
        assert "TWO" + " " * 27 in pair.written(), "another size draws everything anew"


def test_keys_and_changes_of_size_end_a_wait(pair: Pair) -> None:
    with pair.screen as screen:
        assert screen.wait(0.0) == []
        os.write(pair.outer, b"\x1b[Bq")
        assert screen.wait(5.0) == ["down", "q"]
        signal.raise_signal(signal.SIGWINCH)
        assert screen.wait(60.0) == []
        os.write(pair.outer, b"+")
        assert screen.wait(5.0) == ["+"]


def test_a_signal_to_end_gives_the_terminal_back_first(pair: Pair) -> None:

    def end(number: int) -> None:
        with Screen(keys=pair.inner, out=pair.inner):
            pair.written()
            signal.raise_signal(number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        with pytest.raises(SystemExit) as ended:
            end(number)
        assert ended.value.code == 128 + number
        assert pair.written() == LEAVE


def test_a_terminal_that_is_gone_says_so() -> None:
    outer, inner = os.openpty()
    read, write = os.pipe()
    os.close(write)
    screen = Screen(keys=read, out=inner)
    assert screen.wait(5.0) == [END_OF_KEYS]
    for descriptor in (outer, inner, read):
        os.close(descriptor)
