"""The live page of a run, served to this machine alone: the report's lanes and curves, asked for anew each second.

Only the address 127.0.0.1 is listened on, and only requests that name this machine as their host are answered, so that a page
from elsewhere cannot read a run through a name that it points here (DNS rebinding).
"""

from __future__ import annotations

import logging
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from slipstream.errors import UsageError
from slipstream.report.html import live_page, to_json
from slipstream.report.payload import Cursor, Told, run_payload, tell
from slipstream.report.reading import RunData, RunReader

ADDRESS = "127.0.0.1"
DEFAULT_PORT = 7007
LIVE_WINDOW_SECONDS = 300.0
"""The verdict of a run that goes on is of so many of its newest seconds."""
TELL_SHARE = 0.1
"""Share of one core's time that telling figures and verdict may take while a page is open."""
HOSTS = frozenset({ADDRESS, "localhost", "[::1]"})

log = logging.getLogger(__name__)


class LiveRun:
    """A run folder and the lock around its reader: requests come in several threads."""

    def __init__(self, folder: Path) -> None:
        self._reader = RunReader(folder)
        self._lock = threading.Lock()
        self.name = self._reader.refresh().name
        self._told: Told | None = None
        self._told_of: str | None = None
        self._tell_again = 0.0

    def data(self, *, since: Cursor | None) -> dict[str, Any]:
        """What the page does not have yet."""
        with self._lock:
            run = self._reader.refresh()
            told = self._tell(run)
        return {"runs": [run_payload(run, told=told, since=since)]}

    def _tell(self, run: RunData) -> Told:
        """Figures and verdict, told anew when the run's status changes and else as seldom as keeps their cost small."""
        began = time.monotonic()
        if self._told is None or run.state.get("status") != self._told_of or began >= self._tell_again:
            self._told = tell(run, window=None if run.ended else LIVE_WINDOW_SECONDS)
            ended = time.monotonic()
            self._told_of, self._tell_again = run.state.get("status"), ended + (ended - began) / TELL_SHARE
        return self._told


class LiveServer(ThreadingHTTPServer):
    """Serves one run. `serve_forever` answers until `shutdown`; `server_close` gives the port back."""

    daemon_threads = True

    def __init__(self, run: LiveRun, *, port: int) -> None:
        self.run = run
        super().__init__((ADDRESS, port), _Handler)

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://{ADDRESS}:{self.server_address[1]}/"


def serve(run_folder: Path, port: int = DEFAULT_PORT) -> LiveServer:
    """A server of a run's live page that listens already; port 0 takes any free one.

    Raises `UsageError` when the folder holds no run or the port cannot be had.
    """
    run = LiveRun(run_folder)
    try:
        return LiveServer(run, port=port)
    except (OSError, OverflowError) as error:
        raise UsageError(
            key="--port", value=port, rule=f"cannot be listened on: {error}", hint="0 takes any free one"
        ) from error


class _Handler(BaseHTTPRequestHandler):
    server: LiveServer
    server_version = "slipstream"
    sys_version = ""

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        host = self.headers.get("Host", "").lower()
        if host.rpartition(":")[0] not in HOSTS and host not in HOSTS:
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", "this page is for this machine alone")
        elif asked.path == "/":
            self._answer(HTTPStatus.OK, "text/html", live_page(title=self.server.run.name))
        elif asked.path == "/data":
            since = parse_qs(asked.query).get("since", [""])[0]
            self._answer(HTTPStatus.OK, "application/json", to_json(self.server.run.data(since=Cursor.parse(since))))
        else:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", "there is nothing here")

    def _answer(self, status: HTTPStatus, kind: str, text: str) -> None:
        body = text.encode("utf-8")
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.end_headers()
        try:
            self.wfile.write(body)
        except (BrokenPipeError, ConnectionResetError):
            log.debug("the page went away before its answer")

    def log_message(self, format: str, *arguments: Any) -> None:
        log.debug(format, *arguments)
