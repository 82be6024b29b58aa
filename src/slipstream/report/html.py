"""One self-contained HTML file of one run, or of several beside one another: no outside request, under 10 MB.

Charts are uPlot's (assets/uplot.min.js, MIT: 50 KB, drawn on canvas, fast at 10,000 points); lanes are our own script.
"""

from __future__ import annotations

import html
import json
import math
import string
import time
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

import slipstream
from slipstream.report.lanes import MOST_SPANS, state_table
from slipstream.report.payload import run_payload
from slipstream.report.reading import RunData

SCRIPTS = (
    "uplot.min.js", "format.js", "decode.js", "model.js", "lanes.js", "lane_marks.js", "lane_input.js", "curves.js",
    "health.js", "details.js", "compare.js", "main.js",
)  # fmt: skip
STYLES = ("uplot.min.css", "style.css")


def report_page(runs: Sequence[RunData]) -> str:
    """The report of one or more runs as the text of an HTML file. Several share the room that one has for spans."""
    assert runs, "a report is of at least one run"
    payloads = [run_payload(run, most_spans=MOST_SPANS // len(runs)) for run in runs]
    title = " · ".join(dict.fromkeys(run.name for run in runs))
    return _page(title=title, connect="'none'", payload={"live": False, "runs": payloads})


def live_page(*, title: str) -> str:
    """The page that asks its own server for a run's data, each second."""
    return _page(title=title, connect="'self'", payload={"live": True, "runs": []})


def to_json(value: Any) -> str:
    """Compact JSON; NaN and infinities are null, as charts take them."""
    return json.dumps(_finite(value), separators=(",", ":"), allow_nan=False)


def _page(*, title: str, connect: str, payload: Mapping[str, Any]) -> str:
    made = time.strftime("%Y-%m-%d %H:%M")
    words = f"Slipstream {slipstream.__version__}" + ("" if payload["live"] else f", report made {made}")
    script = "\n".join(read_asset(name) for name in SCRIPTS)
    # "</script>" or "<!--" within data would end the element that holds it.
    data = to_json({**payload, "states": state_table(), "words": words}).replace("<", "\\u003c")
    return string.Template(read_asset("page.html")).substitute(
        title=html.escape(title),
        connect=connect,
        style="\n".join(read_asset(name) for name in STYLES),
        payload=data,
        script=script,
    )


def read_asset(name: str) -> str:
    """Text of a file that comes with the package."""
    return resources.files("slipstream.report").joinpath("assets", name).read_text("utf-8")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return value
