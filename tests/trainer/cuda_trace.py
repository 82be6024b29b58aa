"""A trace of a run's steps by CUPTI, and what in it makes a thread wait for the GPU or asks the driver for memory."""

from __future__ import annotations

import json
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from slipstream.launch.bench.counters import PAGEABLE, WAITING_CALLS
from slipstream.trainer.hooks import Hook

WINDOW = "traced steps"


@dataclass
class Trace:
    """What a window of a trace holds: forbidden calls by (name, thread), pageable copies, launches of kernels and of graphs."""

    forbidden: Counter = field(default_factory=Counter)
    pageable: Counter = field(default_factory=Counter)
    launches: int = 0
    graph_launches: int = 0


def thread_ids(name: str) -> set[int]:
    """The ids that a trace may give to the threads of that name: the kernel's, or the low half of the pthread's, whose sign
    the profiler drops."""
    ids: set[int] = set()
    for thread in threading.enumerate():
        if thread.name == name and thread.ident is not None and thread.native_id is not None:
            low = thread.ident & 0xFFFFFFFF
            signed = low - (1 << 32) if low >= 1 << 31 else low
            ids |= {thread.native_id, thread.ident, low, signed, abs(signed)}
    return ids


def read_trace(path: Path, *, but: set[int]) -> Trace:
    """The window of a trace, without the calls of the threads `but`."""
    events = json.loads(path.read_text())["traceEvents"]
    (window,) = (event for event in events if event.get("name") == WINDOW and event.get("cat") == "user_annotation")
    first, last = float(window["ts"]), float(window["ts"]) + float(window["dur"])
    trace = Trace()
    for event in events:
        if not first <= float(event.get("ts", -1)) <= last:
            continue
        name, kind = event.get("name", ""), event.get("cat", "")
        if kind in ("cuda_runtime", "cuda_driver"):
            trace.launches += "LaunchKernel" in name
            trace.graph_launches += "GraphLaunch" in name
            if WAITING_CALLS.search(name) and int(event["tid"]) not in but:
                trace.forbidden[name, event["tid"]] += 1
        elif kind == "gpu_memcpy" and PAGEABLE in name:
            trace.pageable[name] += 1
    return trace


class TracedSteps(Hook):
    """Runs the steps from `first` to `last` with synchronising calls an error, and under a profiler.

    Stands last, so that the window ends when all that belongs to a step has been done.
    """

    def __init__(self, path: Path, *, first: int, last: int) -> None:
        self._path, self._first, self._last = path, first, last
        self._profile = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
        self._window = record_function(WINDOW)
        self.waiters: set[int] = set()
        """Threads whose part it is to wait: they prepare steps and write checkpoints."""
        self.num_steps = self.num_checkpoints = 0

    def before_step(self, step: int) -> None:
        if step == self._first:
            self._profile.start()
            self._window.__enter__()
            torch.cuda.set_sync_debug_mode("error")
        self.waiters |= thread_ids("step-prefetch") | thread_ids("checkpoint")

    def after_step(self, step: int, records) -> None:
        if self._first < step <= self._last:
            self.num_steps += 1

    def on_checkpoint(self, step: int) -> None:
        self.waiters |= thread_ids("checkpoint")
        self.num_checkpoints += self._first < step <= self._last
        if step == self._last:  # a checkpoint ends the window
            torch.cuda.set_sync_debug_mode("default")
            self._window.__exit__(None, None, None)
            self._profile.stop()
            self._profile.export_chrome_trace(str(self._path))
