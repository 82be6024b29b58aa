"""The report and the live page in a headless Chromium: what is drawn, what is asked for, what a hand can do with it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from browser import CHROMIUM, Page
from run_maker import make_run

from slipstream.report.html import report_page
from slipstream.report.reading import read_run
from slipstream.report.web import LiveServer, serve

pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is on PATH")]

SECTIONS = [
    "verdict", "key-figures", "lanes", "curves", "slots", "time", "stages", "queues", "gpus", "memory", "prediction",
    "validations", "mixing", "recipe", "environment",
]  # fmt: skip
CHARTS = [
    "Loss", "Acceptance length", "Context tokens per second", "Accuracy", "Gradient norm", "Seconds per step", "Learning rate",
    "Accuracy by slot", "Supervised tokens per second", "Anchors per second", "Token fill",
    "Anchor fill", "Memory of the process", "Memory on its GPU", "Packs ready", "Bytes ready", "Utilisation", "SM active",
    "Tensor active", "Memory in use", "Power", "PCIe out per second",
    "PCIe in per second",
]  # fmt: skip
COLOURS_OF = """((canvas) => {
  const pixels = new Uint32Array(canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.buffer);
  const counts = {};
  for (const pixel of pixels) counts[pixel] = (counts[pixel] || 0) + 1;
  return Object.values(counts).filter((count) => count > 40).length;
})"""
STROKED = """((canvas, colour) => {
  const wanted = Object.assign(document.createElement("canvas"), { width: 1, height: 1 }).getContext("2d");
  wanted.fillStyle = colour;
  wanted.fillRect(0, 0, 1, 1);
  const [red, green, blue] = wanted.getImageData(0, 0, 1, 1).data;
  const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  let found = 0;
  for (let i = 0; i < data.length; i += 4) {
    found += data[i + 3] > 100 && Math.abs(data[i] - red) + Math.abs(data[i + 1] - green) + Math.abs(data[i + 2] - blue) < 40;
  }
  return found;
})"""
SET = "(() => {{ const one = document.querySelector('{}'); one.value = '{}'; one.dispatchEvent(new Event('change')); }})()"
STATES_DRAWN = """(() => {
  const canvas = document.querySelector("canvas.main"), model = page.lanes.model;
  const pixels = new Uint32Array(canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.buffer);
  const counts = new Map();
  for (const pixel of pixels) counts.set(pixel, (counts.get(pixel) || 0) + 1);
  return model.stateNames.filter((_, code) => (counts.get(packedColour(model.colour(code))) || 0) > 400);
})()"""
MAIN = "document.querySelector('canvas.main')"
VIEW = "document.querySelector('#lanes .toolbar') && page.lanes.view"


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    with Page(tmp_path / "profile") as opened:
        yield opened


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_run(tmp_path_factory.mktemp("runs") / "made", steps=600, checkpoint_every=250)
    folder.schedule.mkdir()
    summary = {"packs": 1200, "mixing_mean": 0.1, "mixing_worst": 0.2, "refused": {"too_long": 1, "no_anchor": 2}}
    (folder.schedule / "schedule.json").write_text(json.dumps({"summary": summary}))
    path = folder.root / "report.html"
    path.write_text(report_page([read_run(folder.root)]))
    return path


@contextmanager
def served(folder: Path) -> Iterator[LiveServer]:
    with serve(folder, 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def colours(page: Page, canvas: str) -> int:
    """How many colours a canvas shows, small spots aside: one is a blank canvas."""
    return int(page.run(f"{COLOURS_OF}({canvas})"))


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_report_is_drawn_without_errors_or_requests(page: Page, report: Path, tmp_path: Path, dark: bool) -> None:
    page.show(width=1280, height=800, dark=dark)
    page.open(report.as_uri())
    assert page.run("[...document.querySelectorAll('main > section')].map((one) => one.id)") == SECTIONS
    charts = "[...document.querySelectorAll('.chart')].filter((one) => !one.hidden)"
    assert page.run(f"{charts}.map((one) => one.dataset.chart)") == CHARTS
    for name in CHARTS:
        first = "series[0].colour || seriesColour(0)" if name == "Accuracy by slot" else "seriesColour(0)"
        drawn = f"page.charts().find((one) => one.root.dataset.chart === '{name}')"
        assert (
            page.run(f"{STROKED}({drawn}.root.querySelector('canvas'), ((series) => {first})({drawn}.describe().series))") > 100
        ), name
    assert set(page.run(STATES_DRAWN)) >= {
        "target",
        "publish",
        "forward",
        "backward",
        "optimizer",
        "validate",
        "wait_input",
        "wait_slot",
    }
    assert colours(page, "document.querySelector('canvas.map')") >= 3
    fits = "document.documentElement.scrollWidth <= innerWidth && [...document.querySelectorAll('canvas.main')]"
    assert page.run(f"{fits}.every((one) => one.getBoundingClientRect().bottom < innerHeight)")
    background = page.run("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(20, 23, 26)") is dark
    page.screenshot(tmp_path / "report.png")
    assert (tmp_path / "report.png").stat().st_size > 20_000
    page.screenshot(tmp_path / "report-whole.png", whole=True)
    assert page.errors == []
    assert set(page.requests) <= {report.as_uri()}
    assert page.run("document.querySelector('#verdict .headline').textContent.length") > 20


def test_lanes_are_zoomed_down_to_a_single_pack_by_keys(page: Page, report: Path, tmp_path: Path) -> None:
    page.show(width=1280, height=800, dark=False)
    page.open(report.as_uri())
    page.run(f"{MAIN}.focus()")
    page.press("0")
    whole = page.run(VIEW)
    page.press("+")
    narrow = page.run(VIEW)
    assert narrow[1] - narrow[0] == pytest.approx(0.6 * (whole[1] - whole[0]))
    page.press("ArrowRight")
    assert page.run(VIEW)[0] == pytest.approx(narrow[0] + 0.2 * (narrow[1] - narrow[0]))
    page.press("0")
    assert page.run(VIEW) == whole
    page.run(SET.format("#lanes input", 300))
    page.settle()
    begin, end = page.run(VIEW)
    assert end - begin < 2e6
    # The first backward span of the step on the drafter's GPU: pointed at, then picked.
    place = """(() => {
      const view = page.lanes, row = view.placed.find(({ lane }) => lane.worker === "drafter-0" && lane.lane === "gpu");
      const span = row.lane.step.indexOf(300), box = view.canvas.getBoundingClientRect();
      return [box.x + view.x((row.lane.start[span] + row.lane.end[span]) / 2), box.y + row.y + row.height / 2];
    })()"""
    x, y = page.run(place)
    page.mouse("mouseMoved", x, y)
    page.settle()
    told = page.run("document.querySelector('.tooltip').hidden ? '' : document.querySelector('.tooltip').innerText")
    assert all(word in told for word in ("forward", "drafter-0", "600", "300", "duration"))
    page.mouse("mousePressed", x, y)
    page.mouse("mouseReleased", x, y)
    page.settle()
    story = page.run("document.querySelector('.picked').textContent")
    assert story.startswith("Pack 600: forward of the target on target-0")
    assert "drafter-0 in step 300" in story
    page.screenshot(tmp_path / "pack.png")
    page.press("Escape")
    assert "Pack" not in page.run("document.querySelector('.picked').textContent")
    page.mouse("mousePressed", x - 200, y)
    page.mouse("mouseMoved", x, y, buttons=1, button="left")
    page.mouse("mouseReleased", x, y)
    page.settle()
    dragged = page.run(VIEW)
    assert dragged[1] - dragged[0] == pytest.approx((end - begin) * 200 / page.run("page.lanes.plotWidth"), rel=0.02)
    assert page.errors == []


def test_the_lanes_of_ten_thousand_steps_are_drawn_quickly(page: Page, long_run: Path, tmp_path: Path) -> None:
    path = tmp_path / "long.html"
    path.write_text(report_page([read_run(long_run)]))
    page.show(width=1280, height=800, dark=False)
    page.open(path.as_uri())
    assert page.run("page.lanes.model.lanes.reduce((sum, lane) => sum + lane.length, 0)") == sum(
        map(len, read_run(long_run).spans.values())
    )
    milliseconds = page.run(
        "(() => { const began = performance.now(); page.lanes.draw(); return performance.now() - began; })()"
    )
    assert milliseconds < 500
    page.screenshot(tmp_path / "long.png")
    assert page.errors == []


def test_neighbouring_ticks_are_told_apart(page: Page, report: Path) -> None:
    page.open(report.as_uri())
    assert page.run("tickLabels([1, 1.0005, 1.001], formatNumber)") == ["1", "1.0005", "1.001"]
    assert page.run("tickLabels([0, 0.00005, 0.0001], formatShare)") == ["0.000 %", "0.005 %", "0.010 %"]
    assert page.run("tickLabels([0.1, 0.2, null], formatShare)") == ["10 %", "20 %", ""]


def test_runs_are_compared(page: Page, tmp_path: Path) -> None:
    folders = [
        make_run(tmp_path / name, steps=steps, workers=workers, seed=steps).root
        for name, steps, workers in (("split", 300, ("target-0", "drafter-0")), ("together", 200, ("worker-0", "worker-1")))
    ]
    path = tmp_path / "compare.html"
    path.write_text(report_page([read_run(folder) for folder in folders]))
    page.show(width=1280, height=800, dark=True)
    page.open(path.as_uri())
    assert page.run("document.querySelector('main > section').id") == "compare"
    assert "together" in page.run("document.querySelector('#compare').innerText")
    legend = page.run("document.querySelector('.chart .u-legend').innerText")
    assert "split" in legend
    assert "together" in legend
    page.run(SET.format("select", 1))
    page.settle()
    assert page.run("page.lanes.rows.map((lane) => lane.worker)") == ["worker-0", "worker-0", "worker-1", "worker-1"]
    assert page.run(STATES_DRAWN) == ["warm_up", "target", "forward", "backward", "optimizer"]
    page.screenshot(tmp_path / "compare.png")
    assert page.errors == []


def test_the_live_page_grows_with_the_run(page: Page, tmp_path: Path) -> None:
    whole = make_run(tmp_path / "whole", steps=200, began=time.time() - 100)
    live = make_run(tmp_path / "live", steps=0)
    names = ["metrics.jsonl", "queues.jsonl", "gpus.jsonl", *(f"spans/{path.name}" for path in whole.spans.iterdir())]
    names += [f"accounts/{path.name}" for path in whole.accounts.iterdir()]

    def grow(share: float) -> None:
        for name in names:
            lines = (whole.root / name).read_text().splitlines(keepends=True)
            (live.root / name).write_text("".join(lines[: max(1, int(len(lines) * share))]))

    def written(status: str, step: int) -> None:
        live.state.write_text(json.dumps({"status": status, "step": step, "steps": 200, "time": time.time()}))

    grow(0.5)
    written("training", 100)
    with served(live.root) as server:
        page.show(width=1280, height=800, dark=False)
        page.open(server.url)
        assert page.run("document.getElementById('status').textContent") == "training"
        before = page.run("page.lanes.model.lanes[0].length")
        assert page.run("page.lanes.view[1] - page.lanes.view[0]") == pytest.approx(60e6, rel=0.2)
        page.screenshot(tmp_path / "live.png")
        grow(1.0)
        written("finished", 200)
        page.wait_for("document.getElementById('status').textContent === 'finished'")
        page.settle()
        assert page.run("page.lanes.model.lanes[0].length") > 1.8 * before
        assert page.run("page.model.train.step.length") == 200
        assert "200 of 200" in page.run("document.getElementById('progress').textContent")
        assert set(page.run(STATES_DRAWN)) >= {"target", "forward", "backward", "wait_input"}
        page.screenshot(tmp_path / "live-end.png")
        assert page.errors == []
        assert all(address.startswith((server.url, "data:,")) for address in page.requests)
    page.wait_for("document.getElementById('footer').textContent.startsWith('No answer')")
