"""A terminal of a given size, by tmux: a server of its own behind a socket of its own, which ends with it."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

TMUX = shutil.which("tmux")


class Terminal:
    """One window of a shell that shows no more than it is told to. `lines` are those on it, without blanks at their ends."""

    def __init__(self, folder: Path, *, width: int, height: int) -> None:
        assert TMUX is not None
        self._socket = folder / "tmux"
        environment = {name: value for name, value in os.environ.items() if name not in ("TMUX", "NO_COLOR", "COLORTERM")}
        environment |= {"LC_ALL": "C.UTF-8", "HISTFILE": ""}
        size = ("-x", str(width), "-y", str(height))
        command = [TMUX, "-S", str(self._socket), "-f", os.devnull, "-u", "new-session", "-d", *size, "sh"]
        subprocess.run(command, check=True, env=environment, cwd=folder)
        self.wait_for(lambda lines: any(line.strip() for line in lines))  # the shell's prompt

    def type(self, *keys: str) -> None:
        """Press keys by tmux's names; text is typed as it is."""
        self._call("send-keys", *keys)

    def run(self, command: Sequence[str], *, then: str = "") -> None:
        """Type a command line and Enter; `then` follows it as it is."""
        self._call("send-keys", "-l", shlex.join(command) + then)
        self._call("send-keys", "Enter")

    def resize(self, *, width: int, height: int) -> None:
        """Another size, while whatever runs goes on."""
        self._call("resize-window", "-x", str(width), "-y", str(height))

    def lines(self, *, colours: bool = False) -> list[str]:
        """What is on the screen; with `colours`, escape sequences stay in."""
        return self._call("capture-pane", "-p", *(["-e"] if colours else [])).split("\n")[:-1]

    def wait_for(self, seen: str | Callable[[list[str]], bool], *, seconds: float = 60) -> list[str]:
        """Wait for a text, or for lines that please; the lines then."""
        deadline = time.monotonic() + seconds
        while True:
            lines = self.lines()
            if seen in "\n".join(lines) if isinstance(seen, str) else seen(lines):
                return lines
            assert time.monotonic() < deadline, "\n".join([f"not seen: {seen}", *lines])
            time.sleep(0.1)

    @property
    def in_other_screen(self) -> bool:
        """Whether a program has taken the screen over."""
        return self._call("display-message", "-p", "#{alternate_on}").strip() == "1"

    def _call(self, *arguments: str) -> str:
        assert TMUX is not None
        done = subprocess.run([TMUX, "-S", str(self._socket), *arguments], check=True, capture_output=True, text=True)
        return done.stdout

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._call("kill-server")
