"""The last word of a run: its verdict, read from its own folder. A fault in here is reported and changes nothing."""

from __future__ import annotations

import logging
from pathlib import Path

from slipstream.report.reading import read_run
from slipstream.report.verdict import Verdict, judge

log = logging.getLogger(__name__)


def closing_verdict(root: Path) -> Verdict | None:
    """What limited the run and how far off its prediction was; none where that cannot be told."""
    try:
        return judge(read_run(root))
    except Exception:  # monitoring's border: the run is over and good, whatever its records look like
        log.warning("the verdict on %s could not be made", root.name, exc_info=True)
        return None
