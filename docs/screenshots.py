"""The pictures of a report that the pages show: `python docs/screenshots.py RUN` writes them into docs/pictures.

Needs Chromium on PATH, which is driven as in the browser tests.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "report"))

from browser import Page  # noqa: E402

from slipstream.report.html import report_page  # noqa: E402
from slipstream.report.reading import read_run  # noqa: E402

PICTURES = ROOT / "docs" / "pictures"
WIDTH, HEIGHT = 1280, 800
STEP = 100
"""The step that is zoomed in on."""
SHOW_STEP = f"""(() => {{
  const field = document.querySelector("#lanes input");
  field.value = "{STEP}";
  field.dispatchEvent(new Event("change"));
}})()"""
WIDEN = """(() => {
  const [begin, end] = page.lanes.view, wide = end - begin;
  page.lanes.setView(begin - 2 * wide, end + 2 * wide);
})()"""
PACK = """((step) => {
  const view = page.lanes, [begin, end] = view.view;
  const of = (worker) => view.placed.find(({ lane }) => lane.worker === worker && lane.lane === "cpu");
  const made = of("target-0").lane, row = of("drafter-0"), { lane } = row;
  const seen = new Set(Array.from(made.pack).filter((pack, index) => pack >= 0 && made.start[index] > begin));
  const span = lane.step.findIndex((one, index) => one >= step && lane.end[index] < end && seen.has(lane.pack[index]));
  const box = view.canvas.getBoundingClientRect();
  return [box.x + view.x((lane.start[span] + lane.end[span]) / 2), box.y + row.y + row.height / 2];
})"""


def main(run: Path) -> None:
    """Open the report of a run and photograph its parts."""
    with tempfile.TemporaryDirectory() as place, Page(Path(place) / "profile") as page:
        report = Path(place) / "report.html"
        report.write_text(report_page([read_run(run)]))
        page.show(width=WIDTH, height=HEIGHT, dark=False)
        page.open(report.as_uri())
        page.screenshot(PICTURES / "report.png")
        page.run(SHOW_STEP)
        page.settle()
        page.run(WIDEN)
        page.settle()
        x, y = page.run(f"{PACK}({STEP})")
        page.mouse("mousePressed", x, y)
        page.mouse("mouseReleased", x, y)
        page.settle()
        photograph(page, "lanes", PICTURES / "report-pack.png")
        photograph(page, "time", PICTURES / "report-time.png")
        assert page.errors == [], page.errors


def photograph(page: Page, section: str, path: Path) -> None:
    """One section of the page, the window as high as that section."""
    shown = f"one.style.display = one.id === '{section}' ? '' : 'none'"
    page.run(f"document.querySelectorAll('main > section').forEach((one) => {{ {shown}; }})")
    height = page.run(f"document.getElementById('{section}').getBoundingClientRect().bottom + scrollY + 12")
    page.show(width=WIDTH, height=int(height), dark=False)
    page.settle()
    page.screenshot(path)
    page.show(width=WIDTH, height=HEIGHT, dark=False)
    page.run("document.querySelectorAll('main > section').forEach((one) => { one.style.display = ''; })")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
