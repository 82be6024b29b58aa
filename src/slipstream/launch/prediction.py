"""`prediction.json` of a run, as far as memory goes: written before the start, put beside what was measured at the end."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slipstream.device.allocated import off_by
from slipstream.plan.memory import GIB, MemoryPlan
from slipstream.plan.placement import Placement

log = logging.getLogger(__name__)


def write_memory(path: Path, *, plan: MemoryPlan, placement: Placement) -> None:
    """Put every process's parts at its peak under "memory", on CUDA those of the host under "host"; what else is there stays.

    "otherwise" has the peak with every choice of stages that warm-up may have replayed, as it was planned or not.
    """
    by_role = {process.role: process for process in plan.of(placement.mode)}
    specs = [(spec.role, spec.rank) for spec in placement.processes]
    if "answers" in by_role:
        specs.append(("answers", 0))  # type: ignore[arg-type]
    rows = [
        {
            "role": role,
            "rank": rank,
            "bytes": by_role[role].peak_bytes,
            "moment": by_role[role].peak_moment,
            "parts": {item.name: item.nbytes for item in by_role[role].at_peak()},
            "replayed": by_role[role].replayed,
            "outside_bytes": by_role[role].outside_bytes,
            "otherwise": [
                {"replayed": other.replayed, "bytes": other.peak_bytes}
                for other in plan.alternatives
                if (other.placement, other.role) == (placement.mode, role)
            ],
        }
        for role, rank in specs
    ]
    content = json.loads(path.read_text()) if path.is_file() else {}
    host = plan.host_of(placement.mode)
    if host is not None:
        content["host"] = {"bytes": host.peak_bytes, "parts": {item.name: item.nbytes for item in host.at_peak()}}
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps({**content, "memory": rows}, indent=1))
    os.replace(temporary, path)


def compare(path: Path, worker: str, payload: Mapping[str, Any]) -> dict[str, Any]:
    """What a worker ("drafter-0") measured beside what was predicted for it, for a line of metrics; the log is told too.

    Of the predictions it is the one for the stages that were replayed indeed.
    """
    name, _, number = worker.partition("-")
    role, rank = {"worker": "colocated"}.get(name, name), int(number or 0)
    measured = dict(payload["memory"])
    rows = json.loads(path.read_text())["memory"] if path.is_file() else []
    row = next((row for row in rows if (row["role"], row["rank"]) == (role, rank)), None)
    predicted = None if row is None else _predicted(row, replayed=list(measured.get("replayed", ())))
    if predicted is not None:
        log.info("%s: %s", worker, words(predicted=predicted, measured=measured["peak_bytes"]))
    return {"worker": worker, "role": role, "rank": rank, "predicted_bytes": predicted, **measured}


def _predicted(row: Mapping[str, Any], *, replayed: Sequence[str]) -> int:
    found = (other["bytes"] for other in row["otherwise"] if list(other["replayed"]) == list(replayed))
    return int(next(found, row["bytes"]))


def words(*, predicted: int, measured: int) -> str:
    """ "predicted X GiB, measured Y GiB, off Z %" of the memory of one process."""
    return (
        f"predicted {predicted / GIB:.2f} GiB, measured {measured / GIB:.2f} GiB, "
        f"off {off_by(predicted=predicted, measured=measured):+.1%}"
    )
