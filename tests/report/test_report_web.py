"""The live page's server: this machine alone, one run, what is newer than what the page has."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
from run_maker import make_run, train_line

from slipstream.errors import UsageError
from slipstream.report.codec import decode
from slipstream.report.web import LiveServer, serve


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LiveServer]:
    folder = make_run(tmp_path / "live", steps=20)
    folder.state.write_text(json.dumps({"status": "training", "step": 20, "steps": 100}))
    with serve(folder.root, 0) as served:
        thread = threading.Thread(target=served.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield served
        finally:
            served.shutdown()
            thread.join()


def ask(server: LiveServer, path: str, *, host: str | None = None, method: str = "GET") -> tuple[int, str, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=30)
    connection.request(method, path, headers={"Host": host} if host else {})
    answer = connection.getresponse()
    found = answer.status, answer.headers.get("Content-Type", ""), answer.read()
    connection.close()
    return found


def data(server: LiveServer, since: str = "") -> dict[str, Any]:
    status, kind, body = ask(server, f"/data?since={quote(since)}")
    assert (status, kind) == (200, "application/json; charset=utf-8")
    [run] = json.loads(body)["runs"]
    return dict(run)


def test_it_listens_on_this_machine_alone(server: LiveServer) -> None:
    assert server.server_address[0] == "127.0.0.1"
    assert server.url == f"http://127.0.0.1:{server.server_address[1]}/"


@pytest.mark.parametrize("host", ["localhost", "localhost:9000", "127.0.0.1", "127.0.0.1:9000", "[::1]:9000", "LOCALHOST"])
def test_hosts_of_this_machine_are_answered(server: LiveServer, host: str) -> None:
    assert ask(server, "/", host=host)[0] == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil:1", "192.168.1.5:80"]
)
def test_other_hosts_are_refused(server: LiveServer, host: str) -> None:
    for path in ("/", "/data"):
        status, _, body = ask(server, path, host=host)
        assert status == 403
        assert b"live" not in body


def test_there_is_a_page_and_data_and_nothing_else(server: LiveServer) -> None:
    status, kind, body = ask(server, "/")
    assert (status, kind) == (200, "text/html; charset=utf-8")
    assert b"connect-src 'self'" in body
    for path in ("/state.json", "/../state.json", "/data/", "/page.html"):
        assert ask(server, path)[0] == 404
    assert ask(server, "/data", method="POST")[0] == 501


def test_data_is_whole_at_first_then_only_what_is_newer(server: LiveServer, tmp_path: Path) -> None:
    first = data(server)
    assert first["whole"]
    assert decode(first["train"]["step"]).tolist() == list(range(20))
    with (tmp_path / "live" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(train_line(20, seconds=0.5, rng=np.random.default_rng(0))) + "\n")
    second = data(server, first["cursor"])
    assert not second["whole"]
    assert decode(second["train"]["step"]).tolist() == [20]
    assert second["lanes"] == []
    deadline = time.monotonic() + 30
    while data(server, second["cursor"])["figures"]["step"] != 21:
        assert time.monotonic() < deadline
    assert data(server, "nonsense")["whole"]


def test_the_end_of_a_run_is_told_at_once(server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.report.web.TELL_SHARE", 1e-6)
    assert data(server)["figures"]["status"] == "training"
    (tmp_path / "live" / "state.json").write_text(json.dumps({"status": "training", "step": 20, "steps": 99}))
    assert data(server)["figures"]["steps"] == 100
    (tmp_path / "live" / "state.json").write_text(json.dumps({"status": "interrupted", "step": 20, "steps": 99}))
    assert data(server)["figures"]["status"] == "interrupted"


def test_a_port_that_is_taken_and_a_folder_without_a_run_are_refused(server: LiveServer, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--port"):
        serve(tmp_path / "live", server.server_address[1])
    with pytest.raises(UsageError, match="--port = 70000"):
        serve(tmp_path / "live", 70_000)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="no run folder"):
        serve(tmp_path / "empty", 0)
