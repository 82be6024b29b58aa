"""A run as a trace for ui.perfetto.dev or chrome://tracing: every span, arrows from target to training, counters of queues.

The format is Chrome's JSON trace events: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
(complete events "X", flows "s" and "f", counters "C", names "M"). Times are microseconds since the run's begin.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from slipstream.observe.states import STATES
from slipstream.report.reading import RunData
from slipstream.report.spans import Samples, Spans
from slipstream.report.times import worker_order

COUNTERS_PID = 1
FIRST_WORKER_PID = 2
MADE = ("target",)
USED = ("forward", "forward_backward")
QUEUE_COUNTERS = ("ready", "issued", "free")
GPU_COUNTERS = ("utilisation", "sm_active", "tensor_active")


@dataclass(frozen=True, slots=True)
class _Stage:
    """One span that makes or uses a pack. Times in microseconds."""

    pack: int
    start: float
    micros: float
    made: bool
    pid: int
    tid: int


def write_trace(run: RunData, path: Path) -> int:
    """Write the trace, gzipped when the name ends in ".gz", and return how many events it holds. Raises `OSError`."""
    count = 0
    with ExitStack() as stack:
        file: BinaryIO | gzip.GzipFile = stack.enter_context(path.open("wb"))
        if path.suffix == ".gz":
            file = stack.enter_context(gzip.GzipFile(fileobj=file, mode="wb", mtime=0))
        about = json.dumps({"run": run.name, "begin_unix_seconds": run.begin})
        file.write(f'{{"displayTimeUnit":"ms","otherData":{about},"traceEvents":[\n'.encode())
        for event in trace_events(run):
            file.write((",\n" if count else "").encode() + event.encode())
            count += 1
        file.write(b"\n]}\n")
    return count


def trace_events(run: RunData) -> Iterator[str]:
    """Every event as JSON text: names first, then spans by worker and lane, flows, counters."""
    workers = sorted(run.spans, key=worker_order)
    pids = {worker: FIRST_WORKER_PID + place for place, worker in enumerate(workers)}
    yield _name("process_name", "queues and GPUs", pid=COUNTERS_PID)
    for worker in workers:
        spans = run.spans[worker]
        gpu = f" (GPU {spans.gpu})" if spans.gpu is not None else ""
        yield _name("process_name", worker + gpu, pid=pids[worker])
        yield json.dumps({"ph": "M", "name": "process_sort_index", "pid": pids[worker], "args": {"sort_index": pids[worker]}})
        for code, lane in enumerate(spans.lane_names):
            yield _name("thread_name", lane, pid=pids[worker], tid=code + 1)
    for worker in workers:
        yield from _span_events(run.spans[worker], pid=pids[worker], begin=run.begin)
    yield from _flow_events(run, pids=pids)
    yield from _counter_events(run.queues, key="rank", title="queue of rank", names=QUEUE_COUNTERS, begin=run.begin)
    yield from _counter_events(run.gpus, key="gpu", title="GPU", names=GPU_COUNTERS, begin=run.begin)


def _name(kind: str, name: str, *, pid: int, tid: int = 0) -> str:
    return json.dumps({"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}})


def _span_events(spans: Spans, *, pid: int, begin: float) -> Iterator[str]:
    for code, lane in enumerate(spans.lane_names):
        of_lane = spans.of_lane(lane)
        of_lane = of_lane.pick(np.argsort(of_lane.start, kind="stable"))
        start = np.rint((of_lane.start - begin) * 1e6).astype(np.int64)
        micros = np.rint(of_lane.seconds * 1e6).astype(np.int64)
        # Two spans that overlap by a rounded microsecond would count as nested.
        micros[:-1] = np.minimum(micros[:-1], np.maximum(0, np.diff(start)))
        heads = [
            f'{{"ph":"X","pid":{pid},"tid":{code + 1},"name":{json.dumps(name)},"cat":"{_kind(name)}"'
            for name in of_lane.state_names
        ]
        columns = (of_lane.state, start, micros, of_lane.pack, of_lane.step)
        for state, at, took, pack, step in zip(*(column.tolist() for column in columns), strict=True):
            named = [f'"{key}":{value}' for key, value in (("pack", pack), ("step", step)) if value >= 0]
            yield f'{heads[state]},"ts":{at},"dur":{took},"args":{{{",".join(named)}}}}}'


def _kind(state: str) -> str:
    return STATES[state].kind if state in STATES else "work"


def _flow_events(run: RunData, *, pids: dict[str, int]) -> Iterator[str]:
    """One arrow for each training use: from the pack's newest forward of the target before it. A replay has its own arrow."""
    stages = [stage for worker, spans in run.spans.items() for stage in _stages(spans, pid=pids[worker], begin=run.begin)]
    stages.sort(key=lambda stage: (stage.pack, stage.start))
    made: _Stage | None = None
    number = 0
    for stage in stages:
        if stage.made:
            made = stage
        elif made is not None and made.pack == stage.pack:
            number += 1
            common = f'"cat":"pack","name":"pack {stage.pack}","id":{number}'
            # A flow belongs to the span that holds its time: the last moment of the one, the first of the other.
            left = made.start + max(0.0, made.micros - 1)
            yield f'{{"ph":"s",{common},"pid":{made.pid},"tid":{made.tid},"ts":{left:.0f}}}'
            yield f'{{"ph":"f","bp":"e",{common},"pid":{stage.pid},"tid":{stage.tid},"ts":{stage.start:.0f}}}'


def _stages(spans: Spans, *, pid: int, begin: float) -> Iterator[_Stage]:
    """Spans that make or use a pack, on the lane "gpu" where they are timed there, else on the lane "cpu"."""
    wanted = [code for code, name in enumerate(spans.state_names) if name in MADE + USED]
    for lane in ("gpu", "cpu"):
        chosen = spans.of_lane(lane)
        chosen = chosen.pick(np.isin(chosen.state, wanted) & (chosen.pack >= 0))
        if not len(chosen):
            continue
        tid = spans.lane_names.index(lane) + 1
        start = np.rint((chosen.start - begin) * 1e6)
        columns = (chosen.pack, start, np.rint(chosen.seconds * 1e6), chosen.state)
        for pack, at, micros, state in zip(*(column.tolist() for column in columns), strict=True):
            yield _Stage(pack=pack, start=at, micros=micros, made=spans.state_names[state] in MADE, pid=pid, tid=tid)
        return


def _counter_events(samples: Samples, *, key: str, title: str, names: tuple[str, ...], begin: float) -> Iterator[str]:
    times = np.rint((samples["time"] - begin) * 1e6)
    columns = {name: samples[name].tolist() for name in names if name in samples.columns}
    for row, (at, which) in enumerate(zip(times.tolist(), samples[key].tolist(), strict=True)):
        if np.isnan(at) or np.isnan(which):
            continue
        values: dict[str, Any] = {name: column[row] for name, column in columns.items() if not np.isnan(column[row])}
        yield json.dumps({"ph": "C", "pid": COUNTERS_PID, "name": f"{title} {which:.0f}", "ts": int(at), "args": values})
