"""The site in a headless Chromium: nothing is asked for elsewhere, nothing goes wrong, the search finds a key."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from browser import CHROMIUM, Page

pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is on PATH")]


class Quiet(SimpleHTTPRequestHandler):
    """Serves a folder and says nothing."""

    def log_message(self, format: str, *args: object) -> None:
        """Nobody reads it."""


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_pages_are_drawn_and_ask_for_nothing_elsewhere(address: str, site: Path, tmp_path: Path, dark: bool) -> None:
    with Page(tmp_path / "profile") as page:
        page.show(width=1280, height=800, dark=dark)
        for path in sorted(site.glob("*.html")):
            page.call("Page.navigate", url=address + path.name)
            page.wait_for(f"document.readyState === 'complete' && location.pathname === '/{path.name}'")
            page.settle()
            assert page.run("document.documentElement.scrollWidth <= innerWidth"), path.name
            assert page.run("[...document.images].every((one) => one.naturalWidth > 0)"), path.name
            page.screenshot(tmp_path / f"{path.stem}.png")
        assert page.errors == []
        assert {request for request in page.requests if not request.startswith((address, "data:", "blob:"))} == set()


def test_the_search_finds_a_key(address: str, tmp_path: Path) -> None:
    with Page(tmp_path / "profile") as page:
        page.show(width=1280, height=800, dark=False)
        page.call("Page.navigate", url=address + "index.html")
        page.wait_for("document.readyState === 'complete' && location.pathname === '/index.html'")
        page.run("document.querySelector('.md-search__input').focus()")
        page.wait_for("document.querySelector('.md-search-result__meta') !== null")
        page.run("""(() => {
          const field = document.querySelector(".md-search__input");
          field.value = "replay_distance";
          field.dispatchEvent(new Event("keyup"));
        })()""")
        page.wait_for("document.querySelectorAll('.md-search-result__item a[href*=recipe]').length > 0")
        assert page.errors == []
