"""A headless Chromium driven over its debugging pipe, with the standard library alone. It ends with its own process group."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
FLAGS = (
    "--headless=new", "--remote-debugging-pipe", "--no-first-run", "--no-default-browser-check", "--disable-gpu",
    "--disable-dev-shm-usage", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars",
)  # fmt: skip


class Page:
    """One tab. `errors` holds console errors and exceptions, `requests` every address that it asked for."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        to_child, self._out = os.pipe()
        self._in, from_child = os.pipe()

        def as_three_and_four() -> None:
            kept = os.dup(to_child), os.dup(from_child)
            os.dup2(kept[0], 3)
            os.dup2(kept[1], 4)

        root = ["--no-sandbox"] if os.geteuid() == 0 else []
        self._process = subprocess.Popen(
            [CHROMIUM, *FLAGS, *root, f"--user-data-dir={profile}", "about:blank"],
            preexec_fn=as_three_and_four, close_fds=False, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_child)
        os.close(from_child)
        self._held = b""
        self._number = 0
        self._session: str | None = None
        self.errors: list[str] = []
        self.requests: list[str] = []
        targets = self.call("Target.getTargets")["targetInfos"]
        target = next(one["targetId"] for one in targets if one["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command and its result; events that come meanwhile are kept."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + 60
        while True:
            answer = self._receive(deadline - time.monotonic())
            assert answer is not None, f"no answer to {method}"
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return dict(answer["result"])

    def show(self, *, width: int, height: int, dark: bool) -> None:
        """Size of the window and colour scheme."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, address: str) -> None:
        """Load an address and wait until the page says that it is ready."""
        self.call("Page.navigate", url=address)
        self.wait_for("document.body && document.body.dataset.ready === 'yes'")
        self.settle()

    def settle(self) -> None:
        """Wait until everything that was asked for is drawn."""
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 120))))")

    def run(self, script: str) -> Any:
        """Value of an expression in the page; a promise is waited for."""
        result = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, (script, result["exceptionDetails"])
        return result["result"].get("value")

    def wait_for(self, script: str, *, seconds: float = 30) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + seconds
        while not self.run(script):
            assert time.monotonic() < deadline, (script, self.errors)
            self._receive(0.05)

    def press(self, key: str) -> None:
        """A key, down and up, where the focus is."""
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)
        self.settle()

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """A mouse event: mouseMoved, mousePressed, mouseReleased."""
        pressed = {"button": "left", "clickCount": 1} if kind != "mouseMoved" else {}
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **{**pressed, **more})

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """A picture of the window, or of the whole page."""
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))

    def _receive(self, seconds: float) -> dict[str, Any] | None:
        """The next message within some seconds."""
        deadline = time.monotonic() + seconds
        while b"\0" not in self._held:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                return None
            read = os.read(self._in, 1 << 20)
            assert read, "the browser is gone"
            self._held += read
        message, _, self._held = self._held.partition(b"\0")
        answer = json.loads(message)
        self._note(answer.get("method", ""), answer.get("params", {}))
        return dict(answer)

    def _note(self, method: str, told: Mapping[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            details = told["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"):
            self.errors.append(str([one.get("value", one.get("description")) for one in told["args"]]))
        elif method == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.errors.append(told["entry"]["text"])

    def __enter__(self) -> Page:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        os.close(self._out)
        os.close(self._in)
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)  # its own group, made by start_new_session
            self._process.wait()
